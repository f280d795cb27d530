"""The pool allocator runs the same rows to the same bits, needs what was predicted, and holds more than it uses (case C7)."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

import minidnn
from minidnn.device.pool import PoolModel
from minidnn.layers import Graph
from minidnn.pool_executor import PoolExecutor
from minidnn.schedule.instruction import DEVICE, HOST, Instruction, Op, Value
from minidnn.schedule.placement import place
from minidnn.schedule.simulate import live_curve, total_footprint
from minidnn.step import CompiledStep
from tests.step import nets
from tests.unit.rows import alloc, free, value

KEEP_AND_NAIVE = pytest.mark.parametrize("plan", [minidnn.keep(), minidnn.naive()], ids=lambda plan: plan.policy)


def pool_of(step: CompiledStep) -> PoolModel:
    assert isinstance(step.executor, PoolExecutor)
    return step.executor.pool


@KEEP_AND_NAIVE
@pytest.mark.parametrize("make", nets.NETS.values(), ids=list(nets.NETS))
def test_the_pool_gives_the_bits_of_the_slab_and_uses_the_predicted_peak(
    make: Callable[[], Graph], plan: minidnn.Plan
) -> None:
    graph = make()
    slab = minidnn.compile(graph, plan, nets.MOMENTUM, tail=2)
    pool = minidnn.compile(graph, plan, nets.MOMENTUM, allocator="pool", tail=2)
    assert nets.train(slab, 2) == nets.train(pool, 2)
    model = pool_of(pool)
    assert model.peak_used_bytes == pool.program["train"].profile.peak_bytes
    for step in (slab, pool):
        step.run(*nets.batch(graph, seed=7, samples=2))
    x, y = nets.batch(graph, seed=8)
    assert slab.evaluate(x).tobytes() == pool.evaluate(x).tobytes()
    assert nets.differing(slab.gradients(x, y), pool.gradients(x, y)) == []
    assert nets.differing(nets.state(slab), nets.state(pool)) == []
    assert model.peak_used_bytes == pool.profile.peak_bytes
    assert model.used_bytes == total_footprint(pool.program.persistent.buffers)
    assert model.held_bytes >= model.used_bytes and model.peak_held_bytes >= model.peak_used_bytes


def test_a_pool_holds_no_more_after_the_second_step() -> None:
    step = minidnn.compile(nets.dense(), allocator="pool")
    nets.train(step, 2)
    held, asked = pool_of(step).held_bytes, pool_of(step).device_allocations
    nets.train(step, 5, first=2)
    assert (pool_of(step).held_bytes, pool_of(step).device_allocations) == (held, asked)


def test_pinned_buffers_take_powers_of_two() -> None:
    step = minidnn.compile(nets.chain(), allocator="pool")
    assert isinstance(step.executor, PoolExecutor)
    pinned = step.executor.pinned_pool
    sizes = [buffer.footprint for buffer in step.program.persistent.host_buffers if buffer.space == HOST]
    assert pinned.used_bytes == sum(1 << (size - 1).bit_length() for size in sizes) >= sum(sizes)


@pytest.mark.parametrize("make", nets.NETS.values(), ids=nets.NETS)
def test_a_limit_the_pool_would_fragment_beyond_is_refused_with_one_that_runs(
    make: Callable[[], minidnn.Graph],
) -> None:
    reserved = minidnn.compile(make(), device=None).profile.reserved_bytes
    with pytest.raises(minidnn.DoesNotFit) as caught:
        minidnn.compile(make(), allocator="pool", memory=reserved)
    enough = caught.value.minimum_bytes
    assert enough > reserved and str(enough) in str(caught.value) and str(reserved) in str(caught.value)
    step = minidnn.compile(make(), allocator="pool", memory=enough)
    nets.train(step, 3)
    assert reserved < pool_of(step).peak_held_bytes <= enough
    with pytest.raises(minidnn.DoesNotFit):
        minidnn.compile(make(), allocator="pool", memory=enough - 512)


def test_a_limit_below_the_reserved_bytes_is_refused_before_the_pool_exists() -> None:
    reserved = minidnn.compile(nets.residual(), device=None).profile.reserved_bytes
    with pytest.raises(minidnn.DoesNotFit):
        minidnn.compile(nets.residual(), allocator="pool", memory=reserved - 512)


# -- fragmentation ----------------------------------------------------------------------------------------------------
def random_trace(seed: int) -> list[Instruction]:
    """Allocations and releases of random sizes in random order."""
    rng = random.Random(seed)
    rows: list[Instruction] = []
    alive: list[Value] = []
    for number in range(400):
        if alive and rng.random() < 0.48:
            rows.append(free(alive.pop(rng.randrange(len(alive)))))
        else:
            alive.append(value(f"v{number}", rng.choice((1, 3, 8, 40, 100)) * 512))
            rows.append(alloc(alive[-1]))
    return rows + [free(v) for v in alive]


@pytest.mark.parametrize("seed", range(5))
def test_a_random_trace_fragments_the_pool_more_than_the_static_arena(seed: int) -> None:
    rows = random_trace(seed)
    pool, blocks = PoolModel(), {}
    waste = fragmentation = 0.0
    for row in rows:
        assert row.buffer is not None
        if row.op is Op.ALLOC:
            blocks[row.buffer] = pool.malloc(row.buffer.footprint)
        else:
            pool.free(blocks.pop(row.buffer))
        waste = max(waste, pool.held_bytes - pool.peak_used_bytes)
        fragmentation = max(fragmentation, pool.fragmentation)
    arena = place(rows)
    assert pool.peak_used_bytes == arena.peak == max(live_curve(rows, space=DEVICE))
    assert fragmentation > 0 and waste > 0
    assert arena.fragmentation <= 0.2 * arena.peak
    assert arena.extent <= pool.peak_held_bytes


@KEEP_AND_NAIVE
def test_the_slab_of_a_training_step_reserves_little_more_than_its_peak_and_the_pool_more(plan: minidnn.Plan) -> None:
    for make in nets.NETS.values():
        step = minidnn.compile(make(batch=32), plan, allocator="pool")
        nets.train(step, 2)
        assert step.profile.reserved_bytes <= 1.05 * step.profile.peak_bytes
        assert step.profile.reserved_bytes <= pool_of(step).peak_held_bytes
