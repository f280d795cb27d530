"""Layers that do the work of two or three in fewer passes over memory. Made by ``minidnn.fuse``, never by a user.

Each stands where its last member stood and has the name and the parameters of its first, so a state dictionary cannot tell.
They train; evaluation runs the graph before fusion, and so do all reports that ask a user's layer what it infers.

``dz`` is the gradient behind the ReLU: dy where y > 0, else 0. A row that writes it takes the place of a ReLU's backward:
lowering gives it dy's bytes where nobody else needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minidnn.graph import GraphError
from minidnn.layers.base import Call, Shapes
from minidnn.layers.conv import Conv2d
from minidnn.layers.norm import BatchNorm
from minidnn.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class FusedNorm(BatchNorm):
    """What fused batch norms share: statistics and running averages are one row, which recomputing does not repeat."""

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        if self.momentum is None:
            return BatchNorm.forward(self, shapes)
        (plain, *apply), (averages,) = BatchNorm.forward(self, shapes), BatchNorm.once(self, shapes)
        call = plain._replace(
            kernel="batch_norm_statistics_running",
            writes=(*plain.writes, *averages.writes),
            reads=("x", *averages.writes),
            attrs=averages.attrs,
        )
        return (call, *apply)

    def once(self, shapes: Shapes) -> tuple[Call, ...]:
        return BatchNorm.once(self, shapes) if self.momentum is None else ()

    def inference(self, shapes: Shapes) -> tuple[Call, ...]:
        return _no_inference()


@dataclass(frozen=True, slots=True)
class BatchNormReLU(FusedNorm):
    """y = max(weight * h + bias, 0) with BatchNorm's h. Backward makes the sign of y again from x, which it reads anyway.

    Passes over a tensor: 3 forward and 5 backward, where BatchNorm and ReLU one after the other take 5 and 8.
    """

    def recompute(self, shapes: Shapes) -> tuple[Call, ...]:
        reads = ("x", "mean", "rstd", "weight", "bias")
        return (Call("batch_norm_relu", ("y",), reads, flops=5.0 * shapes.output.size, over=("x",)),)

    def backward_weight(self, shapes: Shapes) -> tuple[Call, ...]:
        reads = ("dy", "x", "mean", "rstd", "weight", "bias")
        return (Call("batch_norm_relu_backward_weight", ("d_weight", "d_bias"), reads, flops=8.0 * shapes.output.size),)

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        reads = ("dy", "x", "mean", "rstd", "weight", "bias", "d_weight", "d_bias")
        return (Call("batch_norm_relu_backward_data", ("dx",), reads, flops=9.0 * shapes.output.size, over=("dy",)),)


@dataclass(frozen=True, slots=True)
class BatchNormAddReLU(FusedNorm):
    """y = max(weight * h + bias + x1, 0): the end of a residual unit. The gradient of x1 is dz.

    The output of a unit has two readers; where their gradients come from two rows, they are added here.
    Passes over a tensor: 4 forward and 8 backward with that addition, where three layers take 8 and 11.
    """

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        if len(inputs) != 2 or inputs[0].shape != inputs[1].shape:
            raise GraphError(f"batch_norm_add_relu takes two inputs of one shape, not {[s.shape for s in inputs]}")
        return BatchNorm.infer(self, inputs[:1])

    def recompute(self, shapes: Shapes) -> tuple[Call, ...]:
        reads = ("x", "x1", "mean", "rstd", "weight", "bias")
        return (Call("batch_norm_add_relu", ("y",), reads, flops=6.0 * shapes.output.size, over=("x", "x1")),)

    def backward_weight(self, shapes: Shapes) -> tuple[Call, ...]:
        writes, reads = ("d_weight", "d_bias", "dz"), ("dy", "x", "y", "mean", "rstd")
        flops = 6.0 * shapes.output.size
        kernel = "batch_norm_add_relu_backward_weight"
        return (Call(kernel, writes, reads, flops=flops, over=("dy", "dy1"), joins=f"{kernel}_sum"),)

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        if index == 1:
            return ()
        reads = ("dz", "x", "mean", "rstd", "weight", "d_weight", "d_bias")
        return (Call("batch_norm_backward_data", ("dx",), reads, flops=6.0 * shapes.output.size, over=("dz",)),)


@dataclass(frozen=True, slots=True)
class Conv2dReLU(Conv2d):
    """y = max(convolution + bias, 0), by a convolution that does the rest before it stores.

    Passes over the output: 1 forward and 3 backward beside the convolutions, where they take 5 and 4.
    """

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        reads = ("x", "weight", "bias")
        return (Call("conv2d_relu_forward", ("y",), reads, self._attrs(), self._flops(shapes), engine="forward_relu"),)

    def inference(self, shapes: Shapes) -> tuple[Call, ...]:
        return _no_inference()

    def backward_weight(self, shapes: Shapes) -> tuple[Call, ...]:
        flops = 2.0 * shapes.output.size
        bias = Call("relu_bias_backward", ("d_bias", "dz"), ("dy", "y"), flops=flops, over=("dy",))
        (weight, _) = Conv2d.backward_weight(self, shapes)
        return (bias, weight._replace(reads=("x", "dz")))

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        (call,) = Conv2d.backward_data(self, shapes, index)
        return (call._replace(reads=("dz", "weight")),)


def _no_inference() -> tuple[Call, ...]:
    raise GraphError("a fused layer only trains; evaluation runs the graph that it was made from")
