"""The Layer protocol: the one page to read before adding a layer.

A layer is a small frozen dataclass of hyper-parameters. It holds no array and no state: parameters belong to the graph,
bytes to the schedule. It only *describes* which kernels to call, as ``Call`` rows whose operands are names:

    x0 x1 ...      its inputs ("x" is "x0")         dx0 dx1 ...    their gradients ("dx" is "dx0")
    y              its output                       dy             its gradient
    <aux key>      what forward leaves for backward, such as "mean"
    <parameter>    such as "weight"                 d_<parameter>  this micro-batch's gradient of it
    scalars        (8,) learning rate, loss weight, ...  see ``minidnn.scalars``
    counters       (4,) uint32: step low, step high, seed, rank

What a backward needs is what its rows read: there is no second declaration that could drift, and a backward cannot be
handed anything else. So ``x`` stays alive until the layer's backward if and only if a backward row names it.

To add a layer: write the dataclass with ``infer`` and the rows; add the kernels to ``minidnn.kernels.base`` and to each
backend; derive the gradients in the docstring; add a method to ``minidnn.layers.Graph``; add it to the table of
``tests/step/test_gradients.py``, which checks it against finite differences in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from minidnn.graph import GraphError
from minidnn.spec import TensorSpec


class Call(NamedTuple):
    """One kernel call: ``kernel(*writes, *reads, **attrs)``."""

    kernel: str
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    attrs: Mapping[str, Any] = {}
    flops: float = 0.0  # multiply-adds count as two
    over: tuple[str, ...] = ()  # operands among the reads that writes[0] may overwrite, when nobody reads them later
    engine: str = ""  # "forward", "backward_data", "backward_weight": the recipe chooses engine and workspace
    accumulates: bool = False  # the writes are read, too (running averages)
    joins: str = ""  # kernel that takes two contributions to the output's gradient, dy and dy1, and adds them itself


class Aux(NamedTuple):
    """Something forward leaves for backward. ``kept``: tiny, never offloaded or dropped."""

    key: str
    spec: TensorSpec
    kept: bool = False


class ParameterSpec(NamedTuple):
    """A parameter as the layer declares it; ``minidnn.graph.Parameter`` is the same with its full name."""

    key: str
    shape: tuple[int, ...]
    init: str
    trainable: bool = True
    dtype: str = "compute"


class Shapes(NamedTuple):
    """The layer's own tensors in one graph, handed to every method that writes rows."""

    inputs: tuple[TensorSpec, ...]
    output: TensorSpec
    node: int  # index of the node: the stream of random numbers of a dropout


class Layer:
    """Base of all layers. Defaults fit an element-wise layer without parameters.

    An empty tuple of rows from ``forward`` or ``inference`` says that the output *is* the input, reshaped (flatten);
    from ``backward_data``, that the gradient is the output's gradient (flatten, add): an alias, no bytes, no time.
    """

    __slots__ = ()
    kind: ClassVar[str]

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        """Output spec from input specs. Raises GraphError, a sentence with the shapes, if they do not fit."""
        raise GraphError(f"layer {self.kind} defines no shape rule")

    def parameters(self, inputs: Sequence[TensorSpec]) -> tuple[ParameterSpec, ...]:
        """Trainable parameters and running statistics, in torchvision's order."""
        return ()

    def aux(self, shapes: Shapes) -> tuple[Aux, ...]:
        """What forward leaves for backward besides its output."""
        return ()

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        """Rows of the training forward pass: they write ``y`` and the aux."""
        raise GraphError(f"layer {self.kind} defines no forward rows")

    def recompute(self, shapes: Shapes) -> tuple[Call, ...]:
        """Rows that make ``y`` and the aux that are not kept again: the same kernels, without side effects."""
        return self.forward(shapes)

    def once(self, shapes: Shapes) -> tuple[Call, ...]:
        """Side effects, after forward and once a step: running averages."""
        return ()

    def inference(self, shapes: Shapes) -> tuple[Call, ...]:
        """Rows of the evaluation pass: they write ``y`` alone."""
        return self.forward(shapes)

    def backward_weight(self, shapes: Shapes) -> tuple[Call, ...]:
        """Rows that write ``d_<parameter>`` for every trainable parameter. They come before ``backward_data``."""
        return ()

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        """Rows that write ``dx<index>``. Called only for inputs that need a gradient."""
        raise GraphError(f"layer {self.kind} defines no backward rows")


Pair = tuple[int, int]
"""(vertical, horizontal)."""


def single(kind: str, inputs: Sequence[TensorSpec]) -> TensorSpec:
    """The one input of a layer that takes either kind of activation, or refuse with the count or the shape."""
    if len(inputs) != 1:
        raise GraphError(f"{kind} takes one input, not {len(inputs)}")
    if len(inputs[0].shape) not in (2, 4):
        raise GraphError(f"{kind} wants (N, H, W, C) or (N, features), not {inputs[0].shape}")
    return inputs[0]


def slide(extent: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> int:
    """How many whole windows fit along one axis; below 1 when none does."""
    return (extent + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def require_image(kind: str, spec: TensorSpec) -> tuple[int, int, int, int]:
    """Return (N, H, W, C), or refuse with the shape."""
    if len(spec.shape) != 4:
        raise GraphError(f"{kind} wants an image tensor (N, H, W, C), not {spec.shape}")
    n, h, w, c = spec.shape
    return n, h, w, c


def pair(kind: str, name: str, value: int | Sequence[int], *, least: int) -> tuple[int, int]:
    """Normalise an int or a pair of ints, each at least ``least``."""
    both = (value, value) if isinstance(value, int) else tuple(value)
    if len(both) != 2 or any(not isinstance(v, int) or v < least for v in both):
        raise GraphError(f"{kind}: {name} must be an integer or two, each at least {least}; got {value!r}")
    return both[0], both[1]
