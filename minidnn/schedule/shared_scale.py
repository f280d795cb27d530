"""Dynamic loss scaling in data parallelism: one verdict on the gradients of all ranks, and one scale.

Who sees the sums decides. ``all_reduce``: every rank sees all of them. ``master_slave`` and ``tree``: rank 0, which sends the
scaling down with the weights. A ring: each rank sees its shard, so each votes, and one bad vote is enough.

In ``ring_delayed`` two gradients are there at a time, and the scale can change between them. Each keeps the scaling with
which it was made (``SharedScale.made``), and the update has constants of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from minidnn.graph import Role
from minidnn.scalars import SCALAR_COUNT, Scaling
from minidnn.schedule.flats import Strip
from minidnn.schedule.instruction import Buffer, Instruction, Op, Value
from minidnn.schedule.ranks import Ranks
from minidnn.spec import TensorSpec

INTERVAL = 2000  # updates after which the scale doubles, as on one rank


class SharedScale:
    """Values of the loss scaling that several ranks share.

    Attributes:
        scaling: its state, as on one rank.
        votes: of a ring, one number a rank: 1 where its shard of the summed gradients is finite, else 0.
        made: of ``ring_delayed``, the state as it was when each of the two gradients was made.
        constants, scalars: of the update of ``ring_delayed``.
    """

    def __init__(self, ranks: Ranks, scaling: Value, constants: Value, contents: count[int]) -> None:
        strategy, dtype = ranks.strategy, scaling.spec.dtype
        self.scaling, self._source = scaling, constants

        def strip(name: str, size: int) -> Strip:
            return Strip(name, dtype, Role.OPTIMIZER, size, next(contents))

        self.votes = strip("votes", ranks.size) if strategy.sharded and ranks.size > 1 else None
        self.made = [strip(f"loss scaling of gradients {i}", scaling.spec.size) for i in range(2 * strategy.delayed)]
        own = Buffer("constants of the update", constants.buffer.nbytes, Role.OPTIMIZER, persistent=True)
        self.constants = constants._replace(name=own.name, buffer=own, content=next(contents))
        self.scalars = self.constants._replace(spec=TensorSpec((SCALAR_COUNT,), dtype))
        self.buffers = [s.buffer for s in (self.votes, *self.made) if s is not None]
        self.buffers += [own] if strategy.delayed else []

    @property
    def finite(self) -> Value:
        """The flag in the scaling that says whether all gradients are finite."""
        offset = self.scaling.offset + TensorSpec((int(Scaling.FINITE),), self.scaling.spec.dtype).nbytes
        return self.scaling._replace(offset=offset, spec=self.scaling.spec._replace(shape=(1,)))

    def check(self, gradients: Sequence[Value], stream: str) -> Instruction:
        """The row that clears the flag where a gradient is not finite."""
        reads = tuple(gradients)
        return Instruction(
            Op.UPDATE, "loss scale", "check_finite", (self.scaling,), reads, accumulates=True, stream=stream
        )

    def adapt(self, scalars: Value, stream: str) -> Instruction:
        """The row that tells the updates the flag, and adapts the scale."""
        writes, attrs = (self.scaling, scalars), {"interval": INTERVAL}
        return Instruction(Op.UPDATE, "loss scale", "adapt_scale", writes, attrs=attrs, accumulates=True, stream=stream)

    def vote(self, ballot: Value, stream: str) -> Instruction:
        """The row that writes this rank's vote."""
        return Instruction(Op.UPDATE, "loss scale", "convert", (ballot,), (self.finite,), stream=stream)

    def count(self, ballot: Value, stream: str) -> Instruction:
        """The row that clears the flag where another rank's vote is 0: the derivative of ReLU is 1 where its sign is positive."""
        flag = self.finite
        return Instruction(Op.ADD, "loss scale", "relu_backward", (flag,), (flag, ballot), stream=stream)

    def keep(self, rows: Sequence[Instruction], makes: int | None, applies: int | None) -> list[Instruction]:
        """The rows of ``ring_delayed`` with those that note the scaling of the gradient that it ``makes``, and prepare the
        constants for the update by the one that it ``applies``."""
        added = []
        if applies is not None:
            added.append(Instruction(Op.INPUT, self.constants.name, "", (self.constants,), (self._source,)))
            reads = (self.made[applies].whole,)
            scale = Instruction(Op.INPUT, self.constants.name, "scale_loss", (self.scalars,), reads, accumulates=True)
            added.append(scale)
        if makes is not None:
            whole = self.made[makes].whole
            added.append(Instruction(Op.INPUT, whole.name, "", (whole,), (self.scaling,)))
        at = 1 + next(i for i, row in enumerate(rows) if row.target == "constants")
        return [*rows[:at], *added, *rows[at:]]
