"""Executor: binds the rows of a program to a device once, then dispatches them, step after step.

One loop for both devices. Nothing is allocated in a step, nothing waits on the host: the host waits only where it must reuse
a pinned slot whose batch is still on its way, or where the caller reads a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from minidnn.device.base import Array, Device, Event, Work
from minidnn.parallel.communicator import Communicator
from minidnn.parallel.rows import EXCHANGES, exchange_work
from minidnn.profiles import Profile
from minidnn.schedule.instruction import RESULT, Buffer, Instruction, Op, Value
from minidnn.schedule.program import Program, Schedule
from minidnn.schedule.simulate import row_seconds
from minidnn.spec import TensorSpec

BATCHES_IN_FLIGHT = 2
"""Pinned slots for batches and for results: how far the host may run ahead of the device."""


class BoundRow(NamedTuple):
    """A row on fixed addresses, or several that are submitted as one: ``rows`` are their numbers in the schedule.

    ``works`` has one entry, or one for each pinned slot.
    """

    rows: tuple[int, ...]
    stream: str
    works: tuple[Work | None, ...]
    waits: tuple[tuple[int, int], ...]  # (row, lag)
    seconds: float
    record: bool  # whether another row, or the host, waits for this one


class BoundSchedule:
    """A schedule bound to a device, and the events of its last run."""

    def __init__(self, schedule: Schedule, rows: list[BoundRow], results: dict[str, Array]) -> None:
        self.schedule = schedule
        self.rows = rows
        self.results = results
        self.events: list[Event] = []
        self.heads = {min(i for i, row in enumerate(rows) if row.stream == s) for s in {r.stream for r in rows}}
        self.tails = {max(i for i, row in enumerate(rows) if row.stream == s) for s in {r.stream for r in rows}}
        self.result_row = max(i for i, row in enumerate(schedule.rows) if row.op is Op.FETCH)


class Executor:
    """Runs the schedules of a program in its slab. Raises whatever the device raises when the slab cannot be had."""

    def __init__(
        self, program: Program, device: Device, profile: Profile, precision: str, *, reserve: bool = True,
        communicator: Communicator | None = None,
    ) -> None:  # fmt: skip
        self.program = program
        self.communicator = communicator
        self.device = device
        self._profile = profile
        self._precision = precision
        if reserve:
            device.open(program.reserved_bytes, program.host_bytes)
        p = program.persistent
        self._slots: Mapping[Buffer, tuple[Buffer, ...]] = {
            p.slot: (p.slot, p.other_slot),
            p.result: (p.result, p.other_result),
        }
        self._bound: dict[str, BoundSchedule] = {}
        self._last: BoundSchedule | None = None
        self._runs = 0
        self._ends: list[Event | None] = [None] * BATCHES_IN_FLIGHT

    def view(self, value: Value, offsets: Mapping[Buffer, int] | None = None, *, slot: int = 0) -> Array:
        """The array of a value; of pinned slots, the one for runs of this parity."""
        buffer = self._slots[value.buffer][slot] if value.buffer in self._slots else value.buffer
        base = (offsets or self.program.persistent_offsets)[buffer]
        return self.device.array(buffer.space, base + value.offset, value.spec)

    def slot_bytes(self, buffer: Buffer) -> Array:
        """All bytes of a pinned slot."""
        spec = TensorSpec((buffer.footprint,), "uint8")
        return self.device.array(buffer.space, self.program.persistent_offsets[buffer], spec)

    # -- binding ----------------------------------------------------------------------------------------------------
    def bound(self, name: str) -> BoundSchedule:
        """The bound rows of a schedule, bound at first use."""
        if name not in self._bound:
            schedule = self.program[name]
            results: dict[str, Array] = {}
            awaited = {w.row for row in schedule.rows for w in row.waits}
            awaited |= {i for i, row in enumerate(schedule.rows) if row.op is Op.FETCH}
            awaited |= set({row.stream: i for i, row in enumerate(schedule.rows)}.values())
            rows = [self._bind(i, schedule, results, i in awaited) for i in range(len(schedule.rows))]
            self._bound[name] = BoundSchedule(schedule, rows, results)
        return self._bound[name]

    def _bind(self, index: int, schedule: Schedule, results: dict[str, Array], record: bool) -> BoundRow:
        row = schedule.rows[index]
        seconds = row_seconds(row, self._profile, self._precision)
        waits = tuple((w.row, w.lag) for w in row.waits)
        slotted = any(v.buffer in self._slots for v in (*row.writes, *row.reads))
        works = tuple(self._work(row, schedule, results, slot) for slot in range(BATCHES_IN_FLIGHT if slotted else 1))
        return BoundRow((index,), row.stream, works, waits, seconds, record)

    def _work(self, row: Instruction, schedule: Schedule, results: dict[str, Array], slot: int) -> Work | None:
        if row.op in (Op.FREE, Op.HOLD):
            return None
        if row.op is Op.ALLOC:
            assert row.buffer is not None
            start = schedule.offsets[row.buffer]
            return self.device.birth(self.device.array(row.buffer.space, start, _bytes(row.buffer)), row.stream)
        arrays = [
            results.setdefault(v.name, self._result_array(v))
            if v.buffer.space == RESULT
            else self.view(v, schedule.offsets, slot=slot)
            for v in (*row.writes, *row.reads)
        ]
        if row.op in EXCHANGES:
            return exchange_work(self.communicator, row, arrays)
        if not row.kernel:
            return self.device.copy(arrays[0], arrays[1], row.stream)
        scratch = None if row.workspace is None else self.view(row.workspace, schedule.offsets)
        return self.device.kernel(row.kernel, arrays, scratch, row.attrs, row.stream)

    def _result_array(self, value: Value) -> Array:
        return np.empty(value.spec.shape, value.spec.dtype)

    # -- running ----------------------------------------------------------------------------------------------------
    def slot(self) -> int:
        """Which pinned slot the next run uses. Waits until the run before last, which used it, is done."""
        parity = self._runs % BATCHES_IN_FLIGHT
        if (end := self._ends[parity]) is not None:
            self.device.wait(end)
        return parity

    def run(self, name: str) -> Event:
        """Submit one run of a schedule and return the event of its last FETCH. The pinned slot must be filled."""
        bound = self.bound(name)
        parity = self._runs % BATCHES_IN_FLIGHT
        last = self._last
        cyclic = last is not None and last.schedule.name == bound.schedule.previous
        before: list[Event] = last.events if last is not None and cyclic else []
        # Not the declared cycle: the first row of every stream waits for the last row of every stream.
        fence = [last.events[i] for i in last.tails] if last is not None and not cyclic else []
        submit = self.device.submit
        events: list[Event] = [None] * len(bound.rows)
        for rows, stream, works, waits, seconds, record in self.units(bound):
            after: Sequence[Event] = ()
            if waits:
                after = [events[w] if not lag else before[w] for w, lag in waits if not lag or before]
            if fence and rows[0] in bound.heads:
                after = [*after, *fence]
            event = submit(stream, works[parity if len(works) > 1 else 0], after, seconds, record)
            if record:
                events[rows[-1]] = event
        bound.events = events
        self._last = bound
        self._runs += 1
        end = self._ends[parity] = events[bound.result_row]
        return end

    def units(self, bound: BoundSchedule) -> Sequence[BoundRow]:
        """What is submitted one by one: the rows."""
        return bound.rows

    def twin(self, device: Device) -> Executor:
        """An executor of the same program, row by row, in a slab on another device."""
        return Executor(self.program, device, self._profile, self._precision, communicator=self.communicator)

    def close(self) -> None:
        """Give the device's memory back. The device itself stays."""
        self._bound.clear()
        self._last = None
        self.device.release()


def _bytes(buffer: Buffer) -> TensorSpec:
    return TensorSpec((buffer.footprint,), "uint8")
