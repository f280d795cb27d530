"""Ring: how gradients and weights travel round a ring of ranks, frame by frame, with numbers that a reader can add up.

The frames are not drawn from a description of the algorithm: a small linear layer is compiled for every rank, and the rows
of its schedule on ``comm`` are carried out here, on a number for each chunk. One frame is one ring step of all ranks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from numpy.random import Philox

import minidnn
from minidnn.optim import SGD
from minidnn.parallel.cost import Links, estimate
from minidnn.parallel.inprocess import InProcess
from minidnn.parallel.step import ParallelStep
from minidnn.schedule.flats import ALIGNMENT
from minidnn.schedule.instruction import COMM, Instruction, Op, Value
from minidnn.schedule.ranks import Ranks
from minidnn.spec import ITEM_BYTES, TensorSpec
from minidnn.step import CompiledStep

RATE = 0.1
MOST_RANKS = 8
"""More than these are not drawn."""
_USUAL = 4


@dataclass(slots=True)
class _Rank:
    """What one rank holds: by buffer a number for each chunk, and from which ranks it is summed up or how new it is."""

    rows: list[Instruction]
    numbers: dict[str, list[float]] = field(default_factory=dict)
    marks: dict[str, list[int]] = field(default_factory=dict)


def ring_data(step: CompiledStep) -> dict[str, Any]:
    """What the page shows: frames of ``ring_delayed`` and ``ring``, and the sizes of this net's own ring."""
    own = step.ranks if isinstance(step, ParallelStep) else None
    ranks = min(max(own.size, 2), MOST_RANKS) if own is not None else _USUAL
    gradients = [[_tenths(_some(r, k, 1)) for k in range(ranks)] for r in range(ranks)]
    made = [[_tenths(_some(r, k, 2)) for k in range(ranks)] for r in range(ranks)]
    weights = [_tenths(_some(ranks, k, 3), 20) for k in range(ranks)]
    return {
        "ranks": ranks,
        "rate": RATE,
        "strategy": own.strategy.name if own is not None else None,
        "gradients": gradients,
        "made": made,
        "weights": weights,
        "frames": {name: frames(name, gradients, weights) for name in ("ring_delayed", "ring")},
        "net": _net(step, own, ranks),
    }


def _some(rank: int, chunk: int, which: int) -> int:
    """Some number. Any will do, as long as a reader can tell them apart."""
    return int(Philox(key=(rank << 16) + (chunk << 8) + which).random_raw() >> 32)


def _tenths(number: int, most: int = 9) -> float:
    """One to ``most`` tenths, or minus as many."""
    value = number % (2 * most) - most
    return (value + (value >= 0)) / 10


def _net(step: CompiledStep, own: Ranks | None, ranks: int) -> dict[str, Any]:
    """Sizes and predicted times of the whole net's ring."""
    count = own.size if own is not None else ranks
    nbytes = sum(
        step.precision.resolve(TensorSpec(p.shape, p.dtype)).nbytes
        for n in step.graph.nodes
        for p in n.parameters
        if p.trainable
    )
    links = Links.of(step.gpu)
    hop = links.seconds(nbytes / count, 0, 1)
    found: dict[str, Any] = {
        "ranks": count, "parameter_bytes": nbytes, "sent_bytes": round(2 * (count - 1) / count * nbytes),
        "hop_ns": round(hop * 1e9), "ring_ns": round(2 * (count - 1) * hop * 1e9),
        "step_ns": round(step.profile.step_seconds * 1e9), "exposed_ns": None,
    }  # fmt: skip
    if own is not None and own.rank == 0:
        found["exposed_ns"] = round(estimate(step, links).exposed_seconds * 1e9)
    return found


