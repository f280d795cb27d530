"""Verify: a right schedule has no problems, and each way to be wrong is named with its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidnn.schedule.instruction import D2H, H2D, HOST, Buffer, Instruction, Op, Wait
from minidnn.schedule.synchronise import synchronise
from minidnn.schedule.verify import ScheduleError, check, verify
from tests.unit.rows import alloc, chain, free, part, random_rows, row, training_step, value
from tests.unit.test_synchronise import placed

A, B = value("a", content=1), value("b", content=2)
HOST_COPY = value("a.host", content=1, space=HOST, persistent=True)
OFFSETS = {A.buffer: 0, B.buffer: 512, HOST_COPY.buffer: 0}


def good() -> list[Instruction]:
    """Row 2 copies ``a`` out on another stream while row 4 reads it; both must end before the bytes are used again."""
    return [
        alloc(A)._replace(waits=(Wait(2, 1),)),
        row("layer1", [A]),
        row("a", [HOST_COPY], [A], op=Op.OFFLOAD, stream=D2H)._replace(waits=(Wait(1),)),
        alloc(B),
        row("layer2", [B], [A]),
        free(A),
        row("layer3", [], [B]),
        free(B),
    ]


def problems(rows: list[Instruction], **limits: int) -> list[str]:
    return verify(rows, OFFSETS, previous=rows, **limits)


def test_a_right_schedule_has_no_problems() -> None:
    assert problems(good(), extent=1024, host_extent=512) == []
    check(good(), OFFSETS, previous=good(), extent=1024)


def without(index: int) -> Callable[[list[Instruction]], None]:
    def damage(rows: list[Instruction]) -> None:
        rows[index] = row("nothing")

    return damage


def replaced(index: int, **fields: Any) -> Callable[[list[Instruction]], None]:
    def damage(rows: list[Instruction]) -> None:
        rows[index] = rows[index]._replace(**fields)

    return damage


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (without(1), "row 2 (OFFLOAD a on d2h) reads a, but no earlier row wrote it"),
        (without(0), "row 1 (FORWARD layer1 on compute) touches a before anything allocated it"),
        (without(5), "row 0 (ALLOC a on compute): a leaks, nothing frees it"),
        (replaced(5, buffer=B.buffer), "row 6 (FORWARD layer3 on compute) touches b after row 5 freed it"),
        (replaced(6, op=Op.FREE, buffer=A.buffer), "row 6 (FREE layer3 on compute) frees a: row 5 already did"),
        (replaced(0, op=Op.FREE), "row 0 (FREE a on compute) frees a: nothing allocated it"),
        (replaced(3, buffer=A.buffer), "row 3 (ALLOC b on compute) allocates a again: row 0 did, and nothing freed it"),
        (replaced(3, buffer=None), "row 3 (ALLOC b on compute) names no buffer that can be allocated: None"),
        (
            replaced(2, waits=()),
            "row 2 (OFFLOAD a on d2h) and row 1 (FORWARD layer1 on compute) both touch a, and no wait orders them",
        ),
        (
            replaced(0, waits=()),
            "row 0 (ALLOC a on compute) and row 2 (OFFLOAD a on d2h) of the previous run both touch a, "
            "and no wait orders them",
        ),
        (
            replaced(4, writes=(A._replace(content=3),), reads=()),
            "row 6 (FORWARD layer3 on compute) reads b, but no earlier row wrote it",
        ),
        (
            replaced(2, waits=(Wait(4),)),
            "row 2 (OFFLOAD a on d2h) waits for row 4 (FORWARD layer2 on compute), which is not before it",
        ),
        (
            replaced(2, waits=(Wait(1), Wait(99))),
            "row 2 (OFFLOAD a on d2h) waits for row 99 of this run, which does not exist",
        ),
        (
            replaced(2, waits=(Wait(1), Wait(99, 1))),
            "row 2 (OFFLOAD a on d2h) waits for row 99 of the run 1 before, which does not exist",
        ),
        (replaced(2, stream="side"), "row 2 (OFFLOAD a on side): there is no such stream"),
        (
            replaced(1, writes=(A._replace(offset=1),)),
            "row 1 (FORWARD layer1 on compute): a is bytes 1..513 of Buffer(a, 512 B, activation), which is too small",
        ),
    ],
)
def test_each_damage_is_named(damage: Callable[[list[Instruction]], None], expected: str) -> None:
    rows = good()
    damage(rows)
    assert expected in problems(rows)


def test_a_later_read_of_what_was_overwritten_in_place_names_both_rows() -> None:
    over = A._replace(name="relu", content=7)
    rows = [alloc(A), row("conv", [A]), row("relu", [over], [A]), row("late", [], [A]), free(A)]
    assert verify(rows, OFFSETS) == [
        "row 3 (FORWARD late on compute) reads a, but row 2 (FORWARD relu on compute) put something else there"
    ]


def test_an_alias_shares_the_content_of_its_source() -> None:
    flat = A.alias("flat", A.spec)
    assert verify([alloc(A), row("conv", [A]), row("fc", [], [flat]), free(A)], OFFSETS) == []


def test_a_workspace_leaves_nothing_to_read() -> None:
    rows = [alloc(A), row("conv", [A]), row("scratch", workspace=A), row("late", [], [A]), free(A)]
    assert (
        "row 3 (FORWARD late on compute) reads a, but row 2 (FORWARD scratch on compute) put something else there"
        in (verify(rows, OFFSETS))
    )


def test_a_value_is_defined_when_all_its_parts_are() -> None:
    rows = [alloc(A), row("low", [part(A, 0, 100)]), row("high", [part(A, 100, 512)]), row("all", [], [A]), free(A)]
    assert verify(rows, OFFSETS) == []
    rows[2] = row("high", [part(A, 101, 512)])
    assert verify(rows, OFFSETS) == ["row 3 (FORWARD all on compute) reads a, but no earlier row wrote it"]


def test_accumulation_needs_something_to_add_to() -> None:
    rows = [alloc(A), row("sum", [A], accumulates=True), free(A)]
    assert verify(rows, OFFSETS) == ["row 1 (FORWARD sum on compute) reads a, but no earlier row wrote it"]


def test_persistent_bytes_mean_one_thing_until_they_are_written() -> None:
    w = value("w", content=1, persistent=True)
    other = w._replace(name="other", content=2)
    offsets = {w.buffer: 0}
    assert verify([row("f", [], [w]), row("update", [other], [w]), row("g", [], [other])], offsets) == []
    assert verify([row("f", [], [w]), row("g", [], [other])], offsets) == [
        "row 1 (FORWARD g on compute) reads other, but these bytes of w were read as something else before"
    ]


def test_hold_reads_bytes_and_no_meaning() -> None:
    rows = [alloc(A), row("step", [], [A], op=Op.HOLD), free(A)]
    assert verify(rows, OFFSETS) == []


def test_buffers_that_overlap_or_leave_the_slab_are_named() -> None:
    rows = [alloc(A), alloc(B), free(A), free(B)]
    assert verify(rows, {A.buffer: 1024, B.buffer: 512}, extent=1024) == [
        "row 0 (ALLOC a on compute): a at bytes 1024..1536 lies beyond the device slab of 1024 bytes"
    ]
    assert verify(rows, {A.buffer: 0, B.buffer: 0}) == [
        "row 1 (ALLOC b on compute): b at device bytes 0..512 overlaps a at 0..512, which lives there"
    ]
    two = value("two", 1024)
    assert verify([alloc(two), alloc(B), free(two), free(B)], {two.buffer: 0, B.buffer: 512}) == [
        "row 1 (ALLOC b on compute): b at device bytes 512..1024 overlaps two at 0..1024, which lives there"
    ]
    assert verify(rows, {A.buffer: 0}) == ["row 1 (ALLOC b on compute): b has no offset"]


def test_bytes_that_pass_to_another_buffer_must_be_waited_for() -> None:
    rows = [alloc(A), row("make", [A]), free(A), alloc(B, D2H), free(B, D2H)]
    assert verify(rows, {A.buffer: 0, B.buffer: 0}) == [
        f"row 3 (ALLOC b on d2h) and row {index} both touch bytes of a that are now of b, and no wait orders them"
        for index in ("1 (FORWARD make on compute)",)
    ]
    rows[3] = rows[3]._replace(waits=(Wait(0),))
    assert len(verify(rows, {A.buffer: 0, B.buffer: 0})) == 1
    rows[3] = rows[3]._replace(waits=(Wait(1),))
    assert verify(rows, {A.buffer: 0, B.buffer: 0}) == []


def test_a_part_that_was_used_elsewhere_binds_only_who_takes_its_bytes() -> None:
    two = value("two", 1024, content=1)
    low, high = part(two, 0, 512), part(two, 512, 1024)
    taker = value("taker")
    rows = [
        alloc(two),
        row("low", [low]),
        row("high", [high], stream=H2D)._replace(waits=(Wait(0),)),
        free(two),
        alloc(taker),
        free(taker),
    ]
    assert verify(rows, {two.buffer: 0, taker.buffer: 0}) == []
    assert len(verify(rows, {two.buffer: 0, taker.buffer: 512})) == 1


def test_a_wait_inside_the_previous_run_for_the_run_before_that_orders_nothing_here() -> None:
    x = value("x", persistent=True)
    previous = [row("copy", [], [x], stream=D2H), row("other")._replace(waits=(Wait(0, 1),))]
    assert len(verify([row("write", [x])], {x.buffer: 0}, previous=previous)) == 1
    previous[1] = previous[1]._replace(waits=(Wait(0),))
    assert verify([row("write", [x])], {x.buffer: 0}, previous=previous) == []


def test_a_persistent_buffer_is_always_resident() -> None:
    w = value("w", persistent=True)
    rows = [alloc(A), free(A)]
    assert verify(rows, {A.buffer: 0, w.buffer: 0}) == [
        "row 0 (ALLOC a on compute): a at device bytes 0..512 overlaps w at 0..512, which lives there"
    ]
    assert verify([row("f", [], [w])], {}) == ["row 0 (FORWARD f on compute): w has no offset"]


def test_rows_that_wait_for_each_other_are_a_deadlock() -> None:
    rows = [
        row("a")._replace(waits=(Wait(3),)),
        row("b"),
        row("c", stream=H2D)._replace(waits=(Wait(1),)),
        row("d", stream=H2D),
    ]
    assert verify(rows, {})[-1] == (
        "deadlock: row 0 (FORWARD a on compute) and row 2 (FORWARD c on h2d) can never start"
    )


def test_check_raises_with_the_first_five_problems() -> None:
    rows = [row(f"r{i}", [], [A]) for i in range(4)]
    with pytest.raises(ScheduleError, match=r"row 0 .*touches a[\s\S]* and 3 more"):
        check(rows, OFFSETS)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 50), st.integers(1, 4), st.booleans())
def test_the_passes_make_right_schedules_and_no_wait_can_be_left_out(
    seed: int, length: int, streams: int, wraps: bool
) -> None:
    timed, offsets = placed(random_rows(seed, length, streams=streams))
    ordered = synchronise(timed, offsets, previous=timed if wraps else None)
    assert verify(ordered, offsets, previous=ordered if wraps else None) == []
    assert_every_wait_is_missed(ordered, offsets, wraps=wraps)


def assert_every_wait_is_missed(ordered: list[Instruction], offsets: Mapping[Buffer, int], *, wraps: bool) -> int:
    count = 0
    for index, r in enumerate(ordered):
        for wait in r.waits:
            waits = tuple(other for other in r.waits if other != wait)
            fewer = [*ordered[:index], r._replace(waits=waits), *ordered[index + 1 :]]
            found = verify(fewer, offsets, previous=fewer if wraps else None)
            assert any("no wait orders them" in problem for problem in found), f"row {index} without {wait}"
            count += 1
    return count


def test_a_hundred_waits_over_four_streams_and_two_steps_are_all_missed() -> None:
    timed, offsets = placed(random_rows(4, 130))
    ordered = synchronise(timed, offsets, previous=timed)
    assert assert_every_wait_is_missed(ordered, offsets, wraps=True) >= 100


def test_an_offloading_step_is_right_and_all_its_waits_are_missed() -> None:
    timed, offsets = placed(training_step(chain(12, offload_every=2)))
    ordered = synchronise(timed, offsets, previous=timed)
    assert verify(ordered, offsets, previous=ordered) == []
    assert assert_every_wait_is_missed(ordered, offsets, wraps=True) > 20


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.data())
def test_a_dropped_lifetime_row_is_named(seed: int, data: st.DataObject) -> None:
    timed, offsets = placed(random_rows(seed, 30))
    lifetime_rows = [index for index, r in enumerate(timed) if r.op in (Op.ALLOC, Op.FREE)]
    if lifetime_rows:
        index = data.draw(st.sampled_from(lifetime_rows))
        assert verify([*timed[:index], *timed[index + 1 :]], offsets)
