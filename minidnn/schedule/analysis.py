"""What lowering must know of a graph before it emits the first row: rows of every layer, aliases, last readers, stored values."""

from __future__ import annotations

from typing import Any, NamedTuple

from minidnn.graph import Graph, Node, Tensor
from minidnn.precision import Precision
from minidnn.schedule.plan import Decision, Plan, PlanError
from minidnn.spec import TensorSpec


class NodeRows(NamedTuple):
    """The kernel calls of one layer, by phase, and the keys of the values that its backward reads."""

    forward: tuple[Any, ...]
    once: tuple[Any, ...]
    recompute: tuple[Any, ...]
    backward_weight: tuple[Any, ...]
    backward_data: tuple[tuple[int, tuple[Any, ...]], ...]  # (input index, calls), inputs that need a gradient only
    aux: tuple[Any, ...]
    backward_reads: tuple[str, ...]


class Shapes(NamedTuple):
    """What a layer is told: specs of its inputs and output, and its index. Same fields as ``layers.base.Shapes``."""

    inputs: tuple[TensorSpec, ...]
    output: TensorSpec
    node: int


def aux_key(node: Node, key: str) -> str:
    """Key of something a layer's forward leaves for its backward."""
    return f"{node.name}:{key}"


def input_index(operand: str) -> int | None:
    """0 for ``x`` and ``x0``, 1 for ``x1``; None for other operands."""
    if operand[0] == "x" and (len(operand) == 1 or operand[1:].isdigit()):
        return int(operand[1:] or 0)
    return None


class Analysis:
    """Facts of one graph under one precision. A value's *key* is the name of the tensor that owns its bytes, or ``layer:aux``.

    Attributes:
        rows: kernel calls of every layer, by node index.
        root: for every tensor, the tensor whose bytes it shows: itself, unless it is an alias (flatten).
        last_reader: index of the last node that reads a root or one of its aliases in forward.
        read_by_backward: keys that some backward row reads.
        kept: keys of aux that is never offloaded or dropped.
    """

    def __init__(self, graph: Graph, precision: Precision) -> None:
        self.graph = graph
        self.precision = precision
        self.rows: list[NodeRows] = []
        self.root: dict[Tensor, Tensor] = {}
        self.last_reader: dict[Tensor, int] = {}
        self.readers: dict[Tensor, int] = {}
        self.read_by_backward: set[str] = set()
        self.kept: set[str] = set()
        self.specs: dict[Tensor, TensorSpec] = {t: precision.resolve(t.spec) for t in (*graph.inputs, *graph.labels)}
        for tensor in (*graph.inputs, *graph.labels):
            self.root[tensor] = tensor
        for node in graph.nodes:
            self._add(node)

    def _forward(self, node: Node, shapes: Shapes) -> tuple[Any, ...]:
        rows: tuple[Any, ...] = node.layer.forward(shapes)
        return rows

    def _add(self, node: Node) -> None:
        layer = node.layer
        shapes = self.shapes(node)
        forward = self._forward(node, shapes)
        self.specs[node.output] = self.precision.resolve(node.output.spec)
        self.root[node.output] = node.output if forward else self.root[node.inputs[0]]
        for tensor in node.inputs:
            self.last_reader[self.root[tensor]] = node.index
            self.readers[self.root[tensor]] = self.readers.get(self.root[tensor], 0) + 1
        weight: tuple[Any, ...] = ()
        data: tuple[tuple[int, tuple[Any, ...]], ...] = ()
        if node.output.requires_grad:
            if any(p.trainable for p in node.parameters):
                weight = layer.backward_weight(shapes)
            data = tuple((i, layer.backward_data(shapes, i)) for i, t in enumerate(node.inputs) if t.requires_grad)
        aux = layer.aux(shapes)
        names = {a.key for a in aux}
        reads = dict.fromkeys(
            key
            for calls in (weight, *(calls for _, calls in data))
            for call in calls
            for operand in call.reads
            if (key := self._key(node, operand, names)) is not None
        )
        self.read_by_backward.update(reads)
        self.kept.update(aux_key(node, a.key) for a in aux if a.kept)
        self.rows.append(
            NodeRows(forward, layer.once(shapes), layer.recompute(shapes), weight, data, aux, tuple(reads))
        )

    @staticmethod
    def shapes(node: Node) -> Shapes:
        """What the node's layer is told of its tensors."""
        return Shapes(tuple(t.spec for t in node.inputs), node.output.spec, node.index)

    def _key(self, node: Node, operand: str, aux: set[str]) -> str | None:
        index = input_index(operand)
        if index is not None:
            return self.root[node.inputs[index]].name
        if operand == "y":
            return self.root[node.output].name
        return aux_key(node, operand) if operand in aux else None

    def outputs(self, node: Node) -> list[str]:
        """Keys of what the node makes: its output, unless an alias, and the aux that is not kept."""
        made = [aux_key(node, a.key) for a in self.rows[node.index].aux if not a.kept]
        return [node.output.name, *made] if self.root[node.output] is node.output else made

    def units(self) -> dict[str, str]:
        """Map every layer to the last layer of its in-place chain: one unit, of which that last layer's decision governs.

        A layer extends the chain of its input when it may overwrite it, is its only reader, and no backward reads it.
        """
        last: dict[str, str] = {}
        for node in reversed(self.graph.nodes):
            last.setdefault(node.name, node.name)
            for call in self.rows[node.index].forward:
                for operand in call.over:
                    tensor = self.root[node.inputs[input_index(operand) or 0]]
                    if (
                        self.readers[tensor] == 1
                        and tensor.name not in self.read_by_backward
                        and tensor.producer is not None
                    ):
                        last[tensor.producer.name] = last[node.name]
        return last

    def decisions(self, plan: Plan) -> dict[str, Decision]:
        """The decision for every layer, spread over in-place units. Raises PlanError for unknown and for overridden layers."""
        plan.check_names(node.name for node in self.graph.nodes)
        if not plan.decisions:
            return {}
        last = self.units()
        for name, decision in plan.decisions.items():
            if last[name] != name and decision is not plan.decision(last[name]):
                raise PlanError(
                    f"the plan decides {decision.value!r} for {name!r}, but {last[name]!r} overwrites that layer in place; "
                    f"decide about {last[name]!r} instead"
                )
        return {name: plan.decision(end) for name, end in last.items() if plan.decision(end) is not Decision.KEEP}

    def stored(self, decisions: dict[str, Decision]) -> set[str]:
        """Keys that must be had again in backward: what backward reads, closed over the inputs of RECOMPUTE layers."""
        stored = set(self.read_by_backward)
        for node in reversed(self.graph.nodes):
            if decisions.get(node.name) is Decision.RECOMPUTE and any(key in stored for key in self.outputs(node)):
                stored.update(self.root[t].name for t in node.inputs)
        return stored


class InferenceAnalysis(Analysis):
    """The same for the evaluation pass: the rows are ``inference``'s, and dropout is an alias."""

    def _forward(self, node: Node, shapes: Shapes) -> tuple[Any, ...]:
        rows: tuple[Any, ...] = node.layer.inference(shapes)
        return rows
