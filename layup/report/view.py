"""View: one schedule as plain data, from which the pages of the report are drawn. Nothing here is rounded but times.

Lists that belong together are columns of equal length. Texts are numbers into one shared table; bytes are counted in blocks
of 512, of which every footprint and offset is a multiple; times are whole nanoseconds, 0 is the end of the step before.

``rows``: what runs, in list order: ``op target stream start seconds``; ``touches``: buffers each row writes, then reads.
``buffers``: one rectangle each: address, size, and the half-open range of *events* for which it is alive. A buffer may hold
several values, one after another in place (``holds``); it is named after the last, whose layer's decision is why it lives.
``spaces``: for the slab and the pinned slab, every ALLOC and FREE is an event: the row it comes before, and the allocator's
counter after it, read from the engine's own curve and never summed up from the rectangles. ``categories``: the same bytes
by what they are for, as ``event, blocks`` pairs where they change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minidnn.graph import Role
from minidnn.profiles import Profile
from minidnn.schedule.instruction import DEVICE, HOST, Buffer, Instruction, Op, Wait
from minidnn.schedule.program import Program, Schedule
from minidnn.schedule.simulate import live_curve, schedule_times, total_footprint
from minidnn.spec import BLOCK_BYTES

MEMORY_OPS = (Op.ALLOC, Op.FREE)
OPS = tuple(op.value for op in Op if op not in MEMORY_OPS)
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
ROLES = tuple(role.value for role in Role)
DECISIONS = ("", "keep", "offload", "recompute", "streamed")
_NAMED = (Role.ACTIVATION, Role.GRAD)
MOST_RECTANGLES = 12000
"""A view with more buffers merges the rest, those of the smallest area (bytes times rows), into one sum."""
MOST_TOUCHES = 12000
"""A view with more rows leaves out which row touches which buffer."""

Columns = dict[str, list[int]]


class Strings:
    """A table of texts; each is kept once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._index: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """The number of a text."""
        if text not in self._index:
            self._index[text] = len(self.texts)
            self.texts.append(text)
        return self._index[text]


@dataclass(slots=True)
class _Life:
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
class _Space:
    """The events of one space: the row each comes before, and the counter after it, in blocks."""

    at: list[int] = field(default_factory=list)
    counter: list[int] = field(default_factory=list)
    lives: list[_Life] = field(default_factory=list)


def view(
    program: Program,
    schedule: Schedule,
    gpu: Profile,
    precision: str,
    strings: Strings,
    decisions: Mapping[str, str],
) -> dict[str, Any]:
    """One steady step of a schedule as plain data. ``decisions``: by layer; layers that are not in it keep."""
    rows = schedule.rows
    position: list[int] = []  # of every row: how many rows run before it
    running: list[int] = []
    for index, row in enumerate(rows):
        position.append(len(running))
        if row.op not in MEMORY_OPS:
            running.append(index)
    persistent = program.persistent
    spaces = {
        DEVICE: _space(DEVICE, rows, position, schedule, persistent.buffers),
        HOST: _space(HOST, rows, position, schedule, persistent.host_buffers),
    }
    _contents(rows, [life for space in spaces.values() for life in space.lives])
    times = steady_times(rows, gpu, precision)
    lives, merged_area = _choose(spaces.values())
    number = {life.buffer: i for i, life in enumerate(lives)}
    profile = schedule.profile
    data: dict[str, Any] = {
        "peak_bytes": profile.peak_bytes,
        "reserved_bytes": program.reserved_bytes,
        "host_bytes": program.host_bytes,
        "host_peak_bytes": profile.host_peak_bytes,
        "step_ns": round(profile.step_seconds * 1e9),
        "peak_row": position[profile.peak_row] if rows else 0,
        "peak_text": profile.peak_text,
        "rows": {
            "op": [OPS.index(rows[i].op.value) for i in running],
            "target": [strings(rows[i].target) for i in running],
            "stream": [strings(rows[i].stream) for i in running],
            "start": [times[i][0] for i in running],
            "duration": [times[i][1] - times[i][0] for i in running],
        },
        "buffers": {
            "name": [strings(life.name) for life in lives],
            "layer": [strings(life.layer) for life in lives],
            "holds": [[strings(name) for name in life.values] if len(life.values) > 1 else [] for life in lives],
            "shape": [strings(life.shape) for life in lives],
            "role": [ROLES.index(life.buffer.role.value) for life in lives],
            "decision": [DECISIONS.index(_decision(life, decisions)) for life in lives],
            "host": [int(life.buffer.space == HOST) for life in lives],
            "persistent": [int(life.buffer.persistent) for life in lives],
            "blocks": [_blocks(life.buffer) for life in lives],
            "offset": [life.offset for life in lives],
            "born": [life.born for life in lives],
            "died": [life.died for life in lives],
        },
        "spaces": {
            "device": _space_data(spaces[DEVICE], number),
            "pinned": _space_data(spaces[HOST], number),
        },
        "merged": {"buffers": sum(len(s.lives) for s in spaces.values()) - len(lives), "byte_rows": merged_area},
    }
    if len(running) <= MOST_TOUCHES:
        data["waits"] = _waits(rows, position)
        data["touches"] = {
            "writes": [_numbers((v.buffer for v in rows[i].writes), number) for i in running],
            "reads": [_numbers(_read(rows[i]), number) for i in running],
        }
    return data


