"""How long a step keeps the host, and what share of it the GPU is idle.

*Host time* is the wall clock of one ``step.run`` on an idle GPU: writing the batch into pinned memory and submitting every
row, or the head of a captured step and its graph; *submit* is the second part alone. *Idle* compares two measured times:

    idle = 1 - (sum over the rows of ``compute`` of the row's own time) / (time from step to step)

A row's own time is that of a CUDA graph of ``CALLS`` copies of it, divided by them: no launch of the host is in it, the gap of
about a microsecond between two nodes of a graph is. Rows with equal ``row_key`` are measured once. Operands that fit the L2
cache are found there more often than in a step, so that small kernels look shorter and idle longer than it is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import minidnn
from minidnn.schedule.instruction import COMPUTE, Instruction, Op
from minidnn.schedule.timing import row_key

CALLS, REPEATS, HOST_RUNS = 20, 3, 11


def key_of(row: Instruction) -> str:
    """The name of a row's work: equal for rows that take equal time; copies have their operation for a kernel."""
    return row_key(row) if row.kernel else f"copy {row.op.value}{row_key(row)}"


def row_times(step: minidnn.CompiledStep, schedule: str = "train") -> dict[str, float]:
    """Seconds of every distinct row of ``compute`` of a schedule, by its key. The step must have run before."""
    device: Any = step.executor.device
    bound = step.executor.bound(schedule)
    found: dict[str, float] = {}
    # Updates last: repeated, they spoil the weights, and engines are faster on zeros and infinities.
    rows = sorted(zip(bound.schedule.rows, bound.rows, strict=True), key=lambda pair: pair[0].op is Op.UPDATE)
    for row, made in rows:
        work = made.works[0]
        if work is None or row.stream != COMPUTE or (key := key_of(row)) in found:
            continue
        replay = device.capture(lambda work=work: [work() for _ in range(CALLS)])
        times = []
        for _ in range(REPEATS + 1):
            device.synchronize()
            before = device.seconds()
            replay()
            device.synchronize()
            times.append((device.seconds() - before) / CALLS)
        found[key] = statistics.median(times[1:])
    return found


def by_kernel(step: minidnn.CompiledStep, times: dict[str, float]) -> dict[str, list[float]]:
    """For every kernel of a step the time of all its rows, and how many rows: the longest first."""
    found: dict[str, list[float]] = {}
    for row in step.program["train"].rows:
        if row.stream == COMPUTE and (seconds := times.get(key_of(row))) is not None:
            entry = found.setdefault(row.kernel or f"copy {row.op.value}", [0.0, 0])
            entry[0] += seconds
            entry[1] += 1
    return dict(sorted(found.items(), key=lambda entry: -entry[1][0]))


def furthest_from_floor(step: minidnn.CompiledStep, times: dict[str, float], most: int = 40) -> list[dict[str, Any]]:
    """The kinds of row that take longest beyond what bytes and operations ask for, all rows of a kind together.

    The floor is max(bytes moved / bandwidth, operations / rate) of the step's profile; launches are not in it.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in step.program["train"].rows:
        if row.stream != COMPUTE or (seconds := times.get(key_of(row))) is None or not row.kernel:
            continue
        floor = step.gpu.kernel_seconds(row.flops, row.moved_bytes, step.precision.name) - step.gpu.launch_seconds
        entry = found.setdefault(
            key_of(row),
            {
                "kernel": row.kernel, "first": row.target, "rows": 0, "seconds": seconds, "bytes": row.moved_bytes,
                "flops": row.flops, "floor_seconds": floor, "operands": row_key(row),
            },
        )  # fmt: skip
        entry["rows"] += 1
    beyond = {key: entry["rows"] * (entry["seconds"] - entry["floor_seconds"]) for key, entry in found.items()}
    return [found[key] for key in sorted(found, key=lambda key: -beyond[key])[:most]]


def busy_seconds(step: minidnn.CompiledStep, times: dict[str, float]) -> float:
    """Sum of the own times of all rows of ``compute``."""
    return sum(seconds for seconds, _ in by_kernel(step, times).values())


def host_seconds(run: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """Median wall clock of a call on an idle GPU."""
    found = []
    for _ in range(HOST_RUNS):
        synchronize()
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    synchronize()
    return statistics.median(found)
