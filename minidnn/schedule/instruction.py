"""One row of a schedule, and what its operands are: buffers and values.

A schedule is a list of rows. The same list is printed, verified, simulated and executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from minidnn.graph import Role
from minidnn.spec import TensorSpec, round_up


class Op(StrEnum):
    """What a row is for. Which kernel it launches is ``Instruction.kernel``."""

    FORWARD = "FORWARD"
    RECOMPUTE = "RECOMPUTE"
    BACKWARD_DATA = "BACKWARD_DATA"
    BACKWARD_WEIGHT = "BACKWARD_WEIGHT"
    ADD = "ADD"
    UPDATE = "UPDATE"
    OFFLOAD = "OFFLOAD"  # activation to pinned host memory
    PREFETCH = "PREFETCH"  # activation back
    LOAD = "LOAD"  # parameters in
    STORE = "STORE"  # parameters out
    INPUT = "INPUT"  # batch in
    FETCH = "FETCH"  # loss, logits, gradients out
    HOLD = "HOLD"  # end of the step: reads what a switched-off reuse keeps alive, and runs nothing
    ALLOC = "ALLOC"
    FREE = "FREE"
    ALL_REDUCE = "ALL_REDUCE"
    REDUCE_SCATTER = "REDUCE_SCATTER"
    ALL_GATHER = "ALL_GATHER"
    SEND = "SEND"
    RECV = "RECV"


COMPUTE, D2H, H2D, COMM = "compute", "d2h", "h2d", "comm"
STREAMS = (COMPUTE, D2H, H2D, COMM)

DEVICE, HOST, RESULT = "device", "host", "result"
"""Spaces of a buffer: the slab, the pinned slab, and ordinary host arrays handed to the caller (in no budget)."""


class Buffer:
    """A byte range with one lifetime: what liveness, placement, waits and verification work on.

    Compared by identity. ``persistent`` buffers live as long as the program, the others from an ALLOC to a FREE row.
    """

    __slots__ = ("decision", "layer", "name", "nbytes", "persistent", "role", "space")

    def __init__(
        self,
        name: str,
        nbytes: int,
        role: Role,
        *,
        layer: str = "",
        space: str = DEVICE,
        persistent: bool = False,
        decision: str = "",
    ) -> None:
        self.name = name
        self.nbytes = nbytes
        self.role = role
        self.layer = layer  # name of the node it belongs to, for reports
        self.space = space
        self.persistent = persistent
        self.decision = decision  # why it is here: "keep", "recompute", ...

    @property
    def footprint(self) -> int:
        """Bytes taken in its slab: ``nbytes`` rounded up to 512, at least one block."""
        return max(round_up(self.nbytes), round_up(1))

    @property
    def whole(self) -> Value:
        """All its bytes, whatever they mean: to be copied or compared, never an operand of a row."""
        return Value(self.name, self, 0, TensorSpec((self.nbytes,), "uint8"), -1)

    def __repr__(self) -> str:
        return f"Buffer({self.name}, {self.nbytes} B, {self.role.value})"


class Value(NamedTuple):
    """A tensor inside a buffer. Never holds an array.

    ``content`` identifies what the bytes mean: an alias (flatten, the gradient through add) shares the content of its
    source; an in-place result lives in the same buffer under a new content, so a later read of the old one is an error.
    """

    name: str
    buffer: Buffer
    offset: int
    spec: TensorSpec
    content: int

    def alias(self, name: str, spec: TensorSpec) -> Value:
        """Return the same content under another name and shape."""
        assert spec.nbytes == self.spec.nbytes
        return self._replace(name=name, spec=spec)


class Wait(NamedTuple):
    """Before the row starts, row ``row`` must have ended: of this run, or (``lag`` 1) of the previous run in the cycle."""

    row: int
    lag: int = 0


class Instruction(NamedTuple):
    """One row. Frozen; passes make new rows.

    ``kernel`` is called as ``kernel(*writes, *reads, **attrs)``, with ``scratch=`` the workspace if there is one.
    An empty kernel is a copy (``writes[0] <- reads[0]``) on OFFLOAD, PREFETCH, LOAD, STORE, INPUT and FETCH rows, and
    nothing at all on ALLOC, FREE and HOLD. ``accumulates``: the writes are read, too (``+=``, updates of state).
    """

    op: Op
    target: str
    kernel: str = ""
    writes: tuple[Value, ...] = ()
    reads: tuple[Value, ...] = ()
    workspace: Value | None = None
    attrs: Mapping[str, Any] = {}
    accumulates: bool = False
    stream: str = COMPUTE
    waits: tuple[Wait, ...] = ()
    flops: float = 0.0
    buffer: Buffer | None = None  # of ALLOC and FREE rows

    @property
    def moved_bytes(self) -> int:
        """Bytes read plus bytes written: what a memory-bound kernel moves."""
        moved = sum(v.spec.nbytes for v in self.reads) + sum(v.spec.nbytes for v in self.writes)
        return moved * 2 if self.accumulates and not self.reads else moved
