"""Liveness: every transient buffer is allocated at its first use and freed at its last, and nothing else is."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from minidnn.schedule.instruction import D2H, HOST, RESULT, Buffer, Instruction, Op
from minidnn.schedule.liveness import insert_lifetimes, lifetimes
from tests.unit.rows import random_rows, row, value


def described(rows: list[Instruction]) -> list[str]:
    return [f"{r.op} {r.target} {r.stream}" for r in rows]


def test_the_example_of_the_docstring() -> None:
    y, dx = value("y", content=1), value("dx", content=2)
    rows = [
        row("conv1", [y]),
        row("conv1", [dx], [y], op=Op.BACKWARD_DATA),
        row("conv1", [], [dx], op=Op.UPDATE),
    ]
    assert described(insert_lifetimes(rows)) == [
        "ALLOC y compute",
        "FORWARD conv1 compute",
        "ALLOC dx compute",
        "BACKWARD_DATA conv1 compute",
        "FREE y compute",
        "UPDATE conv1 compute",
        "FREE dx compute",
    ]


def test_buffers_of_one_row_come_in_operand_order_and_go_on_the_stream_of_their_last_use() -> None:
    b, a, scratch, host = value("b"), value("a"), value("scratch"), value("host", space=HOST)
    rows = [row("f", [b, a], workspace=scratch), row("b", [host], [b, a], op=Op.OFFLOAD, stream=D2H)]
    assert described(insert_lifetimes(rows)) == [
        "ALLOC b compute",
        "ALLOC a compute",
        "ALLOC scratch compute",
        "FORWARD f compute",
        "FREE scratch compute",
        "ALLOC host d2h",
        "OFFLOAD b d2h",
        "FREE host d2h",
        "FREE b d2h",
        "FREE a d2h",
    ]


def test_persistent_buffers_and_results_are_never_allocated() -> None:
    weight, logits = value("weight", persistent=True), value("logits", space=RESULT)
    rows = [row("fetch", [logits], [weight], op=Op.FETCH)]
    assert insert_lifetimes(rows) == rows


def test_an_in_place_result_lives_in_the_buffer_of_its_source() -> None:
    y = value("y", content=1)
    over = y._replace(name="relu", content=2)
    timed = insert_lifetimes([row("conv", [y]), row("relu", [over], [y]), row("next", [], [over])])
    assert [r.op for r in timed] == [Op.ALLOC, Op.FORWARD, Op.FORWARD, Op.FORWARD, Op.FREE]


def test_lifetimes_reach_from_first_to_last_use() -> None:
    weight, y = value("weight", persistent=True), value("y")
    rows = [row("f", [y], [weight]), row("g", [], [weight]), row("h", [], [y])]
    assert lifetimes(rows) == {y.buffer: (0, 2), weight.buffer: (0, 1)}
    assert lifetimes(insert_lifetimes(rows))[y.buffer] == (0, 4)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 60))
def test_alloc_and_free_enclose_exactly_the_uses_of_a_buffer(seed: int, length: int) -> None:
    rows = random_rows(seed, length)
    timed = insert_lifetimes(rows)
    assert [r for r in timed if r.op not in (Op.ALLOC, Op.FREE)] == rows
    uses: dict[
        Buffer, list[int]
    ] = {}  # index in ``rows`` of every use; ALLOC counts for the next row, FREE for the last
    spans: dict[Buffer, list[tuple[Op, str, int]]] = {}
    done = 0
    for r in timed:
        if r.buffer is not None:
            spans.setdefault(r.buffer, []).append((r.op, r.stream, done - (r.op is Op.FREE)))
            continue
        for operand in (*r.writes, *r.reads, *([r.workspace] if r.workspace else [])):
            if not operand.buffer.persistent:
                uses.setdefault(operand.buffer, []).append(done)
        done += 1
    for buffer, found in uses.items():
        first, last = found[0], found[-1]
        assert spans.pop(buffer) == [(Op.ALLOC, rows[first].stream, first), (Op.FREE, rows[last].stream, last)]
    assert not spans
