"""Verify: an independent reading of a finished list of rows. Shares no code with the passes that made it.

Three readers, each of one pass over the rows: residence (ALLOC and FREE in pairs, uses between them, no two residents on the
same bytes, all inside the slab), meaning (what is read was written, and not overwritten since), and order (rows of
different streams that touch the same bytes are ordered by the waits that are written down, over this run and the previous).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from minidnn.schedule.instruction import DEVICE, HOST, STREAMS, Buffer, Instruction, Op, Value

_SPACES = (DEVICE, HOST)


class ScheduleError(RuntimeError):
    """A pass made a wrong schedule: a bug of ours, never a mistake of the user's."""


def check(
    rows: Sequence[Instruction],
    offsets: Mapping[Buffer, int],
    *,
    previous: Sequence[Instruction] | None = None,
    extent: int | None = None,
    host_extent: int | None = None,
) -> None:
    """Raise ScheduleError with the first five problems of ``verify``, or return."""
    problems = verify(rows, offsets, previous=previous, extent=extent, host_extent=host_extent)
    if problems:
        more = f"\n... and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ScheduleError("the schedule is wrong:\n" + "\n".join(problems[:5]) + more)


def verify(
    rows: Sequence[Instruction],
    offsets: Mapping[Buffer, int],
    *,
    previous: Sequence[Instruction] | None = None,
    extent: int | None = None,
    host_extent: int | None = None,
) -> list[str]:
    """Return what is wrong with a schedule, as sentences; empty if nothing is. Raises nothing and mends nothing.

    ``offsets``, ``previous``: as for ``synchronise``. ``extent``, ``host_extent``: bytes of the two slabs, None unlimited.
    Persistent buffers hold something meaningful when the run starts. Problems inside ``previous`` are not reported: verify
    it with its own previous run. HOLD rows read bytes but no meaning. O(n log n) in the operands of all rows.
    """
    limits = {DEVICE: extent, HOST: host_extent}
    problems = [*_residence(rows, offsets, limits), *_meaning(rows)]
    waits = [*_wait_problems(rows, previous)]
    return [*problems, *waits, *_order(rows, offsets, previous)]


def _name(rows: Sequence[Instruction], index: int) -> str:
    return f"row {index} ({rows[index].op} {rows[index].target} on {rows[index].stream})"


def _values(row: Instruction) -> Iterator[tuple[Value, bool]]:
    """The operands of a row, and whether each is written. Reads come first."""
    for value in row.reads:
        yield value, False
    for value in row.writes:
        yield value, True
    if row.workspace is not None:
        yield row.workspace, True


# ---- residence: which buffers are where, and when ---------------------------------------------------------------------


class _Slab:
    """The residents of one space in order of address."""

    def __init__(self, space: str, limit: int | None) -> None:
        self.space = space
        self.limit = limit
        self.begins: list[int] = []
        self.residents: list[Buffer] = []

    def admit(self, buffer: Buffer, offset: int) -> Iterator[str]:
        """Add a resident. Yields what it collides with."""
        end = offset + buffer.footprint
        if offset < 0 or (self.limit is not None and end > self.limit):
            limit = "" if self.limit is None else f" of {self.limit} bytes"
            yield f"{buffer.name} at bytes {offset}..{end} lies beyond the {self.space} slab{limit}"
        place = bisect_left(self.begins, offset)
        neighbours = [place - 1] if place > 0 else []
        neighbours += [place] if place < len(self.begins) else []
        for index in neighbours:
            other, begin = self.residents[index], self.begins[index]
            if begin < end and offset < begin + other.footprint:
                yield (
                    f"{buffer.name} at {self.space} bytes {offset}..{end} overlaps {other.name} at {begin}.."
                    f"{begin + other.footprint}, which lives there"
                )
        self.begins.insert(place, offset)
        self.residents.insert(place, buffer)

    def dismiss(self, buffer: Buffer, offset: int) -> None:
        """Remove a resident."""
        place = bisect_left(self.begins, offset)
        while self.residents[place] is not buffer:
            place += 1
        del self.begins[place], self.residents[place]


