"""Verify: an independent reading of a finished list of rows. Shares no code with the passes that made it.

Three readers: residence (ALLOC and FREE in pairs, uses between them, no two residents on the same bytes, all inside the
slab), meaning (what is read was written, and not overwritten since), and order (``verify_order``: rows of different streams
that touch the same bytes are ordered by the waits that are written down, over this run and the previous).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence

from minidnn.schedule.instruction import DEVICE, HOST, Buffer, Instruction, Op, Value
from minidnn.schedule.verify_order import name_of, order_problems

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
    return [*_residence(rows, offsets, limits), *_meaning(rows), *order_problems(rows, offsets, previous)]


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
                yield f"{name_of(rows, index)} names no buffer that can be allocated: {subject}"
            elif row.op is Op.ALLOC:
                if subject in alive:
                    yield f"{name_of(rows, index)} allocates {subject.name} again: row {alive[subject]} did, and nothing freed it"
                    continue
                alive[subject] = index
                if subject not in offsets:
                    yield f"{name_of(rows, index)}: {subject.name} has no offset"
                    continue
                for problem in slabs[subject.space].admit(subject, offsets[subject]):
                    yield f"{name_of(rows, index)}: {problem}"
            elif subject not in alive:
                cause = f"row {freed[subject]} already did" if subject in freed else "nothing allocated it"
                yield f"{name_of(rows, index)} frees {subject.name}: {cause}"
            else:
                del alive[subject]
                freed[subject] = index
                if subject in offsets:
                    slabs[subject.space].dismiss(subject, offsets[subject])
            continue
        for value in (*row.writes, *row.reads, *(() if row.workspace is None else (row.workspace,))):
            buffer = value.buffer
            if not 0 <= value.offset <= value.offset + value.spec.nbytes <= buffer.nbytes:
                end = value.offset + value.spec.nbytes
                yield f"{name_of(rows, index)}: {value.name} is bytes {value.offset}..{end} of {buffer}, which is too small"
            if buffer in alive or buffer.space not in slabs:
                continue
            if not buffer.persistent:
                when = f"after row {freed[buffer]} freed it" if buffer in freed else "before anything allocated it"
                yield f"{name_of(rows, index)} touches {buffer.name} {when}"
            elif buffer not in offsets and buffer not in homeless:
                homeless.add(buffer)
                yield f"{name_of(rows, index)}: {buffer.name} has no offset"
    for buffer, index in alive.items():
        yield f"{name_of(rows, index)}: {buffer.name} leaks, nothing frees it"


# ---- meaning: what is read was written ---------------------------------------------------------------------------------

_UNDEFINED, _INITIAL = -1, -2  # contents that are no content


class _Contents:
    """What the bytes of one buffer mean: pieces, each from its begin to the next, with a content and the row that wrote it."""

    __slots__ = ("begins", "nbytes", "pieces")

    def __init__(self, buffer: Buffer) -> None:
        self.nbytes = buffer.nbytes
        self.begins = [0]
        self.pieces = [(_INITIAL if buffer.persistent else _UNDEFINED, -1)]

    def _cut(self, at: int) -> int:
        """Return the number of the piece that begins at a byte, after cutting there."""
        if at >= self.nbytes:
            return len(self.begins)
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


class _Meanings(dict[Buffer, _Contents]):
    """The contents of all buffers; of one never asked for, those that it has from the start."""

    def __missing__(self, buffer: Buffer) -> _Contents:
        made = self[buffer] = _Contents(buffer)
        return made


def _meaning(rows: Sequence[Instruction]) -> Iterator[str]:
    contents = _Meanings()
    for index, row in enumerate(rows):
        if row.buffer is not None:
            contents[row.buffer] = _Contents(row.buffer)
        if row.op is Op.HOLD:
            continue
        for value in (*row.reads, *row.writes) if row.accumulates else row.reads:
            if nbytes := value.spec.nbytes:
                wrong = contents[value.buffer].read(value.offset, value.offset + nbytes, value.content)
                if wrong is not None:
                    yield f"{name_of(rows, index)} reads {value.name}, but {_cause(rows, value, *wrong)}"
        for value in () if row.accumulates else row.writes:
            if nbytes := value.spec.nbytes:
                contents[value.buffer].write(value.offset, value.offset + nbytes, value.content, index)
        if row.workspace is not None and (nbytes := row.workspace.spec.nbytes):
            begin = row.workspace.offset
            contents[row.workspace.buffer].write(begin, begin + nbytes, _UNDEFINED, index)


def _cause(rows: Sequence[Instruction], value: Value, found: int, writer: int) -> str:
    if writer >= 0:
        return f"{name_of(rows, writer)} put something else there"
    if found == _UNDEFINED:
        return "no earlier row wrote it"
    return f"these bytes of {value.buffer.name} were read as something else before"
