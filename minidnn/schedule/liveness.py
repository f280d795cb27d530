"""Liveness: an ALLOC row before the first use of a buffer and a FREE row after the last, derived, never written by hand.

Before                                       After
    0 FORWARD       conv1  writes y               0 ALLOC          y
    1 BACKWARD_DATA conv1  reads y, writes dx     1 FORWARD        conv1
    2 UPDATE        conv1  reads dx               2 ALLOC          dx
                                                  3 BACKWARD_DATA  conv1
                                                  4 FREE           y
                                                  5 UPDATE         conv1
                                                  6 FREE           dx
"""

from __future__ import annotations

from collections.abc import Sequence

from minidnn.schedule.instruction import RESULT, Buffer, Instruction, Op


def lifetimes(rows: Sequence[Instruction]) -> dict[Buffer, tuple[int, int]]:
    """Return the first and last row that touch each buffer, in order of first touch. O(rows).

    ALLOC and FREE rows touch theirs. Persistent buffers are included: what is returned is use, not residence.
    """
    found: dict[Buffer, tuple[int, int]] = {}
    for index, row in enumerate(rows):
        for buffer in operands(row):
            found[buffer] = (found[buffer][0] if buffer in found else index, index)
    return found


def insert_lifetimes(rows: Sequence[Instruction]) -> list[Instruction]:
    """Return the rows with ALLOC and FREE rows between them. Places nothing and orders nothing across streams.

    Every buffer that is neither persistent nor a result gets its ALLOC immediately before the first row that touches it
    and its FREE immediately after the last, both on that row's stream; several at one row go in operand order. O(rows).
    """
    assert not any(row.op in (Op.ALLOC, Op.FREE) or row.waits for row in rows), (
        "lifetimes are inserted once, before waits"
    )
    spans = {
        buffer: span for buffer, span in lifetimes(rows).items() if not buffer.persistent and buffer.space != RESULT
    }
    timed: list[Instruction] = []
    for index, row in enumerate(rows):
        mortal = [buffer for buffer in operands(row) if buffer in spans]
        timed += [_row(Op.ALLOC, buffer, row.stream) for buffer in mortal if spans[buffer][0] == index]
        timed.append(row)
        timed += [_row(Op.FREE, buffer, row.stream) for buffer in mortal if spans[buffer][1] == index]
    return timed


def operands(row: Instruction) -> list[Buffer]:
    """Return the buffers a row touches, each once, in operand order: writes, reads, workspace, then its ``buffer``."""
    touched = [value.buffer for value in row.writes]
    touched += [value.buffer for value in row.reads]
    if row.workspace is not None:
        touched.append(row.workspace.buffer)
    if row.buffer is not None:
        touched.append(row.buffer)
    return touched if len(touched) < 2 else list(dict.fromkeys(touched))


def _row(op: Op, buffer: Buffer, stream: str) -> Instruction:
    return Instruction(op, buffer.name, stream=stream, buffer=buffer)
