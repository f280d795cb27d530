"""When the rows of a steady step run, and for which rows of other streams they wait."""

from __future__ import annotations

from collections.abc import Sequence

from layup.report.spaces import MEMORY_OPS
from minidnn.profiles import Profile
from minidnn.schedule.instruction import Instruction, Wait
from minidnn.schedule.simulate import schedule_times


def steady_times(rows: Sequence[Instruction], gpu: Profile, precision: str) -> list[tuple[int, int]]:
    """Start and end of every row in nanoseconds, in a step that follows an equal one; 0 is the last end of that one.

    Copies can be in flight across the boundary, so the step is simulated after itself, as ``step_time`` does.
    """
    count = len(rows)
    if not count:
        return []
    second = [
        row._replace(waits=tuple(Wait(w.row + count * (1 - w.lag)) for w in row.waits if w.row < count))
        if row.waits
        else row
        for row in rows
    ]
    first = [row._replace(waits=tuple(w for w in row.waits if not w.lag)) if row.waits else row for row in rows]
    times = schedule_times([*first, *second], gpu, precision)
    origin = max(end for _, end in times[:count])
    return [(round((start - origin) * 1e9), round((end - origin) * 1e9)) for start, end in times[count:]]


def waits_between(rows: Sequence[Instruction], position: Sequence[int]) -> list[int]:
    """Waits between streams as ``row, waited row, lag``, flat; rows that run are counted, the lag is in steps.

    ``position``: of every row, how many rows run before it.

    An ALLOC row's wait is the next row's in its stream: memory is not touched before. A wait for an ALLOC or FREE row is for
    the last row that ran before it in its stream; without one there is nothing to wait for.
    """
    last: dict[str, int] = {}
    before: list[int] = []  # of every row: itself if it runs, else the last that ran in its stream
    for index, row in enumerate(rows):
        if row.op not in MEMORY_OPS:
            last[row.stream] = position[index]
        before.append(last.get(row.stream, -1))
    flat: list[int] = []
    pending: dict[str, list[Wait]] = {}
    for index, row in enumerate(rows):
        waits = pending.setdefault(row.stream, [])
        waits += row.waits
        if row.op in MEMORY_OPS or not waits:
            continue
        for wait in dict.fromkeys(waits):
            target = before[wait.row]
            if target >= 0 and rows[wait.row].stream != row.stream:
                flat += [position[index], target, wait.lag]
        waits.clear()
    return flat
