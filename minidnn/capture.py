"""CapturingExecutor: training steps recorded once as CUDA graphs and replayed by one launch each.

A step has some hundred to many thousand rows, and the host needs microseconds for each. A graph is launched in microseconds
altogether. It is recorded at the second run with a pinned slot: the first loads the kernels, which a capture forbids.

The batch does not travel inside the graph, or it would have to wait for the step before. A run is cut in two:

    head    the rows up to the last INPUT row, submitted one by one. The copy from the pinned slot waits only for the rows of
            the run before that read the staging buffer, so it overlaps with that run; the rest is on ``compute``.
    graph   all other rows. A launch is one unit of work on ``compute``: it begins after the head and all other streams,
            and its end is the end of every copy in it. So no wait for an earlier run is needed inside, and none is recorded.

NCCL's calls are rows of the graph like others. It wants a call to be captured on all ranks or on none, so ``ParallelStep``
sees to it that all ranks come to a schedule with the same pinned slot.

Evaluation, gradients and every other schedule run row by row; the first of them after a graph waits for its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from minidnn.device.base import Device, Event
from minidnn.executor import BATCHES_IN_FLIGHT, BoundSchedule, Executor
from minidnn.parallel.communicator import Communicator
from minidnn.profiles import Profile
from minidnn.schedule.instruction import COMPUTE, H2D, Op
from minidnn.schedule.program import Program, Schedule

UNCAPTURED = ("eval", "gradients", "flush", "flush_other")
"""Schedules that are run too rarely, or that copy into ordinary host memory."""


class CapturingExecutor(Executor):
    """See the module. ``device`` must have ``capture``, ``launch`` and ``follow``: it is a CudaDevice."""

    def __init__(
        self,
        program: Program,
        device: Device,
        profile: Profile,
        precision: str,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__(program, device, profile, precision, communicator=communicator)
        self._graphs: dict[tuple[str, int], object] = {}
        self._seen: set[tuple[str, int]] = set()
        self._end: Event | None = None  # of the graph launched last, while nothing else has run since
        self._staged: list[Event] = []  # of the last head: the rows that read the staging buffer

    def run(self, name: str) -> Event:
        """Submit one run of a schedule, captured if it has been seen before. Returns an event after its results."""
        key = name, self._runs % BATCHES_IN_FLIGHT
        if name in UNCAPTURED or key not in self._seen:
            self._seen.add(key)
            return self._run_rows(name)
        bound = self.bound(name)
        head = head_rows(bound.schedule)
        if key not in self._graphs:
            capture = self.device.capture  # type: ignore[attr-defined]
            self._graphs[key] = capture(partial(self._submit, bound, range(head, len(bound.rows)), []))
        self._input(bound, head)
        end: Event = self.device.launch(self._graphs[key], alone=False)  # type: ignore[attr-defined]
        self._end, self._last = end, None
        self._ends[self._runs % BATCHES_IN_FLIGHT] = end
        self._runs += 1
        return end

    def _run_rows(self, name: str) -> Event:
        """Row by row. After a graph, every stream first waits for its end: no event inside it can be waited for."""
        if self._end is not None:
            self.device.follow(self._end)  # type: ignore[attr-defined]
        self._end, self._staged = None, []
        return super().run(name)

    def _input(self, bound: BoundSchedule, head: int) -> None:
        """Submit the head. After another graph, its copy waits for the staging buffer; after rows, for those rows' ends."""
        if self._end is None and self._last is not None:
            self.device.follow_all()  # type: ignore[attr-defined]
        self._staged = self._submit(bound, range(head), self._staged)

    def _submit(self, bound: BoundSchedule, rows: Sequence[int], before: Sequence[Event]) -> list[Event]:
        """Submit some rows; the copies among them wait for ``before``. Returns the last event of ``compute``."""
        parity = self._runs % BATCHES_IN_FLIGHT
        submit, events, last = self.device.submit, dict[int, Event](), None
        for index in rows:
            stream, works, waits, seconds, record = bound.rows[index]
            after = [events[w] for w, lag in waits if not lag and w in events]
            if before and stream == H2D:
                after += before
            work = works[parity if len(works) > 1 else 0]
            record = record or index == rows[-1]
            events[index] = submit(stream, work, after, seconds, record)
            last = events[index] if stream == COMPUTE and record else last
        return [] if last is None else [last]

    def close(self) -> None:
        """Give graphs and memory back."""
        self._graphs.clear()
        self._end, self._staged = None, []
        super().close()


def head_rows(schedule: Schedule) -> int:
    """How many rows stay outside of the graph: up to the last INPUT row, if they are nothing but the way of the batch."""
    rows = schedule.rows
    last = max((i for i, row in enumerate(rows) if row.op is Op.INPUT), default=-1)
    own = all(row.stream == COMPUTE or row.op is Op.INPUT for row in rows[: last + 1])
    return last + 1 if own and rows[last].stream == COMPUTE else 0
