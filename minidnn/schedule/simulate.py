"""Simulate: what a schedule takes, in bytes and in seconds, before anything runs.

Bytes come from the ALLOC and FREE rows, in row order, and are exact; seconds are the model of ``schedule.timing``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minidnn.profiles import Profile
from minidnn.schedule.instruction import DEVICE, HOST, Buffer, Instruction, Op
from minidnn.schedule.timing import row_key, row_seconds, schedule_times, step_time

__all__ = [
    "MemoryProfile", "Resident", "live_buffers", "live_curve", "row_key", "row_seconds", "schedule_times", "simulate",
    "step_time", "total_footprint",
]  # fmt: skip


class Resident(NamedTuple):
    """A buffer alive at the peak: its name, the layer it belongs to, its role and the bytes it takes in the slab.

    ``decision``: what the plan decides for that layer, where it decides something.
    """

    name: str
    layer: str
    role: str
    nbytes: int
    decision: str = ""

    @property
    def label(self) -> str:
        """Layer, role and decision for a sentence."""
        decided = f" ({self.decision})" if self.decision else ""
        return f"{self.layer or self.name} {self.role}{decided}"


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """What one run of a schedule takes.

    ``peak_bytes``: maximum of the live device bytes, persistent ones included. ``reserved_bytes``: extent of the slab.
    ``host_bytes``: extent of the pinned slab; ``host_peak_bytes``: maximum of the live pinned bytes. ``step_seconds``:
    time from one step to the next in the steady state; ``stream_seconds``: time each stream is busy in a step.
    ``residents_at_peak``: largest first, their bytes add up to the peak; ``by_role``: the same by role. ``peak_row``:
    index of the first row that runs at the peak, ``peak_text`` says which it is.
    """

    peak_bytes: int
    reserved_bytes: int
    host_bytes: int
    host_peak_bytes: int
    step_seconds: float
    stream_seconds: Mapping[str, float]
    residents_at_peak: tuple[Resident, ...]
    by_role: Mapping[str, int]
    peak_row: int
    peak_text: str


def simulate(
    rows: Sequence[Instruction],
    profile: Profile,
    precision: str,
    *,
    base_bytes: int,
    offsets_extent: int,
    host_bytes: int = 0,
    persistent: Iterable[Buffer] = (),
) -> MemoryProfile:
    """Predict bytes and time of a schedule with its ALLOC, FREE rows and waits. Looks at no budget.

    ``base_bytes`` are the persistent device bytes, ``persistent`` the buffers they consist of (pinned ones may be among
    them and count on the host). ``offsets_extent`` and ``host_bytes`` are the extents found by placement.
    """
    fixed = list(persistent)
    on_device = [buffer for buffer in fixed if buffer.space == DEVICE]
    total = sum(buffer.footprint for buffer in on_device)
    assert not fixed or total == base_bytes, f"persistent buffers take {total} bytes, not base_bytes = {base_bytes}"
    curve = live_curve(rows, base_bytes)
    peak = max(curve, default=base_bytes)
    peak_row = _first_at(rows, curve, peak)
    alive = [*on_device, *live_buffers(rows[: peak_row + 1])]
    residents = [Resident(b.name, b.layer, b.role.value, b.footprint, str(b.decision)) for b in alive]
    residents.sort(key=lambda resident: (-resident.nbytes, resident.name))
    by_role: dict[str, int] = {}
    for resident in residents:
        by_role[resident.role] = by_role.get(resident.role, 0) + resident.nbytes
    host_base = total_footprint(fixed, HOST)
    step_seconds, stream_seconds = step_time(rows, profile, precision)
    return MemoryProfile(
        peak_bytes=peak,
        reserved_bytes=offsets_extent,
        host_bytes=host_bytes,
        host_peak_bytes=max(live_curve(rows, host_base, space=HOST), default=host_base),
        step_seconds=step_seconds,
        stream_seconds=stream_seconds,
        residents_at_peak=tuple(residents),
        by_role=by_role,
        peak_row=peak_row,
        peak_text=f"row {peak_row}, {rows[peak_row].op.value} {rows[peak_row].target}" if rows else "no row",
    )


def _first_at(rows: Sequence[Instruction], curve: Sequence[int], peak: int) -> int:
    """The first row that runs with ``peak`` bytes alive: the work for which the last ALLOC was made, not the ALLOC."""
    at_peak = [i for i, live in enumerate(curve) if live == peak]
    return next((i for i in at_peak if rows[i].op is not Op.ALLOC), at_peak[0] if at_peak else 0)


def live_curve(rows: Iterable[Instruction], base_bytes: int = 0, *, space: str = DEVICE) -> list[int]:
    """Bytes alive after each row: ``base_bytes`` plus the footprints allocated and not yet freed in that space."""
    live = base_bytes
    curve = []
    for row in rows:
        buffer = row.buffer
        if buffer is not None and buffer.space == space:
            if row.op is Op.ALLOC:
                live += buffer.footprint
            elif row.op is Op.FREE:
                live -= buffer.footprint
        curve.append(live)
    return curve


def live_buffers(rows: Iterable[Instruction], *, space: str = DEVICE) -> list[Buffer]:
    """Buffers allocated and not freed by these rows, in the order of their allocation."""
    alive: dict[Buffer, None] = {}
    for row in rows:
        if row.buffer is not None and row.buffer.space == space:
            if row.op is Op.ALLOC:
                alive[row.buffer] = None
            elif row.op is Op.FREE:
                alive.pop(row.buffer)
    return list(alive)


def total_footprint(buffers: Iterable[Buffer], space: str = DEVICE) -> int:
    """Bytes that buffers of a space take together."""
    return sum(buffer.footprint for buffer in buffers if buffer.space == space)
