"""ReLU and the scaled Tanh. Both find their gradient in their own output, so the input can be overwritten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from minidnn.graph import GraphError
from minidnn.layers.base import Call, Layer, Shapes, single
from minidnn.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class ReLU(Layer):
    """y = max(x, 0). Does not keep x.

    dy/dx is 1 where x > 0 and 0 where x < 0; at x = 0 the common choice is 0. x > 0 exactly where y > 0, so dx = dy
    where y > 0, else 0.
    """

    kind: ClassVar[str] = "relu"

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        return single("relu", inputs)

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        return (Call("relu_forward", ("y",), ("x",), flops=float(shapes.output.size), over=("x",)),)

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        return (Call("relu_backward", ("dx",), ("dy", "y"), flops=float(shapes.output.size), over=("dy",)),)


@dataclass(frozen=True, slots=True)
class Tanh(Layer):
    """y = amplitude * tanh(slope * x); the defaults give f(1) = 1 and f(-1) = -1 (LeCun et al. 1998, appendix A).

    tanh' = 1 - tanh^2 and tanh(slope * x) = y / amplitude, so::

        dx = dy * amplitude * slope * (1 - (y / amplitude)^2) = dy * slope * (amplitude - y^2 / amplitude)
    """

    kind: ClassVar[str] = "tanh"

    amplitude: float = 1.7159
    slope: float = 2 / 3

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        if not (self.amplitude > 0 and self.slope > 0):
            raise GraphError(f"tanh: amplitude {self.amplitude} and slope {self.slope} must be positive")
        return single("tanh", inputs)

    def _attrs(self) -> Mapping[str, float]:
        return {"amplitude": self.amplitude, "slope": self.slope}

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        return (Call("tanh_forward", ("y",), ("x",), self._attrs(), flops=3.0 * shapes.output.size, over=("x",)),)

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        return (
            Call("tanh_backward", ("dx",), ("dy", "y"), self._attrs(), flops=5.0 * shapes.output.size, over=("dy",)),
        )
