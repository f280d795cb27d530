"""Linear: a matrix product with an optional bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from minidnn.graph import GraphError
from minidnn.layers.base import Call, Layer, ParameterSpec, Shapes
from minidnn.layers.initial import bias_init
from minidnn.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Linear(Layer):
    """y (N, K) = x (N, C) @ weight (K, C).T + bias (K,). Does not flatten images: that is a layer of its own.

    With L the loss and dy = dL/dy, dL = sum dy * d(x weight.T + bias), and moving one factor to the other side gives::

        dx = dy @ weight        d_weight = dy.T @ x        d_bias = sum over n of dy
    """

    kind: ClassVar[str] = "linear"

    features: int
    bias: bool = True
    init: str = "uniform_fan_in"

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        if len(inputs) != 1:
            raise GraphError(f"linear takes one input, not {len(inputs)}")
        shape = inputs[0].shape
        if len(shape) != 2:
            raise GraphError(f"linear wants (N, features), not {shape}; put flatten or global_avg_pool before it")
        if self.features < 1:
            raise GraphError(f"linear: features must be at least 1, not {self.features}")
        return TensorSpec((shape[0], self.features), inputs[0].dtype)

    def parameters(self, inputs: Sequence[TensorSpec]) -> tuple[ParameterSpec, ...]:
        shape = (self.features, inputs[0].shape[1])
        weight = ParameterSpec("weight", shape, self.init)
        return (
            (weight, ParameterSpec("bias", (self.features,), bias_init(self.init, shape))) if self.bias else (weight,)
        )

    def _flops(self, shapes: Shapes) -> float:
        return 2.0 * shapes.inputs[0].size * self.features

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        reads = ("x", "weight", "bias") if self.bias else ("x", "weight")
        return (Call("linear_forward", ("y",), reads, flops=self._flops(shapes), engine="forward"),)

    def backward_weight(self, shapes: Shapes) -> tuple[Call, ...]:
        flops = self._flops(shapes)
        weight = Call("linear_backward_weight", ("d_weight",), ("x", "dy"), flops=flops, engine="backward_weight")
        if not self.bias:
            return (weight,)
        return (weight, Call("channel_sum", ("d_bias",), ("dy",), flops=float(shapes.output.size)))

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        flops = self._flops(shapes)
        return (Call("linear_backward_data", ("dx",), ("dy", "weight"), flops=flops, engine="backward_data"),)
