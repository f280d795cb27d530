"""Placement v1"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minidnn.schedule.instruction import DEVICE, Buffer, Instruction, Op
from minidnn.spec import round_up


@dataclass(frozen=True, slots=True)
class Placement:
    """Offsets of the buffers of one space. ``extent``: the highest end; ``peak``: most bytes alive at once; both in bytes."""

    offsets: Mapping[Buffer, int]
    base: int
    extent: int
    peak: int

    @property
    def fragmentation(self) -> int:
        """Bytes by which the extent exceeds what any placement needs."""
        return self.extent - self.base - self.peak


def place(rows: Sequence[Instruction], *, base: int = 0, space: str = DEVICE) -> Placement:
    """v1: best fit in row order, open ended."""
    base = round_up(base)
    offsets: dict[Buffer, int] = {}
    live = peak = 0
    extent = base
    free: list[tuple[int, int]] = []
    begin_of: dict[int, int] = {}
    end_of: dict[int, int] = {}
    top = base
    for row in rows:
        buffer = row.buffer
        if buffer is None or buffer.space != space or buffer.persistent:
            continue
        size = buffer.footprint
        if row.op is Op.ALLOC:
            live += size
            peak = max(peak, live)
            at = bisect_left(free, (size, 0))
            if at < len(free):
                hole, begin = free.pop(at)
                del begin_of[begin + hole], end_of[begin]
                if hole > size:
                    insort(free, (hole - size, begin + size))
                    begin_of[begin + hole] = begin + size
                    end_of[begin + size] = begin + hole
            else:
                begin = top
                if top in begin_of:
                    begin = begin_of.pop(top)
                    del end_of[begin]
                    free.remove((top - begin, begin))
                top = begin + size
                extent = max(extent, top)
            offsets[buffer] = begin
        elif row.op is Op.FREE:
            live -= size
            begin, end = offsets[buffer], offsets[buffer] + size
            if begin in begin_of:
                left = begin_of.pop(begin)
                free.remove((begin - left, left))
                del end_of[left]
                begin = left
            if end in end_of:
                right = end_of.pop(end)
                free.remove((right - end, end))
                del begin_of[right]
                end = right
            if end == top:
                top = begin
            else:
                insort(free, (end - begin, begin))
                begin_of[end] = begin
                end_of[begin] = end
    return Placement(offsets, base, extent, peak)
