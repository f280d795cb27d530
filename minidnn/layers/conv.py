"""Conv2d: cross-correlation of an image batch with a bank of filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from minidnn.graph import GraphError
from minidnn.layers.base import Call, Layer, Pair, ParameterSpec, Shapes, require_image, slide
from minidnn.layers.initial import bias_init
from minidnn.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Conv2d(Layer):
    """x (N, H, W, C) -> y (N, P, Q, K), weight (K, R, S, C / groups). Does not flip the kernel: a cross-correlation.

    With u = p * stride - padding + r * dilation, likewise v along the width, and x zero outside the image::

        y[n,p,q,k] = sum_{r,s,c} x[n,u,v,c] * weight[k,r,s,c] + bias[k]

    y is linear in each operand, so every gradient is the same sum with another operand left free::

        d_weight[k,r,s,c] = sum_{n,p,q} dy[n,p,q,k] * x[n,u,v,c]
        d_bias[k]         = sum_{n,p,q} dy[n,p,q,k]
        dx[n,h,w,c]       = sum over the (p,q,k,r,s) with u = h and v = w of dy[n,p,q,k] * weight[k,r,s,c]

    So d_weight needs x, dx needs the weight, and nobody needs y (Dumoulin & Visin 2016, "A guide to convolution
    arithmetic for deep learning", chapters 2 and 4). With groups, output channel k sees the inputs of its group only.
    """

    kind: ClassVar[str] = "conv2d"

    channels: int
    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    bias: bool = False
    init: str = "kaiming_normal_fan_out"

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        if len(inputs) != 1:
            raise GraphError(f"conv2d takes one input, not {len(inputs)}")
        n, h, w, c = require_image("conv2d", inputs[0])
        if self.channels < 1 or self.groups < 1:
            raise GraphError(f"conv2d: channels {self.channels} and groups {self.groups} must be at least 1")
        if c % self.groups or self.channels % self.groups:
            raise GraphError(
                f"conv2d: groups={self.groups} must divide both the {c} channels of the input {inputs[0].shape} "
                f"and the {self.channels} output channels"
            )
        p, q = map(slide, (h, w), self.kernel, self.stride, self.padding, self.dilation)
        if p < 1 or q < 1:
            raise GraphError(
                f"conv2d: a {self.kernel[0]}x{self.kernel[1]} kernel with dilation {self.dilation} does not fit into "
                f"the input {inputs[0].shape} with padding {self.padding}; use a larger image, a smaller kernel or "
                "more padding"
            )
        return TensorSpec((n, p, q, self.channels), inputs[0].dtype)

    def parameters(self, inputs: Sequence[TensorSpec]) -> tuple[ParameterSpec, ...]:
        shape = (self.channels, *self.kernel, inputs[0].shape[3] // self.groups)
        weight = ParameterSpec("weight", shape, self.init)
        return (
            (weight, ParameterSpec("bias", (self.channels,), bias_init(self.init, shape))) if self.bias else (weight,)
        )

    def _attrs(self) -> Mapping[str, Any]:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}

    def _flops(self, shapes: Shapes) -> float:
        r, s = self.kernel
        return 2.0 * shapes.output.size * r * s * (shapes.inputs[0].shape[3] // self.groups)

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        reads = ("x", "weight", "bias") if self.bias else ("x", "weight")
        return (Call("conv2d_forward", ("y",), reads, self._attrs(), self._flops(shapes), engine="forward"),)

    def backward_weight(self, shapes: Shapes) -> tuple[Call, ...]:
        weight = Call(
            "conv2d_backward_weight",
            ("d_weight",),
            ("x", "dy"),
            self._attrs(),
            self._flops(shapes),
            engine="backward_weight",
        )
        if not self.bias:
            return (weight,)
        return (weight, Call("channel_sum", ("d_bias",), ("dy",), flops=float(shapes.output.size)))

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        return (
            Call(
                "conv2d_backward_data",
                ("dx",),
                ("dy", "weight"),
                self._attrs(),
                self._flops(shapes),
                engine="backward_data",
            ),
        )
