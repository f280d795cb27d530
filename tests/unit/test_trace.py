"""Traces: valid files, tracks without overlap, and categories that add up to the live bytes at every event."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minidnn.profiles import load
from minidnn.schedule.instruction import DEVICE, HOST, Instruction, Op
from minidnn.schedule.liveness import insert_lifetimes
from minidnn.schedule.placement import place
from minidnn.schedule.simulate import live_curve, schedule_times, simulate
from minidnn.schedule.synchronise import synchronise
from minidnn.trace import TracedSchedule, write_trace
from tests.unit.rows import chain, persistent_offsets, training_step


def traced(depth: int) -> TracedSchedule:
    """A training step that offloads and prefetches, with waits and times."""
    rows = insert_lifetimes(training_step(chain(depth, offload_every=2), batch=2**22, lag=1))
    rows = [r._replace(kernel="k", flops=2e9) if r.op not in (Op.OFFLOAD, Op.PREFETCH, Op.INPUT) else r for r in rows]
    rows = [r._replace(kernel="") if r.op in (Op.ALLOC, Op.FREE) else r for r in rows]
    offsets, ends = persistent_offsets(rows)
    fixed = list(offsets)
    for space in (DEVICE, HOST):
        offsets |= place(rows, base=ends[space], space=space).offsets
    rows = synchronise(rows, offsets, previous=rows)
    return TracedSchedule("train", rows, schedule_times(rows, load("h200"), "fp32"), fixed)


def events_of(path: Path, schedules: list[TracedSchedule]) -> list[dict[str, Any]]:
    write_trace(path, schedules)
    return json.loads(path.read_text())["traceEvents"]  # type: ignore[no-any-return]


def test_every_row_that_takes_time_is_drawn_once_on_the_track_of_its_stream(tmp_path: Path) -> None:
    schedule = traced(8)
    events = events_of(tmp_path / "trace.json", [schedule])
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert sorted(tracks.values()) == ["compute", "d2h", "h2d"]
    drawn = [e for e in events if e["ph"] == "X"]
    timed = [i for i, (start, end) in enumerate(schedule.times) if end > start]
    assert [e["args"]["row"] for e in drawn] == timed and len(timed) > 20
    for e in drawn:
        row, (start, end) = schedule.rows[e["args"]["row"]], schedule.times[e["args"]["row"]]
        assert tracks[e["tid"]] == row.stream and e["cat"] == row.op.value and row.target in e["name"]
        assert e["ts"] == pytest.approx(start * 1e6, abs=1e-3) and e["dur"] == pytest.approx(
            (end - start) * 1e6, abs=2e-3
        )


def test_events_on_a_track_do_not_overlap(tmp_path: Path) -> None:
    tracks = defaultdict(list)
    for e in events_of(tmp_path / "trace.json", [traced(12), traced(3)]):
        if e["ph"] == "X":
            tracks[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    assert len(tracks) == 6
    for spans in tracks.values():
        spans.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("space", [DEVICE, HOST])
def test_categories_add_up_to_the_live_bytes_at_every_event_and_reach_the_peak(tmp_path: Path, space: str) -> None:
    schedule = traced(8)
    events = [e for e in events_of(tmp_path / "trace.json", [schedule]) if e["ph"] == "C"]
    by_role = [e for e in events if e["name"] == f"{space} bytes by role"]
    total = [e for e in events if e["name"] == f"{space} bytes"]
    assert len(by_role) == len(total) > 8
    for roles, live in zip(by_role, total, strict=True):
        assert roles["ts"] == live["ts"] and sum(roles["args"].values()) == live["args"]["live"]
        assert all(nbytes >= 0 for nbytes in roles["args"].values())
    assert [e["ts"] for e in total] == sorted(e["ts"] for e in total)
    base = sum(b.footprint for b in schedule.persistent if b.space == space)
    curve = live_curve(schedule.rows, base, space=space)
    works = [live for r, live in zip(schedule.rows, curve, strict=True) if r.op not in (Op.ALLOC, Op.FREE)]
    steps = [live for before, live in zip([-1, *works], works, strict=False) if live != before]
    shown = [e["args"]["live"] for e in total]
    if shown[-1] == base and steps[-1] != base:
        steps.append(base)  # after the last row
    assert [live for before, live in zip([-1, *shown], shown, strict=False) if live != before] == steps
    assert max(shown) == max(curve)


def test_memory_by_role_at_the_peak_is_what_simulation_reports(tmp_path: Path) -> None:
    schedule = traced(6)
    base = sum(b.footprint for b in schedule.persistent if b.space == DEVICE)
    predicted = simulate(
        schedule.rows, load("h200"), "fp32", base_bytes=base, offsets_extent=0, persistent=schedule.persistent
    )
    counters = [e for e in events_of(tmp_path / "t.json", [schedule]) if e["name"] == f"{DEVICE} bytes by role"]
    top = next(e for e in counters if sum(e["args"].values()) == predicted.peak_bytes)
    assert {name: nbytes for name, nbytes in top["args"].items() if nbytes} == predicted.by_role
    assert schedule.rows[predicted.peak_row].stream == "compute"
    assert top["ts"] == pytest.approx(schedule.times[predicted.peak_row][0] * 1e6, abs=1e-3)


def test_a_repeated_step_is_drawn_once_and_the_file_needs_no_network(tmp_path: Path) -> None:
    once, often = tmp_path / "1.json", tmp_path / "1000.json"
    schedule = traced(100)
    write_trace(once, [schedule])
    write_trace(often, [schedule._replace(repeats=100_000)])
    assert often.stat().st_size < once.stat().st_size + 200
    text = often.read_text()
    assert "one of 100000 equal runs" in text and "http" not in text
    assert often.stat().st_size < 300 * len(schedule.rows)


def test_an_empty_schedule_and_no_schedule_are_valid_files(tmp_path: Path) -> None:
    empty: list[Instruction] = []
    assert len(events_of(tmp_path / "a.json", [TracedSchedule("nothing", empty, [])])) == 1
    assert events_of(tmp_path / "b.json", []) == []
