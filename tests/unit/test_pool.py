"""The pool models follow CuPy's rules: against a slow second implementation, known traces, and the planned slab."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidnn.device.pool import PinnedPoolModel, PoolModel, PoolOutOfMemory
from minidnn.schedule.placement import place
from tests.unit.rows import alloc, free, value

MB = 1_000_000


class SlowPool:
    """The rules again, as a list of (allocation, offset, bytes, stream, freed at): None while in use."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.clock, self.parts = limit, 0, []  # type: ignore[var-annotated]
        self.allocations = 0

    def held(self) -> int:
        return sum(part[2] for part in self.parts)

    def used(self) -> int:
        return sum(part[2] for part in self.parts if part[4] is None)

    def malloc(self, nbytes: int, stream: str) -> list[object] | None:
        size = -(-nbytes // 512) * 512
        self.clock += 1
        fits = [p for p in self.parts if p[4] is not None and p[3] == stream and p[2] >= size]
        if fits:
            smallest = min(p[2] for p in fits)
            part = max((p for p in fits if p[2] == smallest), key=lambda p: p[4])
            if part[2] > size:
                self.parts.append([part[0], part[1] + size, part[2] - size, stream, self.clock])
            part[2], part[4] = size, None
            return part
        if self.limit is not None and self.held() + size > self.limit:
            whole = {a for a in range(self.allocations) if len([p for p in self.parts if p[0] == a]) == 1}
            self.parts = [p for p in self.parts if p[4] is None or p[0] not in whole]
            if self.held() + size > self.limit:
                return None
        part = [self.allocations, 0, size, stream, None]
        self.allocations += 1
        self.parts.append(part)
        return part

    def free(self, part: list[object]) -> None:
        self.clock += 1
        part[4] = self.clock
        for _ in range(2):
            for other in self.parts:
                if other is part or other[0] != part[0] or other[4] is None:
                    continue
                if other[1] + other[2] == part[1] or part[1] + part[2] == other[1]:
                    self.parts.remove(other)
                    part[1], part[2] = min(other[1], part[1]), other[2] + part[2]
                    break


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from((1, 512, 513, 2048, 5000, 20_000)), st.sampled_from("ab")),
        min_size=1,
        max_size=120,
    ),
    st.sampled_from((None, 30_000, 60_000)),
)
def test_every_trace_holds_what_a_slow_second_implementation_holds(
    trace: list[tuple[int, int, str]], limit: int | None
) -> None:
    pool, slow = PoolModel(limit), SlowPool(limit)
    alive: list[tuple[int, list[object]]] = []
    for choice, nbytes, stream in trace:
        if choice < 4 and alive:
            block, part = alive.pop(choice * len(alive) // 4)
            pool.free(block)
            slow.free(part)
        else:
            expected = slow.malloc(nbytes, stream)
            if expected is None:
                with pytest.raises(PoolOutOfMemory):
                    pool.malloc(nbytes, stream)
            else:
                alive.append((pool.malloc(nbytes, stream), expected))
        assert (pool.used_bytes, pool.held_bytes) == (slow.used(), slow.held())
        assert pool.largest_hole == max((p[2] for p in slow.parts if p[4] is not None), default=0)
        assert pool.device_allocations == slow.allocations
        assert limit is None or pool.held_bytes <= limit
        assert pool.peak_used_bytes >= pool.used_bytes and pool.peak_held_bytes >= pool.held_bytes


def test_requests_are_rounded_to_512_bytes_and_nothing_costs_nothing() -> None:
    pool = PoolModel()
    for nbytes, rounded in ((0, 0), (1, 512), (512, 512), (513, 1024)):
        before = pool.used_bytes
        pool.malloc(nbytes)
        assert pool.used_bytes - before == rounded


def test_a_small_request_splits_a_huge_cached_block_which_then_cannot_be_returned() -> None:
    pool = PoolModel(limit=10_240)
    pool.free(pool.malloc(8192))
    small = pool.malloc(1)
    pool.free_all_blocks()
    assert (pool.used_bytes, pool.held_bytes, pool.largest_hole) == (512, 8192, 7680)
    with pytest.raises(PoolOutOfMemory) as failure:
        pool.malloc(8192)
    error = failure.value
    assert (error.nbytes, error.used_bytes, error.held_bytes, error.limit) == (8192, 512, 8192, 10_240)
    assert "8192" in str(error) and "10240" in str(error)
    assert error.used_bytes + error.nbytes <= error.limit  # it would fit without the split
    pool.free(small)
    pool.malloc(8192)
    assert pool.held_bytes == 8192


def test_freed_neighbours_become_one_block_again_in_any_order() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        pool = PoolModel()
        pool.free(pool.malloc(3 * 512))
        blocks = [pool.malloc(512) for _ in range(3)]
        for index in order:
            pool.free(blocks[index])
        assert (pool.largest_hole, pool.fragmentation, pool.device_allocations) == (3 * 512, 0.0, 1)
        pool.free_all_blocks()
        assert pool.held_bytes == 0


def test_what_is_left_of_a_split_block_merges_with_the_block_behind_it() -> None:
    pool = PoolModel()
    pool.free(pool.malloc(8 * 512))
    pool.malloc(512)
    middle, last = pool.malloc(4 * 512), pool.malloc(3 * 512)
    pool.free(middle)
    pool.malloc(512)  # leaves 3 blocks between itself and the last
    pool.free(last)
    assert (pool.largest_hole, pool.held_bytes) == (6 * 512, 8 * 512)


def test_streams_do_not_share_what_they_cache() -> None:
    pool = PoolModel()
    pool.free(pool.malloc(4096, "compute"))
    pool.malloc(4096, "h2d")
    assert (pool.used_bytes, pool.held_bytes) == (4096, 8192)


def test_cached_blocks_are_returned_before_a_request_fails() -> None:
    """500 MB, free, 800 MB under a limit of 1 GB: a pool that only counts what it caches fails here."""
    for stream in ("compute", "d2h"):
        pool = PoolModel(limit=1000 * MB)
        pool.free(pool.malloc(500 * MB, stream))
        pool.malloc(800 * MB, "compute")
        assert pool.held_bytes == pool.used_bytes == 800_000_000


def test_alternating_batch_sizes_break_the_pool_under_a_limit_that_the_slab_meets() -> None:
    pool = PoolModel(limit=1000 * MB)
    for block in [pool.malloc(7 * size * MB) for size in (20, 40, 50)]:
        pool.free(block)
    sizes = [8 * size * MB for size in (20, 40, 50)]
    with pytest.raises(PoolOutOfMemory) as failure:
        for nbytes in sizes:
            pool.malloc(nbytes)
    assert failure.value.used_bytes + failure.value.nbytes <= 1000 * MB  # it is the holes
    values = [value(f"v{nbytes}", nbytes) for nbytes in sizes]
    assert place([*map(alloc, values), *map(free, values)]).extent == sum(sizes) <= 1000 * MB


def test_a_pool_fragments_where_the_planned_slab_does_not() -> None:
    """Random traces of large requests: the pool holds far more than was ever in use, the slab always less than the pool."""
    overheads, planned = [], []
    for seed in range(5):
        draw = random.Random(seed)
        values = [value(f"v{i}", draw.randrange(1, 400) * 5000) for i in range(120)]
        pool, rows, alive = PoolModel(), [], []
        for v in values:
            alive.append((v, pool.malloc(v.buffer.nbytes)))
            rows.append(alloc(v))
            while len(alive) > 12:
                old, block = alive.pop(draw.randrange(len(alive)))
                pool.free(block)
                rows.append(free(old))
        for old, block in alive:
            pool.free(block)
            rows.append(free(old))
        assert pool.used_bytes == 0 and pool.peak_held_bytes > pool.peak_used_bytes
        overheads.append(pool.peak_held_bytes / pool.peak_used_bytes)
        planned.append(place(rows).extent / pool.peak_used_bytes)
    assert min(overheads) > 1.1
    assert all(slab < held for slab, held in zip(planned, overheads, strict=True))


def test_pinned_blocks_are_powers_of_two_kept_for_their_own_size() -> None:
    """14 GB take 16, which is why the pinned slab is one exact allocation."""
    pool = PinnedPoolModel()
    for nbytes, grows in ((1, 512), (512, 0), (513, 1024), (14 * 10**9, 2**34), (2**34, 0), (0, 0), (2**34 + 1, 2**35)):
        before = pool.held_bytes
        block = pool.malloc(nbytes)
        assert pool.held_bytes - before == grows
        pool.free(block)
        assert pool.used_bytes == 0 and pool.held_bytes == before + grows
    held = pool.held_bytes
    pool.malloc(600)
    assert pool.held_bytes == held and pool.used_bytes == 1024
    pool.malloc(2**20)
    assert pool.held_bytes == held + 2**20  # 48 GiB lie free, of other sizes
    assert pool.peak_used_bytes == 2**35


@pytest.mark.parametrize("pool", [PoolModel(), PinnedPoolModel()])
def test_a_double_free_is_our_own_bug(pool: PoolModel | PinnedPoolModel) -> None:
    block = pool.malloc(512)
    pool.free(block)
    with pytest.raises(AssertionError, match="not in use"):
        pool.free(block)
