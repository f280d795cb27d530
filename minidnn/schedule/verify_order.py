"""The part of ``verify`` that is about order: do the waits that are written down order all rows that share bytes?

Within one life of a buffer, the uses of each byte are compared; between buffers, an ALLOC row with the last uses of who had
its bytes before. Rows are numbered through both runs, the previous one first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from minidnn.schedule.instruction import DEVICE, HOST, STREAMS, Buffer, Instruction, Op, Value


def name_of(rows: Sequence[Instruction], index: int) -> str:
    """A row as problems name it."""
    return f"row {index} ({rows[index].op} {rows[index].target} on {rows[index].stream})"


def order_problems(
    rows: Sequence[Instruction], offsets: Mapping[Buffer, int], previous: Sequence[Instruction] | None
) -> Iterator[str]:
    """Yield what is wrong with the waits: those that mean nothing, deadlock, and conflicts that no wait orders."""
    before = [] if previous is None else list(previous)
    yield from _wait_problems(rows, len(before))
    guarantees = _Guarantees(before, rows)
    found: dict[tuple[int, int], str] = {}

    def compare(first: int, second: int, what: str) -> None:
        if second >= len(before) and not guarantees.ordered(first, second):
            found[second, first] = what

    owned: dict[str, list[_Owned]] = {DEVICE: [], HOST: []}
    for life in _lives([*before, *rows]):
        buffer = life.buffer
        several = len({guarantees.streams[use >> 1] for use in life.rows()}) > 1
        for begin, end, uses in life.sweep():
            if several:
                for first, second in _conflicts(uses):
                    compare(first, second, buffer.name)
            if life.born >= 0 and buffer.space in owned and buffer in offsets:
                at = offsets[buffer]
                last = {guarantees.streams[use >> 1]: use >> 1 for use in uses}
                owned[buffer.space].append(_Owned(at + begin, at + end, life, tuple(last.values())))
    for ranges in owned.values():
        for earlier, later in _successions(ranges):
            for first in earlier.last:
                lost, new = earlier.life.buffer.name, later.life.buffer.name
                compare(first, later.life.born, lost if lost == new else f"bytes of {lost} that are now of {new}")
    for (second, first), what in sorted(found.items()):
        here = first - len(before)
        other = name_of(rows, here) if here >= 0 else f"{name_of(before, first)} of the previous run"
        yield f"{name_of(rows, second - len(before))} and {other} both touch {what}, and no wait orders them"


def _wait_problems(rows: Sequence[Instruction], count_before: int) -> Iterator[str]:
    ahead = False
    for index, row in enumerate(rows):
        if row.stream not in STREAMS:
            yield f"{name_of(rows, index)}: there is no such stream"
        for wait in row.waits:
            if wait.lag not in (0, 1) or not 0 <= wait.row < (count_before if wait.lag else len(rows)):
                whose = f"of the run {wait.lag} before" if wait.lag else "of this run"
                yield f"{name_of(rows, index)} waits for row {wait.row} {whose}, which does not exist"
            elif not wait.lag and wait.row >= index:
                ahead = True
                yield f"{name_of(rows, index)} waits for {name_of(rows, wait.row)}, which is not before it"
    if ahead:
        yield from _deadlock(rows)


def _deadlock(rows: Sequence[Instruction]) -> Iterator[str]:
    """Run the streams as far as the waits allow; whatever is left waits for itself."""
    queues: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        queues[row.stream].append(index)
    done = [False] * len(rows)
    heads = dict.fromkeys(queues, 0)
    moved = True
    while moved:
        moved = False
        for stream, queue in queues.items():
            head = heads[stream]
            while head < len(queue) and all(
                wait.lag or not 0 <= wait.row < len(rows) or done[wait.row] for wait in rows[queue[head]].waits
            ):
                done[queue[head]] = True
                head += 1
            moved = moved or head > heads[stream]
            heads[stream] = head
    stuck = [queue[heads[stream]] for stream, queue in queues.items() if heads[stream] < len(queue)]
    if stuck:
        yield "deadlock: " + " and ".join(name_of(rows, index) for index in stuck) + " can never start"


class _Guarantees:
    """What the waits guarantee.

    For every pair of streams a staircase: from row ``i`` of the one on, row ``j`` of the other has ended. Only waits make
    steps, so this is as long as there are waits, not as long as there are rows.
    """

    def __init__(self, before: Sequence[Instruction], rows: Sequence[Instruction]) -> None:
        self.streams = [row.stream for row in before] + [row.stream for row in rows]
        self.stairs: dict[tuple[str, str], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for index, row in enumerate(before):
            for wait in row.waits:
                if wait.lag == 0 and 0 <= wait.row < index:
                    self._add(index, wait.row)
        for index, row in enumerate(rows, len(before)):
            for wait in row.waits:
                ended = wait.row if wait.lag else wait.row + len(before)
                if wait.row >= 0 and ended < (len(before) if wait.lag else index):
                    self._add(index, ended)

    def _add(self, index: int, ended: int) -> None:
        """Row ``index`` waits for row ``ended``, hence for all that this one waits for."""
        for other in STREAMS:
            known = ended if other == self.streams[ended] else self._ended(ended, other)
            at, level = self.stairs[self.streams[index], other]
            if known > (level[-1] if level else -1):
                at.append(index)
                level.append(known)

    def _ended(self, index: int, other: str) -> int:
        """The latest row of stream ``other`` that has ended when row ``index`` starts, or -1."""
        at, level = self.stairs[self.streams[index], other]
        step = bisect_right(at, index)
        return level[step - 1] if step else -1

    def ordered(self, first: int, second: int) -> bool:
        """Has row ``first`` ended when row ``second``, a later one, starts?"""
        return self.streams[first] == self.streams[second] or self._ended(second, self.streams[first]) >= first


class _Life:
    """The uses of a buffer from one ALLOC to the next, as ``2 * row + writes``. ``born``: the row of the ALLOC, -1 if none."""

    __slots__ = ("born", "buffer", "parts", "whole")

    def __init__(self, buffer: Buffer, born: int = -1) -> None:
        self.buffer = buffer
        self.born = born
        self.whole: list[int] = [] if born < 0 else [2 * born + 1]  # uses of all bytes
        self.parts: list[tuple[int, int, int]] = []  # begin, end and use of some bytes

    def add(self, value: Value, use: int) -> None:
        """Note a use."""
        nbytes = value.spec.nbytes
        if nbytes == self.buffer.nbytes:
            self.whole.append(use)
        elif nbytes:
            end = value.offset + nbytes
            # the padding of a buffer is used with its last byte
            self.parts.append((value.offset, self.buffer.footprint if end == self.buffer.nbytes else end, use))

    def rows(self) -> Iterator[int]:
        """All uses, in no order."""
        yield from self.whole
        yield from (use for _, _, use in self.parts)

    def sweep(self) -> Iterator[tuple[int, int, Sequence[int]]]:
        """Yield ranges, in order of address, within which no use begins or ends, each with its uses in row order."""
        if not self.parts:
            yield 0, self.buffer.footprint, self.whole
            return
        edges = {edge for begin, end, _ in self.parts for edge in (begin, end)} | {0, self.buffer.footprint}
        starting = sorted(self.parts, reverse=True)
        active: list[tuple[int, int]] = []  # use, end
        for begin, end in pairwise(sorted(edges)):
            active = [pair for pair in active if pair[1] > begin]
            while starting and starting[-1][0] == begin:
                _, its_end, use = starting.pop()
                active.append((use, its_end))
            if active or self.whole:
                yield begin, end, sorted([*self.whole, *(use for use, _ in active)])


def _lives(rows: Sequence[Instruction]) -> Iterator[_Life]:
    """Yield the lives of all buffers, those that were allocated in the order in which they were."""
    lives: dict[Buffer, _Life] = {}
    found: list[_Life] = []

    def life(buffer: Buffer) -> _Life:
        if buffer not in lives:
            lives[buffer] = _Life(buffer)
            found.append(lives[buffer])
        return lives[buffer]

    for index, row in enumerate(rows):
        if row.buffer is not None:
            if row.op is Op.ALLOC:
                lives[row.buffer] = _Life(row.buffer, index)
                found.append(lives[row.buffer])
            continue
        for value in row.reads:
            life(value.buffer).add(value, 2 * index)
        for value in row.writes:
            life(value.buffer).add(value, 2 * index + 1)
        if row.workspace is not None:
            life(row.workspace.buffer).add(row.workspace, 2 * index + 1)
    return iter(found)


def _conflicts(uses: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of rows that conflict on one byte, given its uses in row order; implied pairs are left out."""
    writer = -1
    readers: list[int] = []
    for use in uses:
        row = use >> 1
        if writer >= 0 and writer != row:
            yield writer, row
        if use & 1:
            yield from ((reader, row) for reader in readers if reader != row)
            writer, readers = row, []
        else:
            readers.append(row)


class _Owned(NamedTuple):
    """Bytes ``begin`` to ``end`` of a slab during one life of a buffer. ``last``: the last row of each stream to use them."""

    begin: int
    end: int
    life: _Life
    last: tuple[int, ...]


def _successions(owned: Sequence[_Owned]) -> Iterator[tuple[_Owned, _Owned]]:
    """Yield pairs that have a byte in common and follow each other there, given all in the order of birth.

    Sweeps the addresses: those who own the byte at hand at some time are kept in order of birth, and whenever one comes, it
    has two new neighbours. Neighbours of one that goes are ordered through it.
    """
    leaving = sorted(range(len(owned)), key=lambda number: owned[number].end, reverse=True)
    here: list[int] = []
    for number in sorted(range(len(owned)), key=lambda number: owned[number].begin):
        while leaving and owned[leaving[-1]].end <= owned[number].begin:
            del here[bisect_left(here, leaving.pop())]
        place = bisect_left(here, number)
        if place > 0:
            yield owned[here[place - 1]], owned[number]
        if place < len(here):
            yield owned[number], owned[here[place]]
        here.insert(place, number)
