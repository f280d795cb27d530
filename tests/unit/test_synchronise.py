"""Synchronise: enough waits for every conflict, and not one too many, also across the step boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidnn.schedule.instruction import COMM, D2H, H2D, HOST, RESULT, STREAMS, Buffer, Instruction, Op, Wait
from minidnn.schedule.liveness import insert_lifetimes
from minidnn.schedule.placement import place
from minidnn.schedule.synchronise import synchronise
from tests.unit.rows import alloc, chain, free, part, persistent_offsets, random_rows, row, training_step, value


def placed(rows: Sequence[Instruction]) -> tuple[list[Instruction], dict[Buffer, int]]:
    """Rows with lifetimes, and all their offsets."""
    timed = insert_lifetimes(rows)
    offsets, ends = persistent_offsets(timed)
    for space, base in ends.items():
        offsets.update(place(timed, base=base, space=space).offsets)
    return timed, offsets


def touched(r: Instruction, offsets: Mapping[Buffer, int]) -> list[tuple[object, int, int, bool]]:
    """Space, begin, end and whether it is written, of every operand."""
    if r.op is Op.FREE:
        return []
    if r.op is Op.ALLOC:
        assert r.buffer is not None
        at = offsets[r.buffer]
        return [(r.buffer.space, at, at + r.buffer.footprint, True)]
    operands = [(v, True) for v in r.writes] + [(v, False) for v in r.reads]
    operands += [(r.workspace, True)] if r.workspace else []
    found: list[tuple[object, int, int, bool]] = []
    for v, writes in operands:
        result = v.buffer.space == RESULT
        at = v.offset + (0 if result else offsets[v.buffer])
        found.append((v.buffer if result else v.buffer.space, at, at + v.spec.nbytes, writes))
    return found


class Oracle:
    """Quadratic: every conflict of two runs, and happens-before as a transitive closure in bit masks."""

    def __init__(
        self, before: Sequence[Instruction], rows: Sequence[Instruction], offsets: Mapping[Buffer, int]
    ) -> None:
        self.before, self.rows = list(before), list(rows)
        both = self.before + self.rows
        uses = [touched(r, offsets) for r in both]
        self.conflicts = [
            (i, j)
            for j in range(len(self.before), len(both))
            for i in range(j)
            if both[i].stream != both[j].stream
            and any(s == t and a < d and c < b and (v or w) for s, a, b, v in uses[i] for t, c, d, w in uses[j])
        ]

    def unordered(self, dropped: tuple[int, Wait] | None = None) -> list[tuple[int, int]]:
        """Conflicts that nothing orders, perhaps with one wait dropped from a row, in both runs if these are the same."""
        count = len(self.before)
        ended: list[int] = []  # by row: bit mask of the rows that have ended before it starts
        latest: dict[str, int] = {}
        for index, r in enumerate(self.before + self.rows):
            mine = index if index < count else index - count
            direct = [latest[r.stream]] if r.stream in latest else []
            for wait in r.waits:
                same = index >= count or self.before == self.rows
                if dropped == (mine, wait) and same:
                    continue
                if wait.lag == 0:
                    direct.append(wait.row + (count if index >= count else 0))
                elif index >= count:
                    direct.append(wait.row)
            mask = 0
            for i in direct:
                mask |= ended[i] | 1 << i
            ended.append(mask)
            latest[r.stream] = index
        return [(i, j) for i, j in self.conflicts if not ended[j] >> i & 1]


def assert_sufficient_and_minimal(
    timed: Sequence[Instruction], offsets: Mapping[Buffer, int], *, wraps: bool
) -> list[Instruction]:
    ordered = synchronise(timed, offsets, previous=timed if wraps else None)
    assert [r._replace(waits=()) for r in ordered] == list(timed)
    oracle = Oracle(ordered if wraps else [], ordered, offsets)
    assert oracle.unordered() == []
    for index, r in enumerate(ordered):
        assert list(r.waits) == sorted(r.waits)
        for wait in r.waits:
            assert oracle.unordered((index, wait)), f"row {index} need not wait for {wait}"
    return ordered


def test_the_example_of_the_docstring() -> None:
    a, b, host = value("a", content=1), value("b"), value("a.host", space=HOST, persistent=True)
    rows = [
        alloc(a),
        row("a", [a]),
        row("a", [host], [a], op=Op.OFFLOAD, stream=D2H),
        free(a, D2H),
        alloc(b, H2D),
        free(b, H2D),
    ]
    offsets = {a.buffer: 0, b.buffer: 0, host.buffer: 0}
    ordered = synchronise(rows, offsets, previous=rows)
    assert [r.waits for r in ordered] == [(Wait(4, 1),), (), (Wait(1),), (), (Wait(2),), ()]


def test_rows_of_one_stream_never_wait_for_each_other() -> None:
    timed, offsets = placed(random_rows(3, 60, streams=1))
    assert not any(r.waits for r in synchronise(timed, offsets, previous=timed))


def test_reads_do_not_wait_for_reads_and_hold_counts_as_a_read() -> None:
    x = value("x", persistent=True)
    rows = [
        row("compute", [x]),
        row("copy", [], [x], stream=D2H),
        row("step", [], [x], op=Op.HOLD, stream=H2D),
        row("again", [x]),
    ]
    ordered = synchronise(rows, {x.buffer: 0}, previous=None)
    assert [r.waits for r in ordered] == [(), (Wait(0),), (Wait(0),), (Wait(1), Wait(2))]


def test_disjoint_parts_of_a_buffer_are_independent() -> None:
    x = value("x", 1024, persistent=True)
    rows = [
        row("low", [part(x, 0, 100)]),
        row("high", [part(x, 100, 1024)], stream=H2D),
        row("copy", [], [part(x, 90, 99)], stream=D2H),
        row("all", [], [x], stream=COMM),
    ]
    ordered = synchronise(rows, {x.buffer: 0}, previous=None)
    assert [r.waits for r in ordered] == [(), (), (Wait(0),), (Wait(0), Wait(1))]


def test_reading_a_part_leaves_the_rest_as_it_was() -> None:
    x = value("x", 1024, persistent=True)
    rows = [
        row("all", [x]),
        row("copy", [], [part(x, 512, 1024)], stream=D2H),
        row("low", [part(x, 0, 512)]),
        row("high", [part(x, 512, 1024)]),
    ]
    ordered = synchronise(rows, {x.buffer: 0}, previous=None)
    assert [r.waits for r in ordered] == [(), (Wait(0),), (), (Wait(1),)]


def test_device_and_host_bytes_at_one_offset_are_different_bytes() -> None:
    x, y = value("x", persistent=True), value("y", space=HOST, persistent=True)
    rows = [row("x", [x]), row("y", [y], stream=D2H)]
    assert not any(r.waits for r in synchronise(rows, {x.buffer: 0, y.buffer: 0}, previous=rows))


def test_results_share_bytes_with_nothing_but_themselves() -> None:
    a, b = value("a", space=RESULT), value("b", space=RESULT)
    rows = [row("a", [a]), row("b", [b], stream=D2H), row("a", [a], stream=D2H)]
    assert [r.waits for r in synchronise(rows, {}, previous=None)] == [(), (), (Wait(0),)]


def test_the_previous_run_may_be_another_schedule() -> None:
    x = value("x", persistent=True)
    before = [row("other", []), row("copy", [x], stream=D2H), row("other", [])]
    rows = [row("read", [], [x]), row("write", [x])]
    ordered = synchronise(rows, {x.buffer: 0}, previous=before)
    assert [r.waits for r in ordered] == [(Wait(1, 1),), ()]


def test_given_waits_are_replaced() -> None:
    x = value("x", persistent=True)
    rows = [row("write", [x]), row("read", [], [x], stream=D2H)._replace(waits=(Wait(0, 1),))]
    assert synchronise(rows, {x.buffer: 0}, previous=None)[1].waits == (Wait(0),)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(2, 4), st.booleans())
def test_waits_of_random_rows_order_every_conflict_and_none_is_redundant(
    seed: int, length: int, streams: int, wraps: bool
) -> None:
    timed, offsets = placed(random_rows(seed, length, streams=streams))
    assert_sufficient_and_minimal(timed, offsets, wraps=wraps)


@pytest.mark.parametrize("lag", [1, 3])
def test_an_offloading_step_over_two_runs_has_no_redundant_wait(lag: int) -> None:
    timed, offsets = placed(training_step(chain(9, offload_every=2), lag=lag))
    ordered = assert_sufficient_and_minimal(timed, offsets, wraps=True)
    assert any(wait.lag for r in ordered for wait in r.waits)


def test_a_scattered_schedule_needs_at_least_a_hundred_waits_on_four_streams_and_two_steps() -> None:
    timed, offsets = placed(random_rows(4, 130))
    ordered = assert_sufficient_and_minimal(timed, offsets, wraps=True)
    assert {r.stream for r in ordered} == set(STREAMS)
    assert sum(len(r.waits) for r in ordered) >= 100
    assert {wait.lag for r in ordered for wait in r.waits} == {0, 1}
