"""Schedules as text: the list a person reads, and bytes in human units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minidnn.schedule.instruction import Buffer, Instruction, Op, Value


def human_bytes(nbytes: int) -> str:
    """Bytes in binary units with three or four significant digits: ``"11.72 MiB"``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def dump(rows: Sequence[Instruction], offsets: Mapping[Buffer, int] | None = None) -> str:
    """One line a row. ``name@offset`` says where in the slab a value lies; ``+=`` marks rows that read what they write."""
    lines = []
    width = len(str(max(len(rows) - 1, 0)))
    for index, row in enumerate(rows):
        waits = "".join(f" after {w.row}{' of the previous run' if w.lag else ''}" for w in row.waits)
        if row.op in (Op.ALLOC, Op.FREE):
            assert row.buffer is not None
            text = f"{row.buffer.name} {row.buffer.footprint} B {row.buffer.role.value}" + _place(
                row.buffer, 0, offsets
            )
        else:
            writes = " ".join(_value(v, offsets) for v in row.writes)
            reads = " ".join(_value(v, offsets) for v in row.reads)
            arrow = " += " if row.accumulates else " <- "
            scratch = f" scratch {_value(row.workspace, offsets)}" if row.workspace else ""
            text = f"{row.target:<24} {row.kernel or 'copy' if row.op is not Op.HOLD else '':<32} {writes}{arrow}{reads}{scratch}"
        lines.append(f"{index:>{width}} {row.op.value:<15} {text} [{row.stream}]{waits}")
    return "\n".join(lines)


def _value(value: Value, offsets: Mapping[Buffer, int] | None) -> str:
    return value.name + _place(value.buffer, value.offset, offsets)


def _place(buffer: Buffer, offset: int, offsets: Mapping[Buffer, int] | None) -> str:
    if offsets is None or buffer not in offsets:
        return ""
    where = "" if buffer.space == "device" else f"{buffer.space}:"
    return f"@{where}{offsets[buffer] + offset}"