def _read(row: Instruction) -> list[Buffer]:
    scratch = [] if row.workspace is None else [row.workspace.buffer]
    return [*(v.buffer for v in row.reads), *scratch]


def _numbers(buffers: Iterable[Buffer], number: Mapping[Buffer, int]) -> list[int]:
    return [number[b] for b in dict.fromkeys(buffers) if b in number]


def _blocks(buffer: Buffer) -> int:
    return buffer.footprint // BLOCK_BYTES


def _space(
    space: str, rows: Sequence[Instruction], position: Sequence[int], schedule: Schedule, persistent: Sequence[Buffer]
) -> _Space:
    """Events of a space: first the persistent buffers, which the program allocates before its first step, then the rows'."""
    found = _Space()
    offsets = schedule.offsets
    alive: dict[Buffer, _Life] = {}

    def born(buffer: Buffer, at: int, counter: int) -> None:
        life = alive[buffer] = _Life(buffer, offsets[buffer] // BLOCK_BYTES, len(found.at))
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


def _space_data(space: _Space, number: Mapping[Buffer, int]) -> dict[str, Any]:
    """Events, categories, and the sum of what is not drawn one by one."""
    changes: dict[str, list[tuple[int, int]]] = {}
    merged: list[tuple[int, int]] = []
    for life in space.lives:
        blocks = _blocks(life.buffer)
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


def _choose(spaces: Iterable[_Space]) -> tuple[list[_Life], int]:
    """The buffers to draw one by one, in order of birth: all, or those of the largest area, bytes times rows.

    Also the area up to which none is drawn, 0 for all. Persistent buffers are always drawn.
    """
    areas = [(life, _area(life, space)) for space in spaces for life in space.lives]
    if len(areas) <= MOST_RECTANGLES:
        return [life for life, _ in areas], 0
    least = sorted((area for _, area in areas), reverse=True)[MOST_RECTANGLES]
    return [life for life, area in areas if life.buffer.persistent or area > least], least * BLOCK_BYTES


def _area(life: _Life, space: _Space) -> int:
    """Blocks times the rows for which a buffer is alive."""
    end = space.at[life.died] if life.died < len(space.at) else space.at[-1]
    return _blocks(life.buffer) * max(end - space.at[life.born], 1)


def _contents(rows: Sequence[Instruction], lives: Sequence[_Life]) -> None:
    """Shape of every buffer, as the first row that touches it sees it, and the names of the values written to it."""
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


def _decision(life: _Life, decisions: Mapping[str, str]) -> str:
    """Why a buffer is there: the decision about the value it holds last; streamed parameters and copies say it themselves."""
    own = life.buffer.decision
    if life.buffer.role is not Role.ACTIVATION or life.buffer.space == HOST or not own:
        return own
    return decisions.get(life.layer, "keep")


def steady_times(rows: Sequence[Instruction], gpu: Profile, precision: str) -> list[tuple[int, int]]:
    """Start and end of every row in nanoseconds, in a step that follows an equal one; 0 is the last end of that one.

    Copies can be in flight across the boundary, so the step is simulated after itself, as ``step_time`` does.
    """
    count = len(rows)
    if not count:
        return []
    second = [
        row._replace(waits=tuple(Wait(w.row + count * (1 - w.lag)) for w in row.waits if w.row < count))
        if row.waits
        else row
        for row in rows
    ]
    first = [row._replace(waits=tuple(w for w in row.waits if not w.lag)) if row.waits else row for row in rows]
    times = schedule_times([*first, *second], gpu, precision)
    origin = max(end for _, end in times[:count])
    return [(round((start - origin) * 1e9), round((end - origin) * 1e9)) for start, end in times[count:]]


def _waits(rows: Sequence[Instruction], position: Sequence[int]) -> list[int]:
    """Waits between streams as ``row, waited row, lag`` of rows that run.

    An ALLOC row's wait is the next row's in its stream: memory is not touched before. A wait for an ALLOC or FREE row is for
    the last row that ran before it in its stream; without one there is nothing to wait for.
    """
    last: dict[str, int] = {}
    before: list[int] = []  # of every row: itself if it runs, else the last that ran in its stream
    for index, row in enumerate(rows):
        if row.op not in MEMORY_OPS:
            last[row.stream] = position[index]
        before.append(last.get(row.stream, -1))
    flat: list[int] = []
    pending: dict[str, list[Wait]] = {}
    for index, row in enumerate(rows):
        waits = pending.setdefault(row.stream, [])
        waits += row.waits
        if row.op in MEMORY_OPS or not waits:
            continue
        for wait in dict.fromkeys(waits):
            target = before[wait.row]
            if target >= 0 and rows[wait.row].stream != row.stream:
                flat += [position[index], target, wait.lag]
        waits.clear()
    return flat
