"""The public Graph: ``minidnn.graph.Graph`` plus one method for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import minidnn.graph
from minidnn.errors import UserError
from minidnn.graph import GraphError, Node, Parameter, Role, Tensor
from minidnn.layers.activation import ReLU, Tanh
from minidnn.layers.base import Layer, pair, require_image
from minidnn.layers.conv import Conv2d
from minidnn.layers.dropout import Dropout
from minidnn.layers.linear import Linear
from minidnn.layers.loss import SoftmaxCrossEntropy
from minidnn.layers.lrn import LRN
from minidnn.layers.merge import Add, Concat, Flatten
from minidnn.layers.norm import BatchNorm
from minidnn.layers.pooling import AvgPool, GlobalAvgPool, MaxPool, SubSample
from minidnn.spec import TensorSpec

Extent = int | Sequence[int]
"""One number for both axes, or (vertical, horizontal)."""


@dataclass(eq=False, slots=True, repr=False)
class Graph(minidnn.graph.Graph):
    """A net, built layer by layer: every method adds a node and returns its output. Holds no array.

    Every method raises GraphError, naming the layer and the shapes, when the layer does not fit; the graph is then as
    before. Layers without a ``name`` are called ``relu1``, ``relu2`` ... Parameters are called ``"<layer>.<key>"``.
    """

    def apply(self, layer: Layer, *inputs: Tensor, name: str | None = None) -> Tensor:
        """Add any layer. All other methods rest on this one; an own layer needs no method."""
        name = self.automatic_name(layer.kind.removesuffix("2d")) if name is None else name
        for position, tensor in enumerate(inputs):
            self._require_own(tensor, name)
            if tensor.role is Role.LABEL and not (isinstance(layer, SoftmaxCrossEntropy) and position == 1):
                raise GraphError(
                    f"layer {name!r}: the label {tensor.name!r} goes into the loss only, not into {layer.kind}"
                )
        specs = tuple(tensor.spec for tensor in inputs)
        try:
            output_spec = layer.infer(specs)
            declared = layer.parameters(specs)
        except GraphError as error:
            raise GraphError(f"layer {name!r}: {error}") from None
        self._unique(name)
        parameters = tuple(Parameter(f"{name}.{p.key}", p.key, p.shape, p.init, p.trainable, p.dtype) for p in declared)
        return self._append(name, layer, inputs, output_spec, parameters)

    # -- layers -----------------------------------------------------------------------------------------------------
    def conv2d(
        self, x: Tensor, channels: int, kernel: Extent, stride: Extent = 1, padding: Extent = 0, dilation: Extent = 1,
        groups: int = 1, bias: bool = False, init: str = "kaiming_normal_fan_out", name: str | None = None,
    ) -> Tensor:  # fmt: skip
        """Cross-correlation with ``channels`` filters, zero padding. No bias by default: batch norm has one."""
        windows = (
            pair("conv2d", "kernel", kernel, least=1),
            pair("conv2d", "stride", stride, least=1),
            pair("conv2d", "padding", padding, least=0),
            pair("conv2d", "dilation", dilation, least=1),
        )
        return self.apply(Conv2d(channels, *windows, groups, bias, init), x, name=name)

    def linear(
        self, x: Tensor, features: int, bias: bool = True, init: str = "uniform_fan_in", name: str | None = None
    ) -> Tensor:
        """(N, C) -> (N, features). Does not flatten."""
        return self.apply(Linear(features, bias, init), x, name=name)

    def batch_norm(
        self,
        x: Tensor,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        weight_init: str = "ones",
        name: str | None = None,
    ) -> Tensor:
        """Normalise every channel over the batch; ``momentum`` None keeps the cumulative average of the statistics."""
        return self.apply(BatchNorm(eps, momentum, weight_init), x, name=name)

    def relu(self, x: Tensor, name: str | None = None) -> Tensor:
        """max(x, 0)."""
        return self.apply(ReLU(), x, name=name)

    def tanh(self, x: Tensor, amplitude: float = 1.7159, slope: float = 2 / 3, name: str | None = None) -> Tensor:
        """amplitude * tanh(slope * x), by default LeCun's."""
        return self.apply(Tanh(amplitude, slope), x, name=name)

    def max_pool(
        self, x: Tensor, kernel: Extent, stride: Extent | None = None, padding: Extent = 0, ceil_mode: bool = False,
        name: str | None = None,
    ) -> Tensor:  # fmt: skip
        """Maximum over windows of at most 256 positions; ``stride`` None: the kernel."""
        size = pair("max_pool", "kernel", kernel, least=1)
        step = size if stride is None else pair("max_pool", "stride", stride, least=1)
        return self.apply(MaxPool(size, step, pair("max_pool", "padding", padding, least=0), ceil_mode), x, name=name)

    def avg_pool(
        self, x: Tensor, kernel: Extent, stride: Extent | None = None, padding: Extent = 0, name: str | None = None
    ) -> Tensor:
        """Mean over windows, padding counted as zeros; ``stride`` None: the kernel."""
        size = pair("avg_pool", "kernel", kernel, least=1)
        step = size if stride is None else pair("avg_pool", "stride", stride, least=1)
        return self.apply(AvgPool(size, step, pair("avg_pool", "padding", padding, least=0)), x, name=name)

    def global_avg_pool(self, x: Tensor, name: str | None = None) -> Tensor:
        """(N, H, W, C) -> (N, C), the mean over the map."""
        return self.apply(GlobalAvgPool(), x, name=name)

    def global_max_pool(self, x: Tensor, name: str | None = None) -> Tensor:
        """(N, H, W, C) -> (N, C), the maximum over a map of at most 256 positions: two nodes, max_pool and flatten."""
        name = self.automatic_name("global_max_pool") if name is None else name
        self._require_own(x, name)
        _, h, w, _ = require_image("global_max_pool", x.spec)
        return self.flatten(self.max_pool(x, (h, w), name=name), name=f"{name}.flatten")

    def subsample(self, x: Tensor, kernel: Extent, name: str | None = None) -> Tensor:
        """LeNet-5's trainable sub-sampling: weight[c] * (sum over the window) + bias[c], windows side by side."""
        return self.apply(SubSample(pair("subsample", "kernel", kernel, least=1)), x, name=name)

    def dropout(self, x: Tensor, p: float = 0.5, name: str | None = None) -> Tensor:
        """Drop a share ``p`` of the elements and scale the others by 1 / (1 - p); the identity at evaluation."""
        return self.apply(Dropout(p), x, name=name)

    def add(self, a: Tensor, b: Tensor, name: str | None = None) -> Tensor:
        """a + b, of equal shapes."""
        return self.apply(Add(), a, b, name=name)

    def concat(self, *xs: Tensor, name: str | None = None) -> Tensor:
        """Side by side along channels."""
        return self.apply(Concat(), *xs, name=name)

    def flatten(self, x: Tensor, name: str | None = None) -> Tensor:
        """(N, H, W, C) -> (N, H * W * C), no bytes and no time."""
        return self.apply(Flatten(), x, name=name)

    def lrn(
        self, x: Tensor, size: int = 5, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0, name: str | None = None
    ) -> Tensor:
        """Local response normalisation across channels; ``alpha`` is divided by ``size``, as in Caffe and PyTorch."""
        return self.apply(LRN(size, alpha, beta, k), x, name=name)

    def softmax_cross_entropy(
        self, logits: Tensor, label: Tensor, smoothing: float = 0.0, name: str = "loss"
    ) -> Tensor:
        """The loss: mean cross-entropy against the class numbers. A graph that trains has exactly one."""
        return self.apply(SoftmaxCrossEntropy(smoothing), logits, label, name=name)

    # -- the whole --------------------------------------------------------------------------------------------------
    @property
    def loss_node(self) -> Node:
        """The node of the loss. Raises GraphError unless there is exactly one."""
        losses = [node for node in self.nodes if isinstance(node.layer, SoftmaxCrossEntropy)]
        if not losses:
            raise GraphError("the graph has no loss; end it with softmax_cross_entropy(logits, label)")
        if len(losses) > 1:
            raise GraphError(f"the graph has {len(losses)} losses, {', '.join(node.name for node in losses)}; keep one")
        return losses[0]

    @property
    def logits(self) -> Tensor:
        """What evaluation returns: the first input of the loss."""
        return self.loss_node.inputs[0]

    def check(self) -> None:
        """Refuse a graph that cannot train: not one loss, a tensor that nobody uses, or no trainable parameter."""
        loss = self.loss_node
        used = {tensor for node in self.nodes for tensor in node.inputs}
        for tensor in (*self.inputs, *self.labels, *(node.output for node in self.nodes)):
            if tensor not in used and tensor is not loss.output:
                what = "layer" if tensor.producer else tensor.role.value
                raise GraphError(
                    f"nobody uses the output of {what} {tensor.name!r} {tensor.shape}; use it or leave it out"
                )
        if not loss.output.requires_grad:
            raise GraphError(
                "no layer below the loss has a parameter, so there is nothing to train; add conv2d or linear"
            )

    def with_batch(self, n: int) -> Graph:
        """The same net for batches of ``n``: same names, layers and parameters, every shape inferred anew."""
        if n < 1:
            raise UserError(f"a batch has at least 1 sample, not {n}")
        other = Graph(_names=set(self._names), _numbers=dict(self._numbers))
        twin: dict[Tensor, Tensor] = {}
        for tensor in (*self.inputs, *self.labels):
            twin[tensor] = Tensor(tensor.name, TensorSpec((n, *tensor.shape[1:]), tensor.spec.dtype), tensor.role)
        other.inputs = [twin[tensor] for tensor in self.inputs]
        other.labels = [twin[tensor] for tensor in self.labels]
        for node in self.nodes:
            inputs = tuple(twin[tensor] for tensor in node.inputs)
            spec = node.layer.infer(tuple(tensor.spec for tensor in inputs))
            twin[node.output] = other._append(node.name, node.layer, inputs, spec, node.parameters)
        return other

    def summary(self) -> str:
        """A table: name, kind, output shape and trainable parameters of every layer, and the total."""
        rows = [("layer", "kind", "output", "parameters")]
        for node in self.nodes:
            count = sum(p.size for p in node.parameters if p.trainable)
            rows.append((node.name, node.layer.kind, str(node.output.shape), f"{count:,}" if count else ""))
        rows.append(("total", f"{len(self.nodes)} layers", "", f"{self.parameter_count:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {shape:<{widths[2]}}  {count:>{widths[3]}}".rstrip()
            for name, kind, shape, count in rows
        )

    def __repr__(self) -> str:
        return f"Graph({len(self.nodes)} layers, {self.parameter_count:,} parameters)"
