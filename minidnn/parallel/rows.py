"""Binds the exchange rows of a schedule to a communicator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from minidnn.device.base import Array, Work
from minidnn.parallel.communicator import Communicator
from minidnn.schedule.instruction import Instruction, Op

EXCHANGES = frozenset((Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.SEND, Op.RECV))


def exchange_work(communicator: Communicator | None, row: Instruction, operands: Sequence[Array]) -> Work:
    """What a row does. ``operands``: the arrays of its writes, then of its reads."""
    assert communicator is not None, f"{row.op.value} {row.target} needs a communicator"
    method = getattr(communicator, row.kernel)
    if row.kernel == "settle":
        return partial(method)
    if row.op is Op.REDUCE_SCATTER:  # the whole is read; the sum of the own part is written into it
        return partial(method, operands[1])
    peer: Any = row.attrs.get("peer")
    return partial(method, operands[0]) if peer is None else partial(method, operands[0], peer)
