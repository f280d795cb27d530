"""Simulation: bytes are exact sums over ALLOC and FREE rows, times those of queues, waits and shared links."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterable

import pytest

from minidnn.graph import Role
from minidnn.profiles import Profile
from minidnn.schedule.instruction import COMM, COMPUTE, D2H, H2D, HOST, RESULT, STREAMS, Instruction, Op, Value, Wait
from minidnn.schedule.liveness import insert_lifetimes
from minidnn.schedule.simulate import (
    Resident,
    live_curve,
    row_key,
    row_seconds,
    schedule_times,
    simulate,
    step_time,
)
from minidnn.spec import TensorSpec
from tests.unit.rows import alloc, chain, free, row, training_step, value

SECOND = Profile("toy", "toy", 1, 512.0, 1.0, {"fp32": 1.0}, {"fp32": 1.0}, 0.0, 0.0, 512.0, 512.0, 256.0, 256.0)
"""512 bytes of memory or link traffic take one second, one operation takes one second; both ways at once: half the speed."""


def work(seconds: float, *waits: Wait | int, stream: str = COMPUTE, name: str = "w") -> Instruction:
    """A kernel row that takes ``seconds`` on the toy GPU."""
    waited = tuple(w if isinstance(w, Wait) else Wait(w) for w in waits)
    return Instruction(Op.FORWARD, name, kernel="k", stream=stream, flops=seconds, waits=waited)


def move(seconds: int, stream: str, *waits: Wait | int) -> Instruction:
    """A copy row that takes ``seconds`` alone."""
    device, host = value("d", 512 * seconds), value("h", 512 * seconds, space=HOST)
    waited = tuple(w if isinstance(w, Wait) else Wait(w) for w in waits)
    if stream == D2H:
        return row("y", [host], [device], op=Op.OFFLOAD, stream=stream)._replace(waits=waited)
    return row("y", [device], [host], op=Op.PREFETCH, stream=stream)._replace(waits=waited)


def times(rows: list[Instruction], profile: Profile = SECOND) -> list[tuple[float, float]]:
    return schedule_times(rows, profile, "fp32")


# -- bytes


def small_step() -> tuple[list[Instruction], list[Value]]:
    """A forward and a backward row with a workspace, one pinned buffer, and a persistent weight of 1,536 bytes."""
    w = value("w", 1500, persistent=True, role=Role.PARAMETER)
    x, y, dx = value("x", 512), value("y", 700), value("dx", 512, role=Role.GRAD)
    ws, pinned = value("ws", 2048, role=Role.WORKSPACE), value("y.host", 700, space=HOST)
    rows = [
        alloc(x),
        row("input", [x]),
        alloc(y),
        alloc(ws),
        row("conv", [y], [x, w], workspace=ws),
        free(x),
        free(ws),
        alloc(pinned),
        row("y", [pinned], [y], op=Op.OFFLOAD, stream=D2H),
        alloc(dx),
        row("conv", [dx], [y, w], op=Op.BACKWARD_DATA),
        free(y),
        free(pinned),
        free(dx),
    ]
    return rows, [w]


def test_live_bytes_are_counted_after_every_row_in_footprints() -> None:
    rows, _ = small_step()
    assert live_curve(rows, 1536) == [
        1536 + live for live in (512, 512, 1536, 3584, 3584, 3072, 1024, 1024, 1024, 1536, 1536, 512, 512, 0)
    ]
    assert live_curve(rows, space=HOST) == [0] * 7 + [1024] * 5 + [0, 0]


def test_the_peak_names_the_row_that_runs_and_everything_alive_there() -> None:
    rows, fixed = small_step()
    buffers = [v.buffer for v in fixed]
    result = simulate(rows, SECOND, "fp32", base_bytes=1536, offsets_extent=5632, host_bytes=1024, persistent=buffers)
    assert (result.peak_bytes, result.reserved_bytes) == (5120, 5632)
    assert (result.host_bytes, result.host_peak_bytes) == (1024, 1024)
    assert result.peak_row == 4 and "FORWARD conv" in result.peak_text  # not the ALLOC row before it
    assert result.residents_at_peak == (
        Resident("ws", "", "workspace", 2048),
        Resident("w", "", "parameter", 1536),
        Resident("y", "", "activation", 1024),
        Resident("x", "", "activation", 512),
    )
    assert result.by_role == {"workspace": 2048, "parameter": 1536, "activation": 1536}
    assert sum(result.by_role.values()) == result.peak_bytes


def test_persistent_bytes_count_in_their_own_space_and_must_agree() -> None:
    weight, streamed = value("w", 600, persistent=True), value("m", 600, space=HOST, persistent=True)
    both = [weight.buffer, streamed.buffer]
    result = simulate([], SECOND, "fp32", base_bytes=1024, offsets_extent=1024, persistent=both)
    assert (result.peak_bytes, result.host_peak_bytes, result.step_seconds) == (1024, 1024, 0.0)
    assert [r.name for r in result.residents_at_peak] == ["w"]
    with pytest.raises(AssertionError, match="1024"):
        simulate([], SECOND, "fp32", base_bytes=2048, offsets_extent=2048, persistent=both)


def test_peak_and_residents_equal_a_count_from_scratch_at_every_row() -> None:
    for depth in (3, 9):
        rows = insert_lifetimes(training_step(chain(depth, offload_every=2)))
        fixed = {v.buffer for r in rows for v in (*r.writes, *r.reads) if v.buffer.persistent}
        base = sum(b.footprint for b in fixed if b.space == "device")
        result = simulate(rows, SECOND, "fp32", base_bytes=base, offsets_extent=0, persistent=fixed)
        from_scratch = []
        for end in range(1, len(rows) + 1):
            born = [r.buffer for r in rows[:end] if r.op is Op.ALLOC and r.buffer]
            dead = [r.buffer for r in rows[:end] if r.op is Op.FREE and r.buffer]
            from_scratch.append(base + sum(b.footprint for b in born if b not in dead and b.space == "device"))
        assert live_curve(rows, base) == from_scratch
        assert result.peak_bytes == max(from_scratch) == from_scratch[result.peak_row]
        assert sum(r.nbytes for r in result.residents_at_peak) == sum(result.by_role.values()) == result.peak_bytes
        assert [-r.nbytes for r in result.residents_at_peak] == sorted(-r.nbytes for r in result.residents_at_peak)


# -- time


def test_one_stream_takes_the_sum_of_its_rows_and_bookkeeping_takes_nothing() -> None:
    v = value("v")
    hold = row("end", (), [v], op=Op.HOLD)
    rows = [alloc(v), work(2), work(3), hold, free(v), work(1)]
    assert times(rows) == [(0, 0), (0, 2), (2, 5), (5, 5), (5, 5), (5, 6)]
    assert step_time(rows, SECOND, "fp32") == (6.0, {COMPUTE: 6.0})


def test_a_row_waits_for_its_stream_and_for_every_row_it_names() -> None:
    rows = [work(4), move(3, D2H, 0), work(1), work(2, 1), move(2, H2D, 3)]
    assert times(rows) == [(0, 4), (4, 7), (4, 5), (7, 9), (9, 11)]


def test_a_row_that_takes_no_time_still_passes_its_wait_on() -> None:
    v = value("v")
    rows = [move(5, D2H), alloc(v)._replace(waits=(Wait(0),)), work(1)]
    assert times(rows) == [(0, 5), (5, 5), (5, 6)]


def test_copies_both_ways_at_once_share_the_link_only_while_both_run() -> None:
    """Toy link: 1 s alone is 2 s in company. h2d starts at 2; by then d2h has done half of its 4 s."""
    rows = [move(4, D2H), work(2), move(1, H2D, 1)]
    assert times(rows) == [(0, 5), (0, 2), (2, 4)]  # d2h: 2 s alone, 2 s at half speed, 1 s alone
    assert times([move(4, D2H), move(4, H2D)]) == [(0, 8), (0, 8)]


@pytest.mark.parametrize("direction", [D2H, H2D])
def test_copies_one_way_share_the_link(direction: str) -> None:
    assert times([move(2, direction), move(2, direction)._replace(stream=COMM)]) == [(0, 4), (0, 4)]


def test_kernels_slow_down_while_a_copy_runs_if_the_profile_says_so() -> None:
    slow = dataclasses.replace(SECOND, compute_slowdown=1.5)
    assert times([work(4), move(3, D2H)], slow) == [(0, 5), (0, 3)]  # 3 s do the work of 2, then 2 s alone
    assert times([work(4), move(3, D2H)]) == [(0, 4), (0, 3)]


def test_the_steady_state_overlaps_steps_unless_a_wait_forbids_it() -> None:
    free_running = [work(10), move(8, D2H, 0)]
    assert max(end for _, end in times(free_running)) == 18
    assert step_time(free_running, SECOND, "fp32") == (10.0, {COMPUTE: 10.0, D2H: 8.0})
    tied = [work(10, Wait(1, lag=1)), move(8, D2H, 0)]  # the next step overwrites what the copy still reads
    assert max(end for _, end in times(tied)) == 18
    assert step_time(tied, SECOND, "fp32")[0] == 18.0


def test_times_equal_the_longest_path_over_random_waits() -> None:
    """Without shared links an event simulation is a longest-path problem: solved here in two lines."""
    for seed in range(40):
        draw = random.Random(seed)
        rows: list[Instruction] = []
        for i in range(60):
            stream = draw.choice(STREAMS)
            picked = draw.sample(range(i), min(i, draw.randrange(3)))
            waits = [Wait(j) for j in picked] + ([Wait(draw.randrange(60), 1)] if draw.random() < 0.1 else [])
            rows.append(work(draw.choice((0, 1, 2, 5)), *waits, stream=stream))
        ends: list[int] = []
        last: dict[str, int] = {}
        for g in range(120):
            r = rows[g % 60]
            needed = [g - g % 60 - 60 * w.lag + w.row for w in r.waits]
            start = max([last.get(r.stream, 0), *(ends[n] for n in needed if n >= 0)])
            last[r.stream] = start + int(r.flops)
            ends.append(last[r.stream])
        assert [int(end) for _, end in times(rows)] == ends[:60]
        assert step_time(rows, SECOND, "fp32")[0] == max(ends[60:]) - max(ends[:60])


def test_waits_in_a_circle_are_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="circle"):
        times([work(1, 1), work(1, 0, stream=D2H)])


def test_a_copy_is_priced_by_the_spaces_it_joins() -> None:
    one_way = dataclasses.replace(SECOND, h2d_bandwidth=1024.0, copy_latency_seconds=0.5)
    device, other, host = value("d", 2048), value("e", 2048), value("h", 2048, space=HOST)
    result = value("r", 2048, space=RESULT)
    for target, source, op, seconds in (
        (device, host, Op.INPUT, 2.5),
        (device, host, Op.LOAD, 2.5),
        (host, device, Op.STORE, 4.5),
        (result, device, Op.FETCH, 4.5),
        (device, other, Op.INPUT, 8.0),  # inside the device: read and written
        (result, host, Op.FETCH, 0.0),
    ):
        assert row_seconds(row("c", [target], [source], op=op, stream=H2D), one_way, "fp32") == seconds


def test_collectives_are_priced_by_the_ring() -> None:
    v = value("g", 4096)
    linked = dataclasses.replace(SECOND, interconnect_bandwidth=512.0, interconnect_latency_seconds=0.5)

    def seconds(op: Op, ranks: int) -> float:
        one = row("g", [v], [v], op=op, stream=COMM)._replace(attrs={"ranks": ranks}, kernel="nccl")
        return row_seconds(one, linked, "fp32")

    assert seconds(Op.REDUCE_SCATTER, 4) == seconds(Op.ALL_GATHER, 4) == 3 * (0.5 + 2.0)
    assert seconds(Op.ALL_REDUCE, 4) == 6 * (0.5 + 2.0)
    assert seconds(Op.SEND, 4) == seconds(Op.RECV, 2) == 8.5


def kernel_row(shape: Iterable[int], dtype: str = "float32", **attrs: object) -> Instruction:
    spec = TensorSpec(tuple(shape), dtype)
    x, y = value("x")._replace(spec=spec), value("y")._replace(spec=spec)
    return row("a", [y], [x])._replace(kernel="relu_forward", attrs=attrs)


def test_a_measured_row_replaces_the_roofline_for_rows_that_do_the_same_work() -> None:
    measured = kernel_row((2, 3), stride=(1, 1))
    key = row_key(measured)
    assert key == "relu_forward|float32[2,3]<-float32[2,3]|stride=(1, 1)"
    profile = dataclasses.replace(SECOND, rows={key: 0.125})
    assert row_seconds(measured._replace(target="another layer"), profile, "fp32") == 0.125
    for other in (
        kernel_row((2, 4), stride=(1, 1)),
        kernel_row((2, 3), stride=(2, 2)),
        kernel_row((2, 3), "float16", stride=(1, 1)),
        measured._replace(kernel="relu_backward"),
    ):
        assert row_seconds(other, profile, "fp32") == row_seconds(other, SECOND, "fp32") > 0.0


def test_fifty_thousand_rows_take_about_half_a_second() -> None:
    rows = insert_lifetimes(training_step(chain(2600, offload_every=4)))
    rows = [r._replace(kernel="k", flops=1.0) if r.op in (Op.FORWARD, Op.BACKWARD_DATA) else r for r in rows]
    assert len(rows) > 50_000
    begin = time.process_time()
    simulate(rows, SECOND, "fp32", base_bytes=0, offsets_extent=0)
    assert time.process_time() - begin < 2.5  # about 0.5: five times that is a slower algorithm, not a slower machine
