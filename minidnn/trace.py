"""Traces for chrome://tracing and ui.perfetto.dev: one track per stream, and the live bytes under it.

A schedule is drawn once, however often it ran: every step is the same list of rows. Memory is counted in row order, as
predicted and verified, so its maximum is the predicted peak; it is drawn where ``compute`` reaches the row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minidnn.graph import Role
from minidnn.schedule.instruction import COMPUTE, DEVICE, HOST, STREAMS, Buffer, Instruction, Op

_COLOURS = {  # names that the Chrome viewer reserves; Perfetto picks its own
    Op.FORWARD: "good",
    Op.RECOMPUTE: "bad",
    Op.BACKWARD_DATA: "thread_state_running",
    Op.BACKWARD_WEIGHT: "thread_state_runnable",
    Op.ADD: "grey",
    Op.UPDATE: "olive",
    Op.OFFLOAD: "rail_load",
    Op.PREFETCH: "rail_response",
    Op.LOAD: "rail_response",
    Op.STORE: "rail_load",
    Op.INPUT: "rail_idle",
    Op.FETCH: "rail_idle",
}
_COUNTED_ONLY = (Op.ALLOC, Op.FREE, Op.HOLD)


class TracedSchedule(NamedTuple):
    """One schedule to draw: rows with ALLOC and FREE, (start, end) seconds of each, and the persistent buffers."""

    name: str
    rows: Sequence[Instruction]
    times: Sequence[tuple[float, float]]
    persistent: Sequence[Buffer] = ()
    repeats: int = 1


def write_trace(path: str | Path, schedules: Sequence[TracedSchedule]) -> None:
    """Write a trace file, one process per schedule. Opens in chrome://tracing and ui.perfetto.dev, needs no network."""
    encode = json.JSONEncoder(separators=(",", ":")).encode
    events = [encode(event) for i, schedule in enumerate(schedules) for event in trace_events(schedule, i + 1)]
    Path(path).write_text('{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(events) + "\n]}\n", encoding="utf-8")


def trace_events(schedule: TracedSchedule, process: int = 1) -> Iterator[dict[str, Any]]:
    """Events of one schedule in the Trace Event Format: metadata, an event per row that takes time, counters."""
    rows, times = schedule.rows, schedule.times
    assert len(rows) == len(times), f"{len(rows)} rows, {len(times)} times"
    title = schedule.name if schedule.repeats == 1 else f"{schedule.name}, one of {schedule.repeats} equal runs"
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": title, "repeats": schedule.repeats}}
    used = dict.fromkeys(row.stream for row in rows)
    tracks = {
        s: i for i, s in enumerate([*(s for s in STREAMS if s in used), *(s for s in used if s not in STREAMS)], 1)
    }
    for stream, track in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": stream}}
    for i, (row, (start, end)) in enumerate(zip(rows, times, strict=True)):
        begin, stop = round(start * 1e9), round(end * 1e9)
        if row.op in _COUNTED_ONLY or stop <= begin:
            continue
        event: dict[str, Any] = {"ph": "X", "name": f"{row.op.value} {row.target}", "cat": row.op.value}
        event |= {"pid": process, "tid": tracks[row.stream], "ts": begin / 1000, "dur": (stop - begin) / 1000}
        event["args"] = {"row": i}
        if row.op in _COLOURS:
            event["cname"] = _COLOURS[row.op]
        yield event
    yield from _counters(schedule, process)


def _counters(schedule: TracedSchedule, process: int) -> Iterator[dict[str, Any]]:
    """Live bytes by role and in total, at every row that runs with other bytes than the row before."""
    rows = schedule.rows
    reached = _compute_reaches(rows, schedule.times)
    for space in (DEVICE, HOST):
        by_role = {role.value: 0 for role in Role}
        for fixed in schedule.persistent:
            if fixed.space == space:
                by_role[fixed.role.value] += fixed.footprint
        seen = {row.buffer.role.value for row in rows if row.buffer is not None and row.buffer.space == space}
        shown = [name for name in by_role if name in seen or by_role[name]]
        if not shown:
            continue
        live, changed = sum(by_role.values()), True
        for i, row in enumerate(rows):
            buffer = row.buffer
            if buffer is not None and buffer.space == space and row.op in (Op.ALLOC, Op.FREE):
                change = buffer.footprint if row.op is Op.ALLOC else -buffer.footprint
                by_role[buffer.role.value] += change
                live += change
                changed = True
            settled = i + 1 == len(rows) or rows[i + 1].op not in (Op.ALLOC, Op.FREE)
            if changed and settled:
                changed = False
                common = {"ph": "C", "pid": process, "ts": round(reached[i] * 1e9) / 1000}
                yield {**common, "name": f"{space} bytes by role", "args": {name: by_role[name] for name in shown}}
                yield {**common, "name": f"{space} bytes", "args": {"live": live}}


def _compute_reaches(rows: Sequence[Instruction], times: Sequence[tuple[float, float]]) -> list[float]:
    """For every row the start of the first row of ``compute`` from there on: when its ALLOC or FREE is drawn."""
    reached = [0.0] * len(rows)
    at = max((end for row, (_, end) in zip(rows, times, strict=True) if row.stream == COMPUTE), default=0.0)
    for i in reversed(range(len(rows))):
        if rows[i].stream == COMPUTE and rows[i].op not in _COUNTED_ONLY:
            at = times[i][0]
        reached[i] = at
    return reached
