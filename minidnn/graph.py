"""Graph: what is computed. Tensors and nodes, single assignment, topological by construction.

Knows no layer: a node carries an opaque layer object. The public ``minidnn.Graph``, with ``conv2d``, ``relu`` and the
rest, is the subclass in ``minidnn.layers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from minidnn.errors import UserError
from minidnn.spec import TensorSpec


class Role(Enum):
    """What a buffer is for: totals are shown by role everywhere."""

    INPUT = "input"
    LABEL = "label"
    PARAMETER = "parameter"
    STATE = "state"
    ACTIVATION = "activation"
    AUX = "aux"
    GRAD = "gradient"
    PARAM_GRAD = "parameter gradient"
    OPTIMIZER = "optimizer"
    WORKSPACE = "workspace"


class GraphError(UserError):
    """The graph cannot be what was asked for: shapes, names or topology."""


@dataclass(eq=False, slots=True)
class Tensor:
    """A symbolic activation: the output of a node, an input or the label. ``producer`` is None for the latter two."""

    name: str
    spec: TensorSpec
    role: Role
    producer: Node | None = None
    requires_grad: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, H, W, C) or (N, features)."""
        return self.spec.shape

    def __repr__(self) -> str:  # the generated one would walk the whole graph through ``producer``
        return f"Tensor({self.name!r}, {self.spec})"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trainable tensor or (``trainable`` False) a running statistic that belongs to a node.

    ``name`` is torchvision's, ``"layer1.0.conv1.weight"``; ``init`` names its rule in ``layers.initial``.
    ``dtype`` "compute" follows the precision of the activations, "statistics" stays 32 bits or wider, or it is a dtype.
    """

    name: str
    key: str  # the layer's own name for it: "weight", "bias", "running_mean"
    shape: tuple[int, ...]
    init: str
    trainable: bool = True
    dtype: str = "compute"

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size


@dataclass(eq=False, slots=True)
class Node:
    """One layer applied to tensors."""

    index: int
    name: str
    layer: Any  # a layers.base.Layer; opaque here
    inputs: tuple[Tensor, ...]
    output: Tensor
    parameters: tuple[Parameter, ...]

    def parameter(self, key: str) -> Parameter:
        """The parameter the layer calls ``key``."""
        return next(p for p in self.parameters if p.key == key)

    def __repr__(self) -> str:  # not the generated one, which would walk the whole graph through ``inputs``
        inputs = ", ".join(tensor.name for tensor in self.inputs)
        return f"Node({self.index}, {self.name!r}, {self.layer}, ({inputs}) -> {self.output.spec})"


@dataclass(eq=False, slots=True)
class Graph:
    """Nodes in the order they were added, which is a topological order since inputs must exist before use."""

    nodes: list[Node] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)
    _numbers: dict[str, int] = field(default_factory=dict)

    def _unique(self, name: str) -> str:
        if name in self._names:
            raise GraphError(f"the name {name!r} is taken in this graph; give every layer its own name=")
        self._names.add(name)
        return name

    def automatic_name(self, kind: str) -> str:
        """A free name for an unnamed layer: ``relu1``, ``relu2`` ... Amortised O(1)."""
        number = self._numbers.get(kind, 1)
        while f"{kind}{number}" in self._names:
            number += 1
        self._numbers[kind] = number
        return f"{kind}{number}"

    def input(self, shape: Sequence[int], name: str = "x") -> Tensor:
        """Declare the batch, (N, H, W, C) or (N, features)."""
        if len(shape) not in (2, 4) or any(extent < 1 for extent in shape):
            raise GraphError(f"an input is (N, H, W, C) or (N, features), all at least 1; {tuple(shape)} is not")
        tensor = Tensor(self._unique(name), TensorSpec(tuple(shape), "compute"), Role.INPUT)
        self.inputs.append(tensor)
        return tensor

    def label(self, shape: Sequence[int], name: str = "y") -> Tensor:
        """Declare the class numbers, (N,)."""
        tensor = Tensor(self._unique(name), TensorSpec(tuple(shape), "int32"), Role.LABEL)
        self.labels.append(tensor)
        return tensor

    def consumers(self) -> dict[Tensor, list[Node]]:
        """Nodes that read each tensor, in order. O(edges)."""
        found: dict[Tensor, list[Node]] = {}
        for node in self.nodes:
            for tensor in node.inputs:
                found.setdefault(tensor, []).append(node)
        return found

    def _append(
        self, name: str, layer: Any, inputs: tuple[Tensor, ...], spec: TensorSpec, parameters: tuple[Parameter, ...]
    ) -> Tensor:
        requires_grad = any(p.trainable for p in parameters) or any(tensor.requires_grad for tensor in inputs)
        output = Tensor(name, spec, Role.ACTIVATION, requires_grad=requires_grad)
        output.producer = Node(len(self.nodes), name, layer, inputs, output, parameters)
        self.nodes.append(output.producer)
        return output

    def _require_own(self, tensor: Tensor, name: str) -> None:
        if not isinstance(tensor, Tensor):
            raise GraphError(
                f"layer {name!r} wants tensors of this graph, not {type(tensor).__name__}; declare the batch by input()"
            )
        node = tensor.producer
        if node is None:
            own = any(tensor is known for known in (*self.inputs, *self.labels))
        else:
            own = node.index < len(self.nodes) and self.nodes[node.index] is node
        if not own:
            raise GraphError(f"layer {name!r}: {tensor.name!r} belongs to another graph")

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters and running statistics, in the order of the nodes."""
        return tuple(parameter for node in self.nodes for parameter in node.parameters)

    @property
    def parameter_count(self) -> int:
        """Trainable elements: the number papers print."""
        return sum(parameter.size for parameter in self.parameters if parameter.trainable)
