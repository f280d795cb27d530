"""Synchronise: which rows wait for which rows of other streams, derived from the bytes they share. None is redundant.

Before, ``a`` and ``b`` at the same bytes of the slab      After
    0 ALLOC    a   compute                                     0 ALLOC    a   compute  waits for 4 of the previous run
    1 FORWARD  a   compute  writes a                           1 FORWARD  a   compute
    2 OFFLOAD  a   d2h      reads a, writes a.host             2 OFFLOAD  a   d2h      waits for 1
    3 FREE     a   d2h                                         3 FREE     a   d2h
    4 ALLOC    b   h2d                                         4 ALLOC    b   h2d      waits for 2
    5 FREE     b   h2d                                         5 FREE     b   h2d

A stream runs its rows in list order, so a row needs to wait only where an earlier row of another stream touches the same
bytes and at least one of the two writes. ``free`` is not synchronisation: the ALLOC row of the next buffer at these bytes
counts as a write and carries the wait. What a row knows to have ended is a vector clock (Fidge 1988, Mattern 1989): the
latest row of each stream that has ended before it starts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from minidnn.schedule.instruction import DEVICE, HOST, RESULT, STREAMS, Buffer, Instruction, Op, Wait

_BUFFERS_A_PAGE = 4096
_NEVER = -1
_UNTOUCHED = (_NEVER,) * len(STREAMS)
_NUMBERS = {name: number for number, name in enumerate(STREAMS)}
_ALWAYS = 1 << 60  # what a stream knows of itself: it starts a row when all before are done


def synchronise(
    rows: Sequence[Instruction], offsets: Mapping[Buffer, int], *, previous: Sequence[Instruction] | None
) -> list[Instruction]:
    """Return the rows with ``waits`` filled; given waits are ignored. Near-linear in the operands.

    ``offsets`` place the device and host buffers that ``rows`` and ``previous`` touch; persistent buffers and results share
    their bytes with no other buffer. ``previous`` is the run before this one in the declared cycle, most often ``rows``
    itself: its copies may be in flight when this run begins, and a wait for one of its rows has ``lag`` 1. What was in
    flight before ``previous`` began and touches bytes that ``previous`` does not is not waited for. None: nothing is in
    flight at the beginning.
    """
    regions, clocks = _Regions(offsets), _Clocks()
    accesses = [regions.accesses(row) for row in rows]
    earlier = accesses if previous is rows else [regions.accesses(row) for row in previous or ()]
    for row, touched in zip(previous or (), earlier, strict=True):
        clocks.step(row.stream, touched)
    shift = len(clocks.streams)
    ordered = []
    for row, touched in zip(rows, accesses, strict=True):
        ends = clocks.step(row.stream, touched)
        if ends or row.waits:
            waits = sorted(Wait(end - shift) if end >= shift else Wait(end, 1) for end in ends)
            row = row._replace(waits=tuple(waits))
        ordered.append(row)
    return ordered


class _Region:
    """A line of bytes and the history of each.

    Fragment ``i`` reaches from ``starts[i]`` to ``starts[i + 1]``. Its history is the latest row of each stream that touched
    it since it was last written, that row included, and then that row once more.
    """

    __slots__ = ("histories", "starts")

    def __init__(self) -> None:
        self.starts = [0, _ALWAYS]
        self.histories = [[_NEVER] * (len(STREAMS) + 1)]

    def fragments(self, begin: int, end: int) -> tuple[int, int]:
        """Return the first and one past the last of the fragments that make up a range, splitting those at its ends."""
        starts = self.starts
        first = bisect_left(starts, begin)
        if starts[first] != begin:
            starts.insert(first, begin)
            self.histories.insert(first, self.histories[first - 1].copy())
        last = first + 1
        if starts[last] != end:
            last = bisect_left(starts, end, last)
            if starts[last] != end:
                starts.insert(last, end)
                self.histories.insert(last, self.histories[last - 1].copy())
        return first, last


_Access = tuple[_Region, int, int, bool]  # begin, end, writes


class _Regions:
    """A region for each persistent or result buffer, and many for the transient buffers of each slab.

    A slab is cut into pages, a region each: an insertion into a list then moves a page's fragments, not all.
    """

    def __init__(self, offsets: Mapping[Buffer, int]) -> None:
        self.offsets = offsets
        self.page_bytes: dict[str, int] = {}
        self.pages: dict[str, list[_Region]] = {}
        for space in (DEVICE, HOST):
            buffers = [buffer for buffer in offsets if buffer.space == space and not buffer.persistent]
            extent = max((offsets[buffer] + buffer.footprint for buffer in buffers), default=0)
            self.page_bytes[space] = extent // (1 + len(buffers) // _BUFFERS_A_PAGE) + 1
            self.pages[space] = [_Region() for _ in range(extent // self.page_bytes[space] + 1)]
        self.places: dict[Buffer, tuple[_Region | None, int, int, int]] = {}

    def accesses(self, row: Instruction) -> list[_Access]:
        """What a row reads and writes, reads first."""
        found: list[_Access] = []
        if row.op is Op.FREE:
            return found
        if row.op is Op.ALLOC:
            assert row.buffer is not None, "an ALLOC row names its buffer"
            self._add(found, row.buffer, 0, row.buffer.nbytes or 1, True)
            return found
        for value in row.reads:
            self._add(found, value.buffer, value.offset, value.spec.nbytes, False)
        for value in row.writes:
            self._add(found, value.buffer, value.offset, value.spec.nbytes, True)
        if row.workspace is not None:
            self._add(found, row.workspace.buffer, row.workspace.offset, row.workspace.spec.nbytes, True)
        return found

    def _add(self, found: list[_Access], buffer: Buffer, offset: int, nbytes: int, writes: bool) -> None:
        if not nbytes:
            return
        region, begin, end, padded = self.places.get(buffer) or self._place(buffer)
        first = begin + offset
        # the padding goes with the last byte, so that whole buffers are one fragment
        last = first + nbytes if first + nbytes < end else padded
        if region is not None:
            found.append((region, first, last, writes))
            return
        size = self.page_bytes[buffer.space]
        for page in range(first // size, (last - 1) // size + 1):
            region = self.pages[buffer.space][page]
            found.append((region, max(first, page * size), min(last, (page + 1) * size), writes))

    def _place(self, buffer: Buffer) -> tuple[_Region | None, int, int, int]:
        """Region (None: several pages), begin, end, and end of the last block of a buffer."""
        region: _Region | None
        if buffer.persistent or buffer.space == RESULT:
            region, begin = _Region(), 0
        else:
            begin, size = self.offsets[buffer], self.page_bytes[buffer.space]
            page = begin // size
            region = self.pages[buffer.space][page] if begin + buffer.footprint <= (page + 1) * size else None
        place = self.places[buffer] = region, begin, begin + buffer.nbytes, begin + buffer.footprint
        return place


class _Clocks:
    """Vector clocks of the rows so far. Rows are counted from the first of ``previous``."""

    def __init__(self) -> None:
        self.streams: list[int] = []  # of each row
        self.known: list[list[int]] = []  # by each row: the latest row of every stream that ended before it starts
        self.now = [[_NEVER] * len(STREAMS) for _ in STREAMS]  # by the next row of each stream
        for stream, now in enumerate(self.now):
            now[stream] = _ALWAYS

    def step(self, name: str, accesses: Sequence[_Access]) -> list[int]:
        """Add a row and return the rows that it must wait for, at most one of each other stream."""
        streams = self.streams
        row, stream = len(streams), _NUMBERS[name]
        now = self.now[stream]
        if not accesses:
            streams.append(stream)
            self.known.append(now)
            return []
        need: dict[int, int] = {}  # by stream
        compute, d2h, h2d, comm = now  # written out: this is the innermost loop of planning
        for region, begin, end, writes in accesses:
            starts = region.starts
            first = bisect_left(starts, begin)
            last = first + 1
            if starts[first] != begin or starts[last] != end:
                first, last = region.fragments(begin, end)
            histories = region.histories
            if not writes:
                for history in histories[first:last]:
                    writer = history[-1]
                    if writer >= 0 and writer > now[other := streams[writer]] and writer > need.get(other, _NEVER):
                        need[other] = writer
                    history[stream] = row
                continue
            for a, b, c, d, _ in histories[first:last]:
                if a > compute and a > need.get(0, _NEVER):
                    need[0] = a
                if b > d2h and b > need.get(1, _NEVER):
                    need[1] = b
                if c > h2d and c > need.get(2, _NEVER):
                    need[2] = c
                if d > comm and d > need.get(3, _NEVER):
                    need[3] = d
            fresh = [*_UNTOUCHED, row]
            fresh[stream] = row
            histories[first] = fresh
            if last - first > 1:
                del region.starts[first + 1 : last], histories[first + 1 : last]
        streams.append(stream)
        waits = list(need.values())
        if len(waits) > 1:
            waits = [end for end in waits if not any(by != end and self._knows(by, end) for by in waits)]
        if waits:
            self.now[stream] = now = self._learn(stream, now, waits)
        self.known.append(now)
        return waits

    def _knows(self, by: int, end: int) -> bool:
        """Has row ``end`` ended when row ``by``, of another stream, starts?"""
        return self.known[by][self.streams[end]] >= end

    def _learn(self, stream: int, now: Sequence[int], waits: Sequence[int]) -> list[int]:
        """The clock of a stream after waiting: what the rows waited for knew, and that they have ended."""
        learnt = list(now)
        for end in waits:
            of_end = self.streams[end]
            for other, known in enumerate(self.known[end]):
                known = end if other == of_end else known
                if known > learnt[other]:
                    learnt[other] = known
        assert learnt[stream] == _ALWAYS
        return learnt