def _residence(
    rows: Sequence[Instruction], offsets: Mapping[Buffer, int], limits: Mapping[str, int | None]
) -> Iterator[str]:
    slabs = {space: _Slab(space, limits[space]) for space in _SPACES}
    persistent = (buffer for buffer in offsets if buffer.persistent and buffer.space in slabs)
    for buffer in sorted(persistent, key=lambda buffer: offsets[buffer]):
        for problem in slabs[buffer.space].admit(buffer, offsets[buffer]):
            yield f"persistent {problem}"
    alive: dict[Buffer, int] = {}
    freed: dict[Buffer, int] = {}
    homeless: set[Buffer] = set()
    for index, row in enumerate(rows):
        if row.op in (Op.ALLOC, Op.FREE):
            subject = row.buffer
            if subject is None or subject.persistent or subject.space not in slabs:
                yield f"{_name(rows, index)} names no buffer that can be allocated: {subject}"
            elif row.op is Op.ALLOC:
                if subject in alive:
                    yield f"{_name(rows, index)} allocates {subject.name} again: row {alive[subject]} did, and nothing freed it"
                    continue
                alive[subject] = index
                if subject not in offsets:
                    yield f"{_name(rows, index)}: {subject.name} has no offset"
                    continue
                for problem in slabs[subject.space].admit(subject, offsets[subject]):
                    yield f"{_name(rows, index)}: {problem}"
            elif subject not in alive:
                cause = f"row {freed[subject]} already did" if subject in freed else "nothing allocated it"
                yield f"{_name(rows, index)} frees {subject.name}: {cause}"
            else:
                del alive[subject]
                freed[subject] = index
                if subject in offsets:
                    slabs[subject.space].dismiss(subject, offsets[subject])
            continue
        for value, _ in _values(row):
            buffer = value.buffer
            if not 0 <= value.offset <= value.offset + value.spec.nbytes <= buffer.nbytes:
                end = value.offset + value.spec.nbytes
                yield f"{_name(rows, index)}: {value.name} is bytes {value.offset}..{end} of {buffer}, which is too small"
            if buffer in alive or buffer.space not in slabs:
                continue
            if not buffer.persistent:
                when = f"after row {freed[buffer]} freed it" if buffer in freed else "before anything allocated it"
                yield f"{_name(rows, index)} touches {buffer.name} {when}"
            elif buffer not in offsets and buffer not in homeless:
                homeless.add(buffer)
                yield f"{_name(rows, index)}: {buffer.name} has no offset"
    for buffer, index in alive.items():
        yield f"{_name(rows, index)}: {buffer.name} leaks, nothing frees it"


# ---- meaning: what is read was written ---------------------------------------------------------------------------------

_UNDEFINED, _INITIAL = -1, -2  # contents that are no content


class _Contents:
    """What the bytes of one buffer mean: pieces, each from its begin to the next, with a content and the row that wrote it."""

    def __init__(self, buffer: Buffer) -> None:
        self.begins = [0]
        self.pieces = [(_INITIAL if buffer.persistent else _UNDEFINED, -1)]

    def _cut(self, at: int) -> int:
        place = bisect_right(self.begins, at) - 1
        if self.begins[place] == at:
            return place
        self.begins.insert(place + 1, at)
        self.pieces.insert(place + 1, self.pieces[place])
        return place + 1

    def write(self, begin: int, end: int, content: int, row: int) -> None:
        """Give the bytes a new meaning."""
        first, last = self._cut(begin), self._cut(end)
        self.begins[first:last] = [begin]
        self.pieces[first:last] = [(content, row)]

    def read(self, begin: int, end: int, content: int) -> tuple[int, int] | None:
        """Return the first piece of the range that means something else. What was there initially means what is asked first."""
        first, last = self._cut(begin), self._cut(end)
        for place in range(first, last):
            if self.pieces[place][0] == _INITIAL:
                self.pieces[place] = (content, -1)
            if self.pieces[place][0] != content:
                return self.pieces[place]
        return None


def _meaning(rows: Sequence[Instruction]) -> Iterator[str]:
    contents: dict[Buffer, _Contents] = {}
    for index, row in enumerate(rows):
        if row.op is Op.ALLOC and row.buffer is not None:
            contents[row.buffer] = _Contents(row.buffer)
        if row.op is Op.HOLD:
            continue
        for value in (*row.reads, *row.writes) if row.accumulates else row.reads:
            if value.buffer not in contents:
                contents[value.buffer] = _Contents(value.buffer)
            end = value.offset + value.spec.nbytes
            wrong = contents[value.buffer].read(value.offset, end, value.content) if end > value.offset else None
            if wrong is not None:
                found, writer = wrong
                cause = f"{_name(rows, writer)} put something else there" if writer >= 0 else "no earlier row wrote it"
                if found != _UNDEFINED and writer < 0:
                    cause = f"these bytes of {value.buffer.name} were read as something else before"
                yield f"{_name(rows, index)} reads {value.name}, but {cause}"
        for value, written in _values(row):
            end = value.offset + value.spec.nbytes
            if written and end > value.offset and not (row.accumulates and value is not row.workspace):
                if value.buffer not in contents:
                    contents[value.buffer] = _Contents(value.buffer)
                meaning = _UNDEFINED if value is row.workspace else value.content
                contents[value.buffer].write(value.offset, end, meaning, index)


