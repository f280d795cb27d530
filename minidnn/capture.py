"""CapturingExecutor: the kernels of a step recorded once as CUDA graphs and replayed by one launch each.

A step has some hundred to many thousand rows, and the host needs microseconds for each. A graph is launched in microseconds
altogether. What becomes one is a *segment*: rows of ``compute`` in a row, of which only the first waits for another stream and
only the last is waited for. So a graph is a chain of kernels, all waiting is done between graphs by the events that rows use,
and to every other stream a segment is a row that takes longer. A row inside of a segment may wait for one that was submitted a
whole run before it or more, which is over as a rule; then it is the segment's first row that waits.

A step that keeps everything has two segments: up to the loss, which is copied to the host, and the rest. Copies and the exchange
between ranks are submitted as ever. (One graph of a whole step with its other streams was measured on an H200: kernels in a
graph that forks follow each other 2 to 4 us later than in a chain. ResNet-50 by ``ring_delayed`` lost 13 %.)

Segments are recorded at the second run of a schedule: the first loads the kernels, which a capture forbids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidnn.executor import BoundRow, BoundSchedule, Executor
from minidnn.schedule.instruction import COMPUTE

UNCAPTURED = ("eval", "gradients", "flush", "flush_other")
"""Schedules that are run too rarely, or that copy into ordinary host memory."""
LEAST_WORKS = 4
"""Kernels that are worth a graph."""


class CapturingExecutor(Executor):
    """See the module. ``device`` must have ``capture``: it is a CudaDevice."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """The arguments of ``Executor``."""
        super().__init__(*arguments, **options)
        self._seen: set[str] = set()
        self._segmented: dict[str, list[BoundRow]] = {}

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return sum(len(row.rows) > 1 for rows in self._segmented.values() for row in rows)

    def units(self, bound: BoundSchedule) -> Sequence[BoundRow]:
        """The rows, and segments from the second run on."""
        name = bound.schedule.name
        if name in UNCAPTURED or name not in self._seen:
            self._seen.add(name)
            return bound.rows
        if name not in self._segmented:
            self._segmented[name] = [unit for segment in segments(bound.rows) for unit in self._captured(segment)]
        return self._segmented[name]

    def _captured(self, segment: Sequence[BoundRow]) -> Sequence[BoundRow]:
        """One row that replays a segment, or the segment where it is too short."""
        works = [row.works[0] for row in segment if row.works[0] is not None]
        if len(segment) == 1 or len(works) < LEAST_WORKS:
            return segment

        def submit() -> None:
            for work in works:
                work()

        replay = self.device.capture(submit)  # type: ignore[attr-defined]
        rows, seconds = tuple(row.rows[0] for row in segment), sum(row.seconds for row in segment)
        return [BoundRow(rows, COMPUTE, (replay,), segment[0].waits, seconds, segment[-1].record)]

    def close(self) -> None:
        """Give graphs and memory back."""
        self._segmented.clear()
        super().close()


def segments(rows: Sequence[BoundRow]) -> list[list[BoundRow]]:
    """Cut rows into segments, in the order of their last rows. A row of another stream, or one that alternates between pinned
    slots, is one of its own. All waits of a segment are at its first row: to wait there, earlier, is never wrong, since what the
    run before has submitted waits for nothing of this one."""
    found: list[list[BoundRow]] = []
    current: list[BoundRow] = []

    def close() -> None:
        if current:
            found.append(current[:])
            current.clear()

    for row in rows:
        if row.stream != COMPUTE:
            found.append([row])
            continue
        alone = len(row.works) > 1
        if alone or not all(lag and awaited <= row.rows[0] for awaited, lag in row.waits):
            close()
        elif row.waits and current:
            current[0] = current[0]._replace(waits=(*current[0].waits, *row.waits))
            row = row._replace(waits=())
        current.append(row)
        if row.record or alone:
            close()
    close()
    return found
