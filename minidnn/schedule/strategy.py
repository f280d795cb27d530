"""Strategies, a pass: rows that turn each rank's gradients into the same new weights on all ranks.

Lowering leaves the gradients of this rank's samples in flat strips. This pass adds the exchange on stream ``comm``, and the
update. With three ranks, rank 0 and ``ring``, where w and g are cut into three shards::

    SEND    g[2] to 1    RECV  from 2    ADD  g[1]        reduce-scatter: after 2 ring steps g[0] is the sum over all ranks
    SEND    g[1] to 1    RECV  from 2    ADD  g[0]
    UPDATE  w[0] by g[0]                                  only rank 0 has the momentum of this shard
    SEND    w[0] to 1    RECV  w[2] from 2                all-gather: 2 more ring steps
    SEND    w[2] to 1    RECV  w[1] from 2

``ring_delayed`` does this with the gradients of the step *before*, from the weights in use into their twin, while forward
and backward run: W(t+1) = W(t) - lr * mean g(W(t-1)). Its schedules (A, B the two weights, 0, 1 the two gradients)::

    first        compute A -> 0                           train        compute A -> 1, exchange 0: A -> B
    flush        exchange 0: A -> A                       train_other  compute B -> 0, exchange 1: B -> A
    warmup       compute A -> 0, then exchange 0: A -> A  flush_other  exchange 1: B -> A
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from minidnn.schedule.flats import Line, Strip, cuts, moved, sources, target
from minidnn.schedule.instruction import COMM, COMPUTE, Buffer, Instruction, Op, Value
from minidnn.schedule.persistent import Persistent


class Phase(StrEnum):
    """Which of the two weights and gradients are used for what, see the module. Strategies without delay know TRAIN, and FIRST
    where nothing is updated."""

    FIRST = "first"
    TRAIN = "train"
    OTHER = "train_other"
    WARMUP = "warmup"
    FLUSH = "flush"
    FLUSH_OTHER = "flush_other"


_MAKES = {Phase.FIRST: 0, Phase.TRAIN: 1, Phase.OTHER: 0}
_APPLIES = {Phase.TRAIN: 0, Phase.OTHER: 1, Phase.FLUSH: 0, Phase.FLUSH_OTHER: 1}
"""Which of the two gradients of ``ring_delayed`` a phase makes, and which it exchanges and applies."""


def exchange(rows: Sequence[Instruction], persistent: Persistent, phase: Phase) -> list[Instruction]:
    """Return the rows of a training step with exchange and update. O(rows + ranks * dtypes)."""
    ranks, shared = persistent.ranks, persistent.shared
    assert ranks is not None
    delayed = ranks.strategy.delayed and phase is not Phase.WARMUP
    if shared is not None and delayed:
        rows = shared.keep(rows, _MAKES.get(phase), _APPLIES.get(phase))
    if phase is Phase.FIRST:
        return list(rows)
    builder = _Builder(persistent, shared.scalars if shared is not None and delayed else persistent.scalars)
    if ranks.strategy.name == "all_reduce":
        return builder.all_reduce(rows)
    if ranks.strategy.rooted:
        builder.rooted()
        return [*rows, *builder.rows]
    moves = []
    for line in persistent.lines:
        second, other = line.other_gradients or line.gradients, line.other_weights or line.weights
        if not delayed or phase is Phase.FLUSH:
            moves.append((line, line.gradients, line.weights, line.weights))
        elif phase is Phase.TRAIN:
            moves.append((line, line.gradients, line.weights, other))
        else:
            moves.append((line, second, other, line.weights))
    builder.ring(moves)
    if not delayed:
        return [*rows, *builder.rows]
    twins = {
        Phase.TRAIN: [(line.gradients, line.other_gradients) for line in persistent.lines],
        Phase.OTHER: [(line.weights, line.other_weights) for line in persistent.lines],
    }.get(phase, [])
    rows = moved(rows, {a.buffer: b.whole for a, b in twins if b is not None})
    at = 1 + max(i for i, row in enumerate(rows) if row.op is Op.INPUT)  # the update reads this step's scalars
    return [*rows[:at], *builder.rows, *rows[at:]]


class _Builder:
    """Rows of exchange and update under construction."""

    def __init__(self, persistent: Persistent, scalars: Value) -> None:
        assert persistent.ranks is not None
        self.scalars = scalars  # of the update
        self.persistent, self.ranks = persistent, persistent.ranks
        self.rank, self.size = self.ranks.rank, self.ranks.size
        self.collective = self.ranks.strategy.implementation == "nccl"
        self.rows: list[Instruction] = []

    # -- rows -------------------------------------------------------------------------------------------------------
    def append(self, op: Op, value: Value, kernel: str, writes: Any, reads: Any, peer: int | None = None) -> None:
        """A row on the ``comm`` stream, named after what it moves."""
        attrs: dict[str, Any] = {} if op is Op.ADD else {"ranks": self.size}
        attrs |= {} if peer is None else {"peer": peer}
        self.rows.append(Instruction(op, value.name, kernel, tuple(writes), tuple(reads), attrs=attrs, stream=COMM))

    def ring_step(self, outgoing: Value, incoming: Value) -> None:
        """Send to the next rank, receive from the one before. RECV reads what is sent: until then it must not change."""
        kept = (outgoing,) if outgoing.spec.size else ()
        if kept:
            self.append(Op.SEND, outgoing, "post", (), kept, (self.rank + 1) % self.size)
        if incoming.spec.size:
            self.append(Op.RECV, incoming, "recv", (incoming,), kept, (self.rank - 1) % self.size)
        elif kept:  # nothing comes in, but the step ends all the same
            self.append(Op.RECV, outgoing, "settle", (), kept)

    def add(self, line: Line, total: Value, incoming: Value) -> Value:
        """Add what came in. Returns the sum."""
        if total.spec.size:
            self.append(Op.ADD, total, "add_forward", (self.summed(line, total),), (total, incoming))
        return self.summed(line, total)

    def reduce_scatter(self, line: Line, strip: Strip, begin: int, end: int) -> list[Value]:
        """Ring steps after which part ``rank`` of a range is the sum over all ranks. Returns the parts as they shall be."""
        parts = [strip.part(b, e, f"[{k}]") for k, (b, e) in enumerate(cuts(begin, end, self.size))]
        for step in range(self.size - 1):
            assert line.incoming is not None
            place = (self.rank - step - 2) % self.size
            incoming = line.incoming.part(0, parts[place].spec.size)
            self.ring_step(parts[(self.rank - step - 1) % self.size], incoming)
            parts[place] = self.add(line, parts[place], incoming)
        return [self.summed(line, part) for part in parts]

    def summed(self, line: Line, gradients: Value) -> Value:
        """Gradients after their exchange: the sums of all ranks, where there are others."""
        return gradients._replace(content=line.sums) if self.size > 1 else gradients

    def gather(self, whole: Value, own: Value, parts: Sequence[Value]) -> None:
        """Carry every rank's part to all ranks. ``own``: what the collective row reads."""
        if self.collective and self.size > 1:
            self.append(Op.ALL_GATHER, whole, "all_gather", (whole,), (own,))
        else:
            self.all_gather(parts)

    def all_gather(self, parts: Sequence[Value]) -> None:
        """Ring steps that carry every rank's part to all ranks."""
        for step in range(self.size - 1):
            self.ring_step(parts[(self.rank - step) % self.size], parts[(self.rank - step - 1) % self.size])

    def update(self, line: Line, gradients: Strip, source: Strip, target: Strip, stream: str) -> None:
        """Update the elements that this rank owns: from one weight strip into another, or in place."""
        p, (begin, end) = self.persistent, line.owned
        if begin == end:
            return
        optimizer, slots = p.optimizer, dict(line.slots)
        weight, narrow = target.part(begin, end, ".own"), slots.pop("master", None)
        if narrow is None and source is not target:
            old = source.part(begin, end, ".own")
            self.rows.append(Instruction(Op.UPDATE, weight.name, "convert", (weight,), (old,), stream=stream))
        master = weight if narrow is None else narrow.whole
        writes = (master, *(slots[slot].whole for slot in optimizer.slots))
        reads = (self.summed(line, gradients.part(begin, end, ".own")), self.scalars)
        row = Instruction(Op.UPDATE, weight.name, optimizer.kernel, writes, reads, attrs=optimizer.attrs, stream=stream)
        self.rows.append(row._replace(accumulates=True))
        if narrow is not None:
            self.rows.append(Instruction(Op.UPDATE, weight.name, "convert", (weight,), (master,), stream=stream))

    # -- strategies -------------------------------------------------------------------------------------------------
    def verdict(self, gradients: Sequence[Value], stream: str) -> None:
        """With a scaled loss: whether the gradients of all ranks are finite, which the updates read, and the next scale."""
        if (shared := self.persistent.shared) is None:
            return
        self.rows.append(shared.check(gradients, stream))
        if shared.votes is not None:
            ballots = [shared.votes.part(k, k + 1, f"[{k}]") for k in range(self.size)]
            own = ballots.pop(self.rank)
            self.rows.append(shared.vote(own, stream))
            self.gather(shared.votes.whole, own, [*ballots[: self.rank], own, *ballots[self.rank :]])
            self.rows += [shared.count(ballot, stream) for ballot in ballots]
        self.rows.append(shared.adapt(self.scalars, stream))

    def ring(self, moves: Sequence[tuple[Line, Strip, Strip, Strip]]) -> None:
        """Reduce-scatter of the gradients, update of the own shards, all-gather of the weights.

        ``moves``: lines with their gradients, and the weights from which and to which they are updated.
        """
        for line, gradients, _, _ in moves:
            if self.collective and self.size > 1:
                own = gradients.part(*line.owned, ".own")
                summed = self.summed(line, own)
                self.append(Op.REDUCE_SCATTER, gradients.whole, "reduce_scatter", (summed,), (gradients.whole,))
            else:
                self.reduce_scatter(line, gradients, 0, line.size)
        self.verdict([self.summed(line, gradients.part(*line.owned, ".own")) for line, gradients, _, _ in moves], COMM)
        for line, gradients, old, new in moves:
            self.update(line, gradients, old, new, COMM)
            parts = [new.part(b, e, f"[{k}]") for k, (b, e) in enumerate(cuts(0, line.size, self.size))]
            self.gather(new.whole, new.part(*line.owned, ".own"), parts)

    def rooted(self) -> None:
        """Gradients go up to rank 0, which alone updates; the weights come down again the same way."""
        parent, children = target(self.ranks), sources(self.ranks)
        lines, shared = self.persistent.lines, self.persistent.shared
        for line in lines:
            gradients = line.gradients.whole
            for child in children:
                assert line.incoming is not None
                self.append(Op.RECV, line.incoming.whole, "recv", (line.incoming.whole,), (), child)
                gradients = self.add(line, gradients, line.incoming.whole)
            if parent is not None:
                self.append(Op.SEND, gradients, "send", (), (gradients,), parent)
        if parent is None:
            self.verdict([self.summed(line, line.gradients.whole) for line in lines], COMM)
            for line in lines:
                self.update(line, line.gradients, line.weights, line.weights, COMM)
        for value in [line.weights.whole for line in lines] + ([] if shared is None else [shared.scaling]):
            if parent is not None:
                self.append(Op.RECV, value, "recv", (value,), (), parent)
            for child in reversed(children):
                self.append(Op.SEND, value, "send", (), (value,), child)

    def all_reduce(self, rows: Sequence[Instruction]) -> list[Instruction]:
        """Sum the gradients bucket by bucket, each as soon as backward has made the last of it; then update everything.

        Batch norm's data gradient reads the sums that are the gradients of its parameters: those of this rank alone.
        """
        used: dict[tuple[Buffer, int], int] = {}  # (strip, begin of a layer in bytes) -> last row with it
        for index, row in enumerate(rows):
            for value in (*row.writes, *row.reads):
                if value.buffer.persistent:
                    used[value.buffer, value.offset] = index
        after: dict[int, list[Instruction]] = {}
        for line in self.persistent.lines:
            for begin, end in line.buckets(self.ranks.strategy.bucket_bytes):
                strip = line.gradients
                low, high = (strip.part(0, at).spec.nbytes for at in (begin, end))
                last = max(at for (b, offset), at in used.items() if b is strip.buffer and low <= offset < high)
                self.rows = []
                whole = strip.part(begin, end, f"[{begin}:{end}]")
                if self.size == 1:
                    continue
                if self.collective:
                    self.append(Op.ALL_REDUCE, whole, "all_reduce", (self.summed(line, whole),), (whole,))
                else:
                    self.all_gather(self.reduce_scatter(line, strip, begin, end))
                after.setdefault(last, []).extend(self.rows)
        self.rows = []
        self.verdict([self.summed(line, line.gradients.whole) for line in self.persistent.lines], COMPUTE)
        for line in self.persistent.lines:
            self.update(line, line.gradients, line.weights, line.weights, COMPUTE)
        merged: list[Instruction] = []
        for index, row in enumerate(rows):
            merged.append(row)
            merged += after.get(index, ())
        return merged + self.rows
