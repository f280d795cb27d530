"""Fusion: a graph in which some chains of layers are one layer each, so that a step passes less often over memory.

Which fusions are made is part of the recipe (``Recipe.fusions``), since a fused layer rounds less often: other bits. Each is
a rewrite of the graph before lowering, so the schedule, the plan and the planner know nothing of it. Evaluation runs the
graph as the user wrote it.

A chain is fused only if nobody else reads what lies inside it: ``batch_norm_relu`` (BatchNorm, ReLU),
``batch_norm_add_relu`` (BatchNorm, Add, ReLU) and ``conv_bias_relu`` (Conv2d with bias, ReLU).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from minidnn.errors import UserError, nearest
from minidnn.graph import Node, Tensor
from minidnn.layers import Add, BatchNorm, Conv2d, Dropout, Graph, ReLU
from minidnn.layers.fused import BatchNormAddReLU, BatchNormReLU, Conv2dReLU
from minidnn.schedule.plan import Plan, PlanError

FUSIONS = ("batch_norm_relu", "batch_norm_add_relu", "conv_bias_relu")


@dataclass(frozen=True, slots=True)
class Fused:
    """The graph to train, and for every layer that went into another one, which. ``members`` names the others, too."""

    graph: Graph
    members: Mapping[str, str]

    def plan(self, plan: Plan) -> Plan:
        """A plan for the graph before, said of this one. Raises PlanError where two members of a layer disagree."""
        names = self.members
        if not names:
            return plan
        decisions: dict[str, Any] = {}
        for name, decision in plan.decisions.items():
            if decisions.setdefault(names.get(name, name), decision) is not decision:
                raise PlanError(
                    f"the plan decides {decision.value!r} for {name!r}, which is one layer with {names[name]!r} here; decide "
                    "the same for both, or leave one out"
                )
        tables = [{names.get(k, k): v for k, v in table.items()} for table in (plan.lags, plan.distances)]
        streamed = tuple(dict.fromkeys(names.get(name, name) for name in plan.streamed))
        return replace(plan, decisions=decisions, lags=tables[0], distances=tables[1], streamed=streamed)


def check_fusions(fusions: Sequence[str]) -> tuple[str, ...]:
    """The fusions, in a fixed order. Raises UserError for an unknown one."""
    for name in fusions:
        if name not in FUSIONS:
            raise UserError(f"unknown fusion {name!r}; {nearest(name, FUSIONS)}")
    return tuple(name for name in FUSIONS if name in fusions)


def fuse(graph: Graph, fusions: Sequence[str]) -> Fused:
    """Rewrite a graph. Without fusions, or where none applies, it is the graph itself.

    The result shares names, parameters and the random streams of dropout with ``graph``. Raises UserError for an unknown
    fusion.
    """
    chains = _chains(graph, check_fusions(fusions))
    if not chains:
        return Fused(graph, {})
    inside = {node for chain in chains.values() for node in chain[:-1]}
    other = Graph(_names=set(graph._names), _numbers=dict(graph._numbers), inputs=graph.inputs, labels=graph.labels)
    twin: dict[Tensor, Tensor] = {tensor: tensor for tensor in (*graph.inputs, *graph.labels)}
    for node in graph.nodes:
        if node in inside:
            continue
        first, layer, inputs = node, node.layer, node.inputs
        if node in chains:
            first = chains[node][0]
            layer, inputs = _merged(chains[node])
        elif isinstance(layer, Dropout) and layer.stream is None:
            layer = replace(layer, stream=node.index)
        sources = tuple(twin[tensor] for tensor in inputs)
        twin[node.output] = other._append(first.name, layer, sources, node.output.spec, first.parameters)
    return Fused(other, {node.name: chain[0].name for chain in chains.values() for node in chain})


def _chains(graph: Graph, fusions: tuple[str, ...]) -> dict[Node, tuple[Node, ...]]:
    """The chains to fuse, by their last node."""
    readers = graph.consumers()

    def maker(tensor: Tensor, kind: type) -> Node | None:
        """The node that makes a tensor which only one layer reads, if it is exactly of this kind."""
        node = tensor.producer
        return node if node is not None and type(node.layer) is kind and len(readers[tensor]) == 1 else None

    chains: dict[Node, tuple[Node, ...]] = {}
    for node in graph.nodes:
        if type(node.layer) is not ReLU:
            continue
        below = node.inputs[0]
        norm, conv, add = maker(below, BatchNorm), maker(below, Conv2d), maker(below, Add)
        if norm is not None and "batch_norm_relu" in fusions:
            chains[node] = (norm, node)
        elif conv is not None and conv.layer.bias and "conv_bias_relu" in fusions:
            chains[node] = (conv, node)
        elif add is not None and "batch_norm_add_relu" in fusions and add.inputs[0] is not add.inputs[1]:
            norm = maker(add.inputs[0], BatchNorm) or maker(add.inputs[1], BatchNorm)
            if norm is not None:
                chains[node] = (norm, add, node)
    return chains


def _merged(chain: tuple[Node, ...]) -> tuple[Any, tuple[Tensor, ...]]:
    """The layer that a chain becomes, and its inputs."""
    first = chain[0]
    settings = {f.name: getattr(first.layer, f.name) for f in fields(first.layer)}
    if isinstance(first.layer, Conv2d):
        return Conv2dReLU(**settings), first.inputs
    if len(chain) == 2:
        return BatchNormReLU(**settings), first.inputs
    (skip,) = (tensor for tensor in chain[1].inputs if tensor is not first.output)
    return BatchNormAddReLU(**settings), (*first.inputs, skip)
