"""Placement: buffers alive together never share bytes, and the slab is hardly larger than the peak."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidnn.schedule.instruction import DEVICE, HOST, Instruction, Op, Value
from minidnn.schedule.liveness import insert_lifetimes
from minidnn.schedule.placement import Placement, place
from tests.unit.rows import (
    KIB,
    Layer,
    alloc,
    branches,
    chain,
    dense,
    free,
    pyramid,
    random_rows,
    residual,
    row,
    training_step,
    value,
)


def assert_sound(rows: Sequence[Instruction], placement: Placement, space: str = DEVICE) -> None:
    """Compare every ALLOC with its neighbours among the ranges that are alive then."""
    alive: list[tuple[int, int]] = []
    live = peak = 0
    extent = placement.base
    expected = []
    for r in rows:
        if r.buffer is None or r.buffer.space != space:
            continue
        size = r.buffer.footprint
        begin = placement.offsets[r.buffer]
        if r.op is Op.FREE:
            alive.remove((begin, begin + size))
            live -= size
            continue
        assert begin % 512 == 0 and begin >= placement.base
        index = bisect_left(alive, (begin, begin + size))
        assert index == 0 or alive[index - 1][1] <= begin, f"{r.buffer} begins inside another"
        assert index == len(alive) or begin + size <= alive[index][0], f"another begins inside {r.buffer}"
        alive.insert(index, (begin, begin + size))
        expected.append(r.buffer)
        live += size
        peak = max(peak, live)
        extent = max(extent, begin + size)
    assert set(placement.offsets) == set(expected)
    assert (placement.peak, placement.extent) == (peak, extent)
    assert placement.fragmentation == extent - placement.base - peak >= 0


def test_the_example_of_the_docstring() -> None:
    y, ws, dx, z = value("y", 2048), value("ws"), value("dx", 2048), value("z", 2048)
    placement = place([alloc(y), alloc(ws), alloc(dx), free(ws), free(y), alloc(z)])
    blocks = {buffer.name: at // 512 for buffer, at in placement.offsets.items()}
    assert blocks == {"y": 1, "ws": 0, "dx": 5, "z": 0}
    assert placement.extent == placement.peak == 9 * 512


def test_nothing_to_place_takes_the_base_alone() -> None:
    weight = value("weight", persistent=True)
    placement = place([row("f", [], [weight])], base=1000)
    assert (placement.offsets, placement.base, placement.extent, placement.peak) == ({}, 1024, 1024, 0)


def test_the_spaces_are_placed_apart() -> None:
    x, host = value("x"), value("x.host", 600, space=HOST)
    rows = [alloc(x), alloc(host), free(x), free(host)]
    assert place(rows, base=512).offsets == {x.buffer: 512}
    assert place(rows, base=512, space=HOST).offsets == {host.buffer: 512}
    assert place(rows, space=HOST).extent == 1024


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9000)), max_size=60), st.sampled_from((DEVICE, HOST)))
def test_random_traces_never_overlap(trace: list[tuple[int, int]], space: str) -> None:
    alive: list[Value] = []
    rows = []
    for index, (key, nbytes) in enumerate(trace):
        if alive and key % 3 == 0:
            rows.append(free(alive.pop(key % len(alive))))
        else:
            alive.append(value(f"b{index}", nbytes, space=space))
            rows.append(alloc(alive[-1]))
    assert_sound(rows, place(rows, base=1536, space=space), space)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 80))
def test_random_rows_never_overlap_in_either_space(seed: int, length: int) -> None:
    rows = insert_lifetimes(random_rows(seed, length))
    for space in (DEVICE, HOST):
        assert_sound(rows, place(rows, space=space), space)


def offloaded(layers: Iterable[Layer]) -> list[Layer]:
    """Every second large output goes to the host."""
    return [
        Layer(x.inputs, x.out, x.aux, x.weight, x.workspace, x.reads_x, x.reads_y, x.in_place, i % 4 == 0, x.alias)
        for i, x in enumerate(layers)
    ]


@pytest.mark.parametrize("transform", [list, offloaded], ids=["kept", "offloaded"])
@pytest.mark.parametrize(
    "layers",
    [pyramid(), residual(16), residual(50), dense(24), branches(9), chain(30)],
    ids=["pyramid", "residual16", "residual50", "dense24", "branches9", "chain30"],
)
def test_the_slab_of_a_training_step_exceeds_its_peak_by_two_percent_at_most(
    layers: list[Layer], transform: Callable[[list[Layer]], list[Layer]]
) -> None:
    rows = insert_lifetimes(training_step(transform(layers), batch=64 * KIB))
    placement = place(rows)
    assert_sound(rows, placement)
    assert placement.fragmentation <= placement.peak // 50


@pytest.mark.parametrize("every", [0, 3])
def test_a_thousand_layers_are_stacked_with_hardly_a_hole(every: int) -> None:
    rows = insert_lifetimes(training_step(chain(1000, offload_every=every)))
    placement = place(rows)
    assert_sound(rows, placement)
    assert placement.fragmentation <= placement.peak // 500


def test_equal_rows_have_equal_placements() -> None:
    def placed() -> list[tuple[str, int]]:
        rows = insert_lifetimes(training_step(branches(6)))
        return [(buffer.name, at) for buffer, at in place(rows).offsets.items()]

    assert placed() == placed()


def test_the_base_moves_everything_and_changes_nothing_else() -> None:
    rows = insert_lifetimes(training_step(residual(6)))
    low, high = place(rows), place(rows, base=1 << 30)
    assert {buffer: at + (1 << 30) for buffer, at in low.offsets.items()} == high.offsets
    assert high.fragmentation == low.fragmentation and high.peak == low.peak