def frames(strategy: str, gradients: list[list[float]], weights: list[float]) -> list[dict[str, Any]]:
    """Carry out a strategy's rows on all ranks.

    A frame has, by rank and chunk: ``sums`` and ``from``, the gradients and a bit for each rank in them; ``weights`` and
    ``new``, the weights that are made and whether they are. ``sends``: by rank the chunk it has just sent, of ``moves``
    ("gradients" or "weights"); ``phase`` is start, reduce, update, gather or done.
    """
    ranks = len(gradients)
    graph = minidnn.Graph()
    x, y = graph.input((ranks, ALIGNMENT)), graph.label((ranks,))
    graph.softmax_cross_entropy(graph.linear(x, ranks, bias=False, name="fc"), y)
    team = []
    for rank, communicator in enumerate(InProcess.group(ranks)):
        step = minidnn.compile(
            graph,
            strategy=f"{strategy}:steps",
            communicator=communicator,
            device=None,
            optimizer=SGD(lr=RATE, momentum=0.0),
        )
        line = step.program.persistent.lines[0]
        at = _Rank([row for row in step.program["train"].rows if row.stream == COMM])
        at.numbers[line.gradients.buffer.name] = list(gradients[rank])
        at.marks[line.gradients.buffer.name] = [1 << rank] * ranks
        for strip in (line.weights, line.other_weights):
            if strip is not None:
                at.numbers[strip.buffer.name], at.marks[strip.buffer.name] = list(weights), [0] * ranks
        team.append(at)
    target = (line.other_weights or line.weights).buffer.name
    return _carry_out(team, line.gradients.buffer.name, target, line.size // ranks)


def _carry_out(team: list[_Rank], gradients: str, target: str, shard: int) -> list[dict[str, Any]]:
    ranks, found = len(team), []
    on_the_way: dict[tuple[int, int], deque[tuple[float, int]]] = {}
    sends: list[int | None] = [None] * ranks
    moves, updated = "", False

    def chunk(value: Value) -> int:
        return value.offset // ITEM_BYTES[value.spec.dtype] // shard

    def take(phase: str) -> None:
        nonlocal moves
        found.append({
            "phase": phase, "moves": moves, "sends": list(sends),
            "sums": [[round(n, 6) for n in rank.numbers[gradients]] for rank in team],
            "from": [list(rank.marks[gradients]) for rank in team],
            "weights": [[round(n, 6) for n in rank.numbers[target]] for rank in team],
            "new": [list(rank.marks[target]) for rank in team],
        })  # fmt: skip
        sends[:], moves = [None] * ranks, ""

    take("start")
    steps = list(zip(*(rank.rows for rank in team), strict=True))
    for index, rows in enumerate(steps):
        for number, (rank, row) in enumerate(zip(team, rows, strict=True)):
            if row.op is Op.SEND:
                value = row.reads[0]
                name, k = value.buffer.name, chunk(value)
                sends[number], moves = k, "gradients" if name == gradients else "weights"
                queue = on_the_way.setdefault((number, row.attrs["peer"]), deque())
                queue.append((rank.numbers[name][k], rank.marks[name][k]))
            elif row.op is Op.RECV:
                value, name = row.writes[0], row.writes[0].buffer.name
                if name not in rank.numbers:  # what came in, before it is added
                    rank.numbers[name], rank.marks[name] = [0.0] * ranks, [0] * ranks
                k = chunk(value)
                rank.numbers[name][k], rank.marks[name][k] = on_the_way[row.attrs["peer"], number].popleft()
            elif row.op is Op.ADD:
                total, incoming = row.writes[0], row.reads[1]
                rank.numbers[gradients][chunk(total)] += rank.numbers[incoming.buffer.name][chunk(incoming)]
                rank.marks[gradients][chunk(total)] |= rank.marks[incoming.buffer.name][chunk(incoming)]
            elif row.kernel != "convert":
                k = chunk(row.writes[0])
                rank.numbers[target][k] -= RATE * rank.numbers[gradients][k]
                rank.marks[target][k] = 1
        op, following = rows[0].op, steps[index + 1][0].op if index + 1 < len(steps) else None
        if op is Op.UPDATE and following is not Op.UPDATE:
            take("update")
            updated = True
        elif op is not Op.UPDATE and following in (Op.SEND, Op.UPDATE, None):
            take("gather" if updated else "reduce")
    take("done")
    return found
