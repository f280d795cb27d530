"""Flat lines of parameters for data parallelism: weights, gradients and optimizer state cut alike, at any element.

A ring passes equal shards round, whatever layer they belong to. So all parameters of one dtype stand in one line of
elements, each layer at a multiple of 64, and the line ends at a multiple of 64 times the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from minidnn.graph import Node, Role
from minidnn.schedule.instruction import Buffer, Instruction, Value
from minidnn.schedule.ranks import Ranks
from minidnn.spec import TensorSpec, round_up

ALIGNMENT = 64  # elements: 128 bytes in 16 bits, whole memory transactions in every type


class Strip:
    """One buffer along a line, or a part of it. The whole is one content, so that any cut of it can be read."""

    def __init__(self, name: str, dtype: str, role: Role, elements: int, content: int) -> None:
        spec = TensorSpec((elements,), dtype)
        self.buffer = Buffer(name, spec.nbytes, role, persistent=True)
        self.whole = Value(name, self.buffer, 0, spec, content)

    def part(self, begin: int, end: int, label: str = "") -> Value:
        """Elements ``begin`` to ``end``."""
        spec = TensorSpec((end - begin,), self.whole.spec.dtype)
        offset = TensorSpec((begin,), spec.dtype).nbytes
        return self.whole._replace(name=f"{self.whole.name}{label}", offset=offset, spec=spec)


class Line:
    """All that is kept for the trainable parameters of one dtype.

    Attributes:
        places: begin and number of the elements of every layer.
        weights, gradients: what forward and backward of this rank work on; ``other_weights``, ``other_gradients``: their
            twins while transfers are under way (``ring_delayed``).
        slots: the optimizer's tensors, and the master copy of 16-bit weights, of the elements that this rank owns.
        incoming: what a neighbour sent, before it is added.
        sums: the content of gradients to which another rank's were added. It is not that of this rank's, which batch norm still
            reads after it has made them.
    """

    def __init__(
        self,
        dtype: str,
        nodes: Sequence[tuple[Node, int]],
        slots: Mapping[str, str],
        ranks: Ranks,
        contents: count[int],
    ) -> None:
        self.dtype, self.places, self.sums = dtype, {}, next(contents)
        end = 0
        for node, elements in nodes:
            self.places[node.name] = (end, elements)
            end += round_up(elements, ALIGNMENT)
        self.size = round_up(end, ALIGNMENT * ranks.size)
        strategy, size = ranks.strategy, self.size
        self.owned = ranks.owned(size)
        mine = self.owned[1] - self.owned[0]

        def strip(name: str, role: Role, elements: int = size, kind: str = dtype) -> Strip:
            return Strip(f"{name}.{dtype}", kind, role, elements, next(contents))

        self.weights = strip("parameters", Role.PARAMETER)
        self.gradients = strip("gradients", Role.PARAM_GRAD)
        twin = strategy.delayed
        self.other_weights = strip("other parameters", Role.PARAMETER) if twin else None
        self.other_gradients = strip("other gradients", Role.PARAM_GRAD) if twin else None
        self.slots = {slot: strip(slot, Role.OPTIMIZER, mine, kind) for slot, kind in slots.items() if mine}
        self.slot_dtypes = dict(slots)
        receives = size if strategy.rooted else largest_part(size, ranks.size)
        if ranks.size == 1 or strategy.implementation == "nccl" or (strategy.rooted and not sources(ranks)):
            receives = 0
        self.incoming = strip("incoming", Role.WORKSPACE, receives) if receives else None

    @property
    def buffers(self) -> list[Buffer]:
        """Every buffer of the line."""
        strips = [
            self.weights, self.other_weights, self.gradients, self.other_gradients, *self.slots.values(), self.incoming
        ]  # fmt: skip
        return [strip.buffer for strip in strips if strip is not None]

    def buckets(self, nbytes: int) -> list[tuple[int, int]]:
        """Ranges of at least so many bytes of gradients, from the end, where backward begins; they cover all of the line."""
        found, end = [], self.size
        for begin, _ in reversed(self.places.values()):
            if begin == 0 or self.gradients.part(begin, end).spec.nbytes >= nbytes:
                found.append((begin, end))
                end = begin
        return found

    def block(self, strip: Strip, layer: str) -> Value:
        """A layer's part of a strip as long as the line."""
        begin, elements = self.places[layer]
        return strip.part(begin, begin + elements, f".{layer}")


def moved(rows: Sequence[Instruction], to: dict[Buffer, Value]) -> list[Instruction]:
    """The rows on the twins of their strips."""

    def twin(v: Value) -> Value:
        other = to[v.buffer]
        return v._replace(buffer=other.buffer, content=other.content, name=f"other {v.name}")

    def all_of(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple([twin(v) if v.buffer in to else v for v in values])

    if not to:
        return list(rows)
    return [row._replace(writes=all_of(row.writes), reads=all_of(row.reads)) for row in rows]


def cuts(begin: int, end: int, parts: int) -> list[tuple[int, int]]:
    """Cut a range of a line into parts, at multiples of the alignment; parts can be empty, and differ by one alignment."""
    units = (end - begin) // ALIGNMENT
    edges = [begin + ALIGNMENT * (units * k // parts) for k in range(parts)]
    return list(zip(edges, [*edges[1:], end], strict=True))


def largest_part(elements: int, parts: int) -> int:
    """Elements of the largest part into which ``cuts`` cuts a range of at most so many elements."""
    return max(end - begin for begin, end in cuts(0, elements, parts))


def sources(ranks: Ranks) -> list[int]:
    """From whom this rank receives gradients in ``master_slave`` and ``tree``, in the order in which it adds them."""
    if ranks.strategy.name == "master_slave":
        return list(range(1, ranks.size)) if ranks.rank == 0 else []
    found, distance = [], 1
    while distance < ranks.size and ranks.rank % (2 * distance) == 0:
        if ranks.rank + distance < ranks.size:
            found.append(ranks.rank + distance)
        distance *= 2
    return found


def target(ranks: Ranks) -> int | None:
    """To whom this rank sends its sum in ``master_slave`` and ``tree``; None: it is the root."""
    if ranks.rank == 0:
        return None
    return 0 if ranks.strategy.name == "master_slave" else ranks.rank & (ranks.rank - 1)
