"""A schedule's lifetimes as text: one line a buffer, from left to right the rows, so that a person sees who waits for whom.

Worked example, two lines of conv1 -> conv2 -> relu2 -> ... -> loss under ``keep``::

    row                    |>>>>FFFFFF<BbbBuBBbBubu|
    conv1       128.00 KiB |    AA------------A    |   written by conv1, read by conv2, read by conv2's weight gradient
    conv2>relu2 128.00 KiB |     AAA---------A     |   relu2 overwrites conv2's output; its own backward reads it

A letter says that a row of that column touches the buffer, and which role it has; ``-`` that it is alive and only waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minidnn.errors import UserError
from minidnn.graph import Role
from minidnn.schedule.instruction import DEVICE, Buffer, Instruction, Op
from minidnn.schedule.liveness import operands
from minidnn.schedule.simulate import live_curve, total_footprint
from minidnn.schedule.text import human_bytes

ROLE_LETTERS = {
    Role.INPUT: "X", Role.LABEL: "Y", Role.PARAMETER: "P", Role.STATE: "S", Role.ACTIVATION: "A", Role.AUX: "U",
    Role.GRAD: "G", Role.PARAM_GRAD: "D", Role.OPTIMIZER: "O", Role.WORKSPACE: "W",
}  # fmt: skip

OP_LETTERS = {
    Op.FORWARD: ("F", "forward"), Op.RECOMPUTE: ("R", "recompute"), Op.BACKWARD_DATA: ("B", "backward data"),
    Op.BACKWARD_WEIGHT: ("b", "backward weight"), Op.ADD: ("+", "add gradients"), Op.UPDATE: ("u", "update"),
    Op.OFFLOAD: ("v", "to host"), Op.STORE: ("v", "to host"), Op.PREFETCH: ("^", "from host"),
    Op.LOAD: ("^", "from host"), Op.INPUT: (">", "batch in"), Op.FETCH: ("<", "result out"),
}  # fmt: skip

_SILENT = (Op.ALLOC, Op.FREE, Op.HOLD)
_NAME_WIDTH = 28


class _Life(NamedTuple):
    """A buffer from its ALLOC to its FREE: the first and last running row, and the rows that touch it."""

    buffer: Buffer
    born: int
    dies: int
    touched: tuple[int, ...]
    label: str


def lifetime_map(
    rows: Sequence[Instruction],
    offsets: Mapping[Buffer, int] | None = None,
    *,
    columns: int = 64,
    order: str = "birth",
    space: str = DEVICE,
    limit: int | None = None,
) -> str:
    """Draw the lifetimes of a schedule with its ALLOC and FREE rows. Draws no time: a column is one row, or equally many.

    Args:
        offsets: of all buffers, persistent ones included, as in ``Schedule.offsets``; needed for ``order="address"``.
        columns: the most columns; with more rows than that, a column stands for several.
        order: "birth": what ends as the same value shares a line, so one that leaves and comes back shows its gap;
            "address": a line a buffer, by offset, so that who follows whom on the same bytes stands together.
        space: "device" or "host".
        limit: draw the largest so many lines, and say how many are left out.

    Raises:
        UserError: an unknown order, address order without offsets, or columns or limit below 1.
    """
    if order not in ("birth", "address"):
        raise UserError(f"order={order!r} is unknown; choose birth or address")
    if order == "address" and offsets is None:
        raise UserError("order='address' needs the offsets of the schedule; pass schedule.offsets")
    if columns < 1 or (limit is not None and limit < 1):
        raise UserError(f"columns={columns} and limit={limit} must be at least 1")
    running = [index for index, row in enumerate(rows) if row.op not in _SILENT]
    per_column = max(1, -(-len(running) // columns))
    width = -(-len(running) // per_column)
    lives = _lives(rows, space)
    lines: list[tuple[str, int, str]] = []
    for group in _groups(lives, order, offsets or {}):
        cells = [" "] * width
        for life in group:
            letter = ROLE_LETTERS[life.buffer.role]
            for column in range(life.born // per_column, life.dies // per_column + 1):
                cells[column] = "-" if cells[column] == " " else cells[column]
            for at in life.touched:
                cells[at // per_column] = letter
        name = group[0].label if order == "birth" else f"{(offsets or {})[group[0].buffer]:>10} {group[0].label}"
        lines.append((name, max(life.buffer.footprint for life in group), "".join(cells)))
    drawn = lines
    if limit is not None and len(lines) > limit:
        largest = sorted(range(len(lines)), key=lambda i: -lines[i][1])[:limit]
        drawn = [lines[i] for i in sorted(largest)]
    persistent = total_footprint([b for b in offsets or {} if b.persistent], space)
    table = [("row" if per_column == 1 else f"{per_column} rows a column", "", _ruler(rows, running, per_column))]
    table += [(name, human_bytes(nbytes), cells) for name, nbytes, cells in drawn]
    if len(drawn) < len(lines):
        table.append((f"... and {len(lines) - len(drawn)} smaller", "", " " * width))
    if persistent:
        table.append(("always there", human_bytes(persistent), "=" * width))
    curve = live_curve(rows, persistent, space=space)
    peak = max(curve, default=persistent)
    table.append(("live, tenths of peak", human_bytes(peak), _tenths(curve, running, per_column, peak)))
    size = min(max(len(name) for name, _, _ in table), _NAME_WIDTH + 11 * (order == "address"))
    text = [f"{_short(name, size):<{size}} {nbytes:>11} |{cells}|" for name, nbytes, cells in table]
    return "\n".join([*text, _legend(rows, lives)])


def _lives(rows: Sequence[Instruction], space: str) -> list[_Life]:
    """The lives of all buffers of a space, in order of birth; rows are counted without those that run nothing."""
    found: list[_Life] = []
    born: dict[Buffer, int] = {}
    touched: dict[Buffer, list[int]] = {}
    labels: dict[Buffer, dict[str, None]] = {}
    at = 0
    for row in rows:
        buffer = row.buffer
        if row.op is Op.ALLOC and buffer is not None and buffer.space == space:
            born[buffer], touched[buffer], labels[buffer] = at, [], {buffer.name: None}
        elif row.op is Op.FREE and buffer in born:
            assert buffer is not None
            label = ">".join(labels.pop(buffer))  # conv1>relu1: relu1 was written over conv1
            found.append(_Life(buffer, born.pop(buffer), max(at - 1, 0), tuple(touched.pop(buffer)), label))
        elif row.op not in _SILENT:
            for operand in operands(row):
                if operand in born:
                    touched[operand].append(at)
            for value in row.writes:
                if value.buffer in born and value.buffer.role in (Role.ACTIVATION, Role.GRAD):
                    labels[value.buffer][value.name] = None
            at += 1
    return sorted(found, key=lambda life: life.born)


def _groups(lives: Sequence[_Life], order: str, offsets: Mapping[Buffer, int]) -> list[list[_Life]]:
    """What shares a line: in order of birth, the buffers in which the last value has the same name."""
    if order == "address":
        return [[life] for life in sorted(lives, key=lambda life: (offsets[life.buffer], life.born))]
    named: dict[str, list[_Life]] = {}
    for life in lives:
        named.setdefault(life.label.rpartition(">")[2], []).append(life)
    return list(named.values())


def _letter(op: Op) -> str:
    return OP_LETTERS.get(op, ("*", ""))[0]


def _ruler(rows: Sequence[Instruction], running: Sequence[int], per_column: int) -> str:
    """For each column the letter of what most of its rows do."""
    letters = [_letter(rows[index].op) for index in running]
    parts = [letters[start : start + per_column] for start in range(0, len(letters), per_column)]
    return "".join(Counter(part).most_common(1)[0][0] for part in parts)


def _tenths(curve: Sequence[int], running: Sequence[int], per_column: int, peak: int) -> str:
    """For each column its largest live bytes, 0 to 9 tenths of the peak; ``*`` is the peak itself."""
    live = [curve[index] for index in running]
    tops = [max(live[start : start + per_column]) for start in range(0, len(live), per_column)]
    return "".join("*" if top == peak else str(10 * top // max(peak, 1)) for top in tops)


def _short(name: str, size: int) -> str:
    """A name in at most ``size`` characters: its middle goes."""
    return name if len(name) <= size else f"{name[: size // 2 - 1]}..{name[-(size - size // 2 - 1) :]}"


def _legend(rows: Sequence[Instruction], lives: Sequence[_Life]) -> str:
    """What the letters mean, those that occur."""
    ops = {row.op for row in rows if row.op not in _SILENT}
    meanings = dict.fromkeys(OP_LETTERS.get(op, ("*", "exchange")) for op in Op if op in ops)
    roles = {life.buffer.role for life in lives}
    marks = [f"{ROLE_LETTERS[role]} {role.value}" for role in ROLE_LETTERS if role in roles] + ["- alive, waiting"]
    if any(">" in life.label for life in lives):
        marks.append("a>b: b overwrites a")
    ruler = ", ".join(f"{letter} {meaning}" for letter, meaning in meanings)
    return f"rows: {ruler}\nbuffers: {', '.join(marks)}"
