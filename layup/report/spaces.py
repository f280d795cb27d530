"""The spaces of a schedule, the slab and the pinned slab, as events of their allocators, and the life of every buffer there.

Bytes are counted in blocks of 512. A life is a half-open range of events; the counter after an event is the engine's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minidnn.graph import Role
from minidnn.schedule.instruction import Buffer, Instruction, Op
from minidnn.schedule.program import Schedule
from minidnn.schedule.simulate import live_curve, total_footprint
from minidnn.spec import BLOCK_BYTES

MEMORY_OPS = (Op.ALLOC, Op.FREE)
CATEGORIES = {
    Role.PARAMETER: "weight",
    Role.STATE: "weight",
    Role.ACTIVATION: "activation",
    Role.AUX: "activation",
    Role.GRAD: "gradient",
    Role.PARAM_GRAD: "weight gradient",
    Role.OPTIMIZER: "optimizer",
    Role.WORKSPACE: "workspace",
    Role.INPUT: "input",
    Role.LABEL: "input",
}
NAMES = tuple(dict.fromkeys(CATEGORIES.values()))
MOST_RECTANGLES = 12000
"""A view with more buffers merges the rest, those of the smallest area (bytes times rows), into one sum."""
_NAMED = (Role.ACTIVATION, Role.GRAD)


@dataclass(slots=True)
class Life:
    """A buffer's address in blocks, and the events between which it is alive in its space."""

    buffer: Buffer
    offset: int
    born: int
    died: int = -1
    shape: str = ""
    values: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the last value it holds; of what lives as long as the program, the buffer's own."""
        return self.values[-1] if self.values else self.buffer.name

    @property
    def layer(self) -> str:
        """The layer that makes this value."""
        role = self.buffer.role
        return self.name.partition(":")[0] if role is Role.ACTIVATION and self.values else self.buffer.layer


@dataclass(slots=True)
class Space:
    """The events of one space: the row each comes before, and the counter after it, in blocks."""

    at: list[int] = field(default_factory=list)
    counter: list[int] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)


def blocks_of(buffer: Buffer) -> int:
    """Its footprint, in blocks."""
    return buffer.footprint // BLOCK_BYTES


def space_of(
    space: str, rows: Sequence[Instruction], position: Sequence[int], schedule: Schedule, persistent: Sequence[Buffer]
) -> Space:
    """Events of a space: first the persistent buffers, which the program allocates before its first step, then the rows'.

    ``position``: of every row, how many rows run before it; ALLOC and FREE rows do not run. Addresses and counters are in blocks.
    """
    found = Space()
    offsets = schedule.offsets
    alive: dict[Buffer, Life] = {}

    def born(buffer: Buffer, at: int, counter: int) -> None:
        life = alive[buffer] = Life(buffer, offsets[buffer] // BLOCK_BYTES, len(found.at))
        found.lives.append(life)
        found.at.append(at)
        found.counter.append(counter // BLOCK_BYTES)

    for fixed in persistent:  # they lie side by side, so the counter is where the last one ends
        born(fixed, 0, offsets[fixed] + fixed.footprint)
    base = total_footprint(persistent, space)
    for index, (row, counter) in enumerate(zip(rows, live_curve(rows, base, space=space), strict=True)):
        buffer = row.buffer
        if buffer is None or buffer.space != space:
            continue
        if row.op is Op.ALLOC:
            born(buffer, position[index], counter)
        elif row.op is Op.FREE:
            alive.pop(buffer).died = len(found.at)
            found.at.append(position[index])
            found.counter.append(counter // BLOCK_BYTES)
    for life in alive.values():
        life.died = len(found.at)
    return found


def space_data(space: Space, number: Mapping[Buffer, int]) -> dict[str, Any]:
    """Events, categories, and the sum of what is not drawn one by one, in blocks. ``number``: of the buffers that are drawn."""
    changes: dict[str, list[tuple[int, int]]] = {}
    merged: list[tuple[int, int]] = []
    for life in space.lives:
        blocks = blocks_of(life.buffer)
        both = ((life.born, blocks), (life.died, -blocks))
        changes.setdefault(CATEGORIES[life.buffer.role], []).extend(both)
        if life.buffer not in number:
            merged.extend(both)
    count = len(space.at)
    return {
        "at": space.at,
        "counter": space.counter,
        "categories": {name: _steps(changes[name], count) for name in NAMES if name in changes},
        "merged": _steps(merged, count),
    }


def _steps(changes: Iterable[tuple[int, int]], count: int) -> list[int]:
    """A sum over time as ``event, blocks, event, blocks, ...``, where it changes; before the first it is 0."""
    total: dict[int, int] = {}
    for event, blocks in changes:
        total[event] = total.get(event, 0) + blocks
    flat, blocks = [], 0
    for event in sorted(total):
        blocks += total[event]
        if event < count and total[event]:
            flat += [event, blocks]
    return flat


def choose(spaces: Iterable[Space]) -> tuple[list[Life], int]:
    """The buffers to draw one by one, in order of birth in each space: all, or those of the largest area, bytes times rows.

    Also the area up to which none is drawn, in bytes times rows, 0 if all are. Persistent buffers are always drawn.
    """
    areas = [(life, _area(life, space)) for space in spaces for life in space.lives]
    if len(areas) <= MOST_RECTANGLES:
        return [life for life, _ in areas], 0
    least = sorted((area for _, area in areas), reverse=True)[MOST_RECTANGLES]
    return [life for life, area in areas if life.buffer.persistent or area > least], least * BLOCK_BYTES


def _area(life: Life, space: Space) -> int:
    """Blocks times the rows for which a buffer is alive."""
    end = space.at[life.died] if life.died < len(space.at) else space.at[-1]
    return blocks_of(life.buffer) * max(end - space.at[life.born], 1)


def contents(rows: Sequence[Instruction], lives: Sequence[Life]) -> None:
    """Fill in the shape of every buffer, as the first row that touches it sees it, and the names of the values written to it.

    Persistent buffers are left as they are.
    """
    found = {life.buffer: life for life in lives if not life.buffer.persistent}
    for row in rows:
        if row.op in MEMORY_OPS:
            continue
        scratch = () if row.workspace is None else (row.workspace,)
        for value in (*row.writes, *row.reads, *scratch):
            if (life := found.get(value.buffer)) is not None and not life.shape:
                life.shape = str(value.spec)
        for value in row.writes:
            life = found.get(value.buffer)
            if life is not None and value.buffer.role in _NAMED and value.name not in life.values:
                life.values.append(value.name)
