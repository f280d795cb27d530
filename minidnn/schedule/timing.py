"""Timing: how long each row takes and when it runs. A model, priced by a profile (``minidnn.profiles``).

Every stream works through its rows in order; a row starts when the row before it in its stream and all rows it waits
for have ended. Kernels take the roofline of the profile (or their measured time), copies latency + bytes / bandwidth,
ALLOC, FREE and HOLD nothing. While copies run both ways, each runs at the both-ways bandwidth; copies one way share it.
Nothing is known here of contention between kernels, or of the host's time to launch them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from minidnn.profiles import Profile
from minidnn.schedule.instruction import DEVICE, Instruction, Op

_NOTHING, _KERNEL, _EXCHANGE, _H2D, _D2H = range(5)  # lanes: what a row keeps busy

_COPIES = frozenset((Op.OFFLOAD, Op.PREFETCH, Op.LOAD, Op.STORE, Op.INPUT, Op.FETCH))
_EXCHANGES = frozenset((Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.SEND, Op.RECV))


def row_key(row: Instruction) -> str:
    """Name the work of a kernel row, for measured costs: rows with equal keys take equal time.

    ``kernel|writes<-reads|attributes``, for example ``relu_forward|float32[64,28,28,256]<-float32[64,28,28,256]|``.
    """
    writes = ",".join(str(value.spec) for value in row.writes)
    reads = ",".join(str(value.spec) for value in row.reads)
    attrs = ",".join(f"{key}={row.attrs[key]}" for key in sorted(row.attrs))
    return f"{row.kernel}|{writes}<-{reads}|{attrs}"


def row_seconds(row: Instruction, profile: Profile, precision: str) -> float:
    """Time one row takes alone on the device."""
    return _cost(row, profile, precision)[0]


def schedule_times(rows: Sequence[Instruction], profile: Profile, precision: str) -> list[tuple[float, float]]:
    """Start and end of every row in seconds, for one run that begins at 0 on an idle device."""
    starts, ends = _run(rows, profile, precision, periods=1)
    since: dict[str, float] = {}
    for i, row in enumerate(rows):
        if row.op is Op.FREE:
            starts[i] = ends[i] = since.get(row.stream, 0.0)
        else:
            since[row.stream] = ends[i]
    return list(zip(starts, ends, strict=True))


def step_time(rows: Sequence[Instruction], profile: Profile, precision: str) -> tuple[float, dict[str, float]]:
    """Seconds from step to step in the steady state, and seconds each stream is busy in one.

    With more than one stream, work can be in flight across the step boundary: the schedule is run twice, following
    itself, and what counts is the time from the last end of the first run to the last end of the second.
    """
    if not rows:
        return 0.0, {}
    periods = 2 if any(row.stream != rows[0].stream for row in rows) else 1
    starts, ends = _run(rows, profile, precision, periods=periods)
    count = len(rows)
    first = len(starts) - count
    seconds = max(ends[first:]) - max(ends[:first], default=0.0)
    busy: dict[str, float] = {}
    for i, row in enumerate(rows):
        if row.op is not Op.FREE:
            busy[row.stream] = busy.get(row.stream, 0.0) + (ends[first + i] - starts[first + i])
    return seconds, busy


def _cost(row: Instruction, profile: Profile, precision: str) -> tuple[float, int]:
    """Seconds a row takes alone, and the lane it occupies."""
    if row.kernel in ("post", "settle"):  # half of a ring step, whose time is that of its other half
        return 0.0, _NOTHING
    if row.op in _EXCHANGES:
        return _exchange_seconds(row, profile), _EXCHANGE
    if row.kernel:
        measured = profile.rows.get(row_key(row)) if profile.rows else None
        if measured is not None:
            return measured, _KERNEL
        return profile.kernel_seconds(row.flops, row.moved_bytes, precision), _KERNEL
    if row.op not in _COPIES:
        return 0.0, _NOTHING
    nbytes = row.writes[0].spec.nbytes
    to_device, from_device = row.writes[0].buffer.space == DEVICE, row.reads[0].buffer.space == DEVICE
    if to_device and from_device:
        return profile.kernel_seconds(0.0, 2 * nbytes, precision), _KERNEL
    if to_device:
        return profile.copy_seconds(nbytes, "h2d"), _H2D
    if from_device:
        return profile.copy_seconds(nbytes, "d2h"), _D2H
    return 0.0, _NOTHING  # between host arrays: the device does nothing


def _exchange_seconds(row: Instruction, profile: Profile) -> float:
    """Time of a collective of ``attrs["ranks"]`` GPUs by the ring: N - 1 hops of bytes / N, twice for all-reduce."""
    nbytes = max(value.spec.nbytes for value in (*row.writes, *row.reads))
    ranks = int(row.attrs.get("ranks", 2))
    if row.op in (Op.SEND, Op.RECV):
        return profile.exchange_seconds(nbytes)
    hops = (ranks - 1) * (2 if row.op is Op.ALL_REDUCE else 1)
    return hops * profile.exchange_seconds(nbytes / ranks)


class _Slowdown:
    """How much slower a row runs for what else is running: links are shared, and slower when used both ways."""

    def __init__(self, profile: Profile) -> None:
        self.both = {
            _H2D: profile.h2d_bandwidth / profile.h2d_bandwidth_both,
            _D2H: profile.d2h_bandwidth / profile.d2h_bandwidth_both,
        }
        self.compute = profile.compute_slowdown
        self.running = [0] * 5  # rows by lane

    def factor(self, lane: int) -> float:
        """Factor on the time that a row in this lane takes now."""
        h2d, d2h = self.running[_H2D], self.running[_D2H]
        if lane == _H2D:
            return h2d * (self.both[_H2D] if d2h else 1.0)
        if lane == _D2H:
            return d2h * (self.both[_D2H] if h2d else 1.0)
        return self.compute if lane == _KERNEL and (h2d or d2h) else 1.0


def _run(
    rows: Sequence[Instruction], profile: Profile, precision: str, *, periods: int
) -> tuple[list[float], list[float]]:
    """Start and end of every row, FREE rows apart, of ``periods`` runs in a row, by events in time order. O(rows)."""
    count = len(rows)
    costs = [_cost(row, profile, precision) for row in rows] * periods
    needs = _needs(rows, periods)
    queues: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if row.op is not Op.FREE:  # it takes no time, waits for nothing, and nothing waits for it
            queues.setdefault(row.stream, []).append(i)
    work = [[i + period * count for period in range(periods) for i in queue] for queue in queues.values()]
    streams = range(len(work))
    slowdown = _Slowdown(profile)
    starts = [0.0] * (count * periods)
    ends = [-1.0] * (count * periods)  # -1: not ended
    position = [0] * len(work)
    current = [-1] * len(work)  # the row that runs in each stream
    lanes = [_NOTHING] * len(work)
    until = [inf] * len(work)  # when it ends
    factors = [1.0] * len(work)

    def reprice(now: float) -> None:
        for k in streams:
            if current[k] >= 0 and (factor := slowdown.factor(lanes[k])) != factors[k]:
                until[k] = now + (until[k] - now) * factor / factors[k]
                factors[k] = factor

    now = 0.0
    while True:
        moved = True
        while moved:  # start all that can start now; rows that take no time end at once and may let others start
            moved = False
            for k in streams:
                queue, at = work[k], position[k]
                while current[k] < 0 and at < len(queue):
                    row_index = queue[at]
                    need = needs[row_index]
                    if need and min([ends[other] for other in need]) < 0.0:
                        break
                    at += 1
                    starts[row_index] = now
                    seconds, lane = costs[row_index]
                    if seconds == 0.0:
                        ends[row_index] = now
                        moved = True
                        continue
                    current[k], lanes[k] = row_index, lane
                    slowdown.running[lane] += 1
                    factors[k] = slowdown.factor(lane)
                    until[k] = now + seconds * factors[k]
                    if lane >= _H2D:
                        reprice(now)
                position[k] = at
        now = min(until)
        if now == inf:
            assert all(at == len(queue) for at, queue in zip(position, work, strict=True)), "the waits form a circle"
            return starts, ends
        for k in streams:
            if until[k] == now:
                ends[current[k]] = now
                current[k], until[k] = -1, inf
                slowdown.running[lanes[k]] -= 1
                if lanes[k] >= _H2D:
                    reprice(now)


def _needs(rows: Sequence[Instruction], periods: int) -> list[tuple[int, ...]]:
    """Rows that each row of each run waits for; what a first run waits for of the run before it has long ended."""
    count = len(rows)
    found: list[tuple[int, ...]] = []
    for period in range(periods):
        for row in rows:
            waits = row.waits
            if not waits:
                found.append(())
                continue
            found.append(tuple([w.row + (period - w.lag) * count for w in waits if w.lag <= period and w.row < count]))
    return found
