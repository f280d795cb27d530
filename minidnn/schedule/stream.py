"""Parameter streaming, a pass: parameters that live in pinned host memory visit the device for the rows that use them.

Lowering does not know of it: rows simply read and write values whose buffer is in host memory. This pass gives every stretch
of such rows (a *visit* of a parameter group) a device buffer, with a LOAD row before it and, if the visit changed anything, a
STORE row after it. Before, ``w`` in host memory              After
    0 FORWARD  a   reads w                                        LOAD     w@1 <- w
    1 FORWARD  b   reads v                                        LOAD     v@1 <- v            one visit ahead: double buffering
    2 UPDATE   a   writes w                                       FORWARD  a    reads w@1
                                                                  LOAD     w@2 <- w
                                                                  FORWARD  b    reads v@1
                                                                  UPDATE   a    writes w@2
                                                                  STORE    w <- w@2            after the next visit, if any
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minidnn.schedule.blocks import Group
from minidnn.schedule.instruction import D2H, H2D, Buffer, Instruction, Op, Value
from minidnn.schedule.persistent import Persistent
from minidnn.spec import TensorSpec


@dataclass(slots=True)
class _Visit:
    """Consecutive rows that use one group, nobody else's rows but the next group's between them."""

    group: Group
    number: int
    first: int
    last: int
    rows: set[int] = field(default_factory=set)
    state: bool = False  # whether it touches optimizer state, not weights alone
    writes: bool = False


def stream_parameters(rows: list[Instruction], persistent: Persistent) -> list[Instruction]:
    """Return the rows with LOAD and STORE rows for streamed parameter groups; the same list if there are none. O(rows)."""
    if not persistent.groups:
        return rows
    groups = {group.buffer: group for group in persistent.groups}
    visits = _visits(rows, groups)
    before: dict[int, list[Instruction]] = {}
    after: dict[int, list[Instruction]] = {}
    here: dict[tuple[Buffer, int], tuple[Buffer, int]] = {}  # (group, row) -> (device buffer, content)
    stored_at: dict[Buffer, int] = {}
    later = {(visit.group.buffer, visit.number): position for position, visit in enumerate(visits)}
    for position, visit in enumerate(visits):
        group = visit.group
        nbytes = group.buffer.nbytes if visit.state else group.weight_bytes
        spec = TensorSpec((nbytes,), "uint8")
        name = f"{group.buffer.name}@{visit.number}"
        buffer = Buffer(name, nbytes, group.buffer.role, layer=group.buffer.layer, decision="streamed")
        device = Value(name, buffer, 0, spec, next(persistent.contents))
        host = Value(group.buffer.name, group.buffer, 0, spec, group.content)
        for used in visit.rows:
            here[group.buffer, used] = (buffer, device.content)
        ahead = visits[position - 1].first if position else visit.first
        start = max(ahead, stored_at.get(group.buffer, -1) + 1)
        load = Instruction(Op.LOAD, group.buffer.name, "", (device,), (host,), stream=H2D)
        before.setdefault(start, []).append(load)
        if visit.writes:
            store = Instruction(Op.STORE, group.buffer.name, "", (host,), (device,), stream=D2H)
            at = stored_at[group.buffer] = _store_row(visits, position, later.get((group.buffer, visit.number + 1)))
            after.setdefault(at, []).append(store)
    streamed: list[Instruction] = []
    for index, row in enumerate(rows):
        streamed += before.get(index, [])
        if any(v.buffer in groups for v in (*row.writes, *row.reads)):
            writes = tuple(_visiting(v, here.get((v.buffer, index))) for v in row.writes)
            reads = tuple(_visiting(v, here.get((v.buffer, index))) for v in row.reads)
            row = row._replace(writes=writes, reads=reads)
        streamed.append(row)
        streamed += after.get(index, [])
    return streamed


def _store_row(visits: list[_Visit], position: int, again: int | None) -> int:
    """Row after which a visit's STORE is listed: the end of the next visit to end, so that no row in between takes bytes that
    are still being copied; earlier if the group's next visit, at position ``again``, loads it before."""
    last = visits[position].last
    following = visits[position + 1 : position + 4]
    at = next((visit.last for visit in following if visit.last > last), last)
    if again is not None:
        at = min(at, visits[again - 1].first - 1)
    return max(at, last)


def _visiting(value: Value, visit: tuple[Buffer, int] | None) -> Value:
    return value if visit is None else value._replace(buffer=visit[0], content=visit[1])


def _visits(rows: list[Instruction], groups: dict[Buffer, Group]) -> list[_Visit]:
    """Cut the uses of every group into visits, in the order of their first rows.

    A visit goes on across rows of one other group (two groups share the device then); a second one ends it.
    """
    visits: list[_Visit] = []
    numbers = dict.fromkeys(groups, 0)
    open_visits: dict[Buffer, _Visit] = {}
    for index, row in enumerate(rows):
        for value, written in (*((v, True) for v in row.writes), *((v, False) for v in row.reads)):
            group = groups.get(value.buffer)
            if group is None:
                continue
            visit = open_visits.pop(value.buffer, None)
            if visit is None:
                numbers[value.buffer] += 1
                visit = _Visit(group, numbers[value.buffer], index, index)
                visits.append(visit)
            open_visits[value.buffer] = visit  # last in the order: the one used now
            visit.last = index
            visit.rows.add(index)
            visit.state |= value.offset >= group.weight_bytes
            visit.writes |= written
            while len(open_visits) > 2:
                del open_visits[next(iter(open_visits))]
    return visits