# ---- order: what the written waits guarantee ---------------------------------------------------------------------------


def _wait_problems(rows: Sequence[Instruction], previous: Sequence[Instruction] | None) -> Iterator[str]:
    count = 0 if previous is None else len(previous)
    ahead = False
    for index, row in enumerate(rows):
        if row.stream not in STREAMS:
            yield f"{_name(rows, index)}: there is no such stream"
        for wait in row.waits:
            if wait.lag not in (0, 1) or not 0 <= wait.row < (count if wait.lag else len(rows)):
                whose = f"of the run {wait.lag} before" if wait.lag else "of this run"
                yield f"{_name(rows, index)} waits for row {wait.row} {whose}, which does not exist"
            elif not wait.lag and wait.row >= index:
                ahead = True
                yield f"{_name(rows, index)} waits for {_name(rows, wait.row)}, which is not before it"
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
        yield "deadlock: " + " and ".join(_name(rows, index) for index in stuck) + " can never start"


class _Guarantees:
    """What waits guarantee. Rows are numbered through both runs.

    For every pair of streams a staircase: from row ``i`` of the one on, row ``j`` of the other has ended. Only waits make
    steps, so this is as long as there are waits, not as long as there are rows.
    """

    def __init__(self, numbered: Sequence[tuple[Instruction, int, int]]) -> None:
        """``numbered``: rows, with the numbers of the first row of their run and of the run before."""
        self.streams = [row.stream for row, _, _ in numbered]
        self.stairs: dict[tuple[str, str], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for index, (row, base, base_before) in enumerate(numbered):
            for wait in row.waits:
                ended = wait.row + (base_before if wait.lag else base)
                if base_before <= ended < index and not (wait.lag and ended >= base) and wait.row >= 0:
                    self._add(row.stream, index, self.streams[ended], ended)
                    for other in STREAMS:
                        self._add(row.stream, index, other, self._ended(self.streams[ended], ended, other))

    def _add(self, stream: str, index: int, other: str, ended: int) -> None:
        at, level = self.stairs[stream, other]
        if ended > (level[-1] if level else -1):
            at.append(index)
            level.append(ended)

    def _ended(self, stream: str, index: int, other: str) -> int:
        """The latest row of ``other`` that has ended when row ``index`` of ``stream`` starts, or -1."""
        at, level = self.stairs[stream, other]
        step = bisect_right(at, index)
        return level[step - 1] if step else -1

    def ordered(self, first: int, second: int) -> bool:
        """Has row ``first`` ended when row ``second``, a later one, starts?"""
        if first < 0 or self.streams[first] == self.streams[second]:
            return True
        return self._ended(self.streams[second], second, self.streams[first]) >= first


class _Use(NamedTuple):
    """One row touches one range of a buffer's bytes."""

    begin: int
    end: int
    row: int
    writes: bool


def _order(
    rows: Sequence[Instruction], offsets: Mapping[Buffer, int], previous: Sequence[Instruction] | None
) -> Iterator[str]:
    before = list(previous) if previous is not None else []
    numbered = [(row, 0, 0) for row in before] + [(row, len(before), 0) for row in rows]
    guarantees = _Guarantees(numbered)
    streams = guarantees.streams
    uses, births = _uses([row for row, _, _ in numbered])
    found: dict[tuple[int, int], str] = {}
    ghosts = {space: _Ghosts() for space in _SPACES}
    for (buffer, life), of_buffer in uses.items():
        if len({streams[use.row] for use in of_buffer}) > 1:
            for _, _, of_bytes in _sweep(of_buffer):
                for first, second in _conflicts(of_bytes):
                    if second >= len(before) and not guarantees.ordered(first, second):
                        found[second, first] = buffer.name
        if not life or buffer.space not in ghosts or buffer not in offsets:
            continue
        for begin, end, of_bytes in _sweep(of_buffer):
            last = tuple({streams[use.row]: use.row for use in of_bytes}.values())
            at = offsets[buffer]
            for other, row_index in ghosts[buffer.space].bury(at + begin, at + end, buffer, last):
                born = births[buffer, life]
                if born >= len(before) and not guarantees.ordered(row_index, born):
                    found[born, row_index] = f"the bytes of {other.name} that are now of {buffer.name}"
    for (second, first), what in sorted(found.items()):
        earlier = (
            _name(rows, first - len(before)) if first >= len(before) else f"{_name(before, first)} of the previous run"
        )
        yield f"{_name(rows, second - len(before))} and {earlier} both touch {what}, and no wait orders them"


def _uses(
    rows: Sequence[Instruction],
) -> tuple[dict[tuple[Buffer, int], list[_Use]], dict[tuple[Buffer, int], int]]:
    """Return the uses of every life of every buffer, in order of first use, and the row of its ALLOC. Persistent is life 0."""
    uses: dict[tuple[Buffer, int], list[_Use]] = defaultdict(list)
    births: dict[tuple[Buffer, int], int] = {}
    lives: dict[Buffer, int] = defaultdict(int)
    for index, row in enumerate(rows):
        if row.op is Op.ALLOC and row.buffer is not None:
            lives[row.buffer] += 1
            births[row.buffer, lives[row.buffer]] = index
            uses[row.buffer, lives[row.buffer]].append(_Use(0, row.buffer.footprint, index, True))
        for value, writes in _values(row):
            buffer, nbytes = value.buffer, value.spec.nbytes
            if nbytes:
                end = value.offset + nbytes
                # the padding of a buffer is touched with its last byte, so that most buffers have one range only
                padded = buffer.footprint if end == buffer.nbytes else end
                uses[buffer, lives[buffer]].append(_Use(value.offset, padded, index, writes))
    return uses, births


def _sweep(uses: Sequence[_Use]) -> Iterator[tuple[int, int, Sequence[_Use]]]:
    """Yield ranges of a buffer, in order of address, within which no use begins or ends, with their uses in row order."""
    if len({(use.begin, use.end) for use in uses}) == 1:
        yield uses[0].begin, uses[0].end, uses
        return
    edges = sorted({edge for use in uses for edge in (use.begin, use.end)})
    starting = sorted(uses)
    active: list[_Use] = []
    position = 0
    for begin, end in pairwise(edges):
        active = [use for use in active if use.end > begin]
        while position < len(starting) and starting[position].begin == begin:
            active.append(starting[position])
            position += 1
        if active:
            active.sort(key=attrgetter("row", "writes"))
            yield begin, end, active


def _conflicts(uses: Sequence[_Use]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of rows that conflict on one byte, given its uses in row order; implied pairs are left out."""
    writer = -1
    readers: list[int] = []
    for use in uses:
        if writer >= 0 and writer != use.row:
            yield writer, use.row
        if use.writes:
            yield from ((reader, use.row) for reader in readers if reader != use.row)
            writer, readers = use.row, []
        else:
            readers.append(use.row)


class _Ghosts:
    """Who had each byte of a slab last: disjoint ranges in order of address, with the last rows that touched them."""

    def __init__(self) -> None:
        self.begins: list[int] = []
        self.ghosts: list[tuple[int, Buffer, tuple[int, ...]]] = []  # end, buffer, rows

    def bury(self, begin: int, end: int, buffer: Buffer, rows: tuple[int, ...]) -> Iterator[tuple[Buffer, int]]:
        """Give a range to a buffer. Yields each earlier owner of some of it with the rows that touched that one last."""
        first = bisect_right(self.begins, begin)
        if first and self.ghosts[first - 1][0] > begin:
            first -= 1
        last = bisect_left(self.begins, end, first)
        before = list(zip(self.begins[first:last], self.ghosts[first:last], strict=True))
        after = [(begin, (end, buffer, rows))]
        if before and before[0][0] < begin:
            after.insert(0, (before[0][0], (begin, *before[0][1][1:])))
        if before and before[-1][1][0] > end:
            after.append((end, before[-1][1]))
        self.begins[first:last] = [at for at, _ in after]
        self.ghosts[first:last] = [ghost for _, ghost in after]
        yield from ((owner, row) for _, (_, owner, owned) in before for row in owned)
