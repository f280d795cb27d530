"""LRN: local response normalisation across neighbouring channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from minidnn.graph import GraphError
from minidnn.layers.base import Aux, Call, Layer, Shapes, require_image
from minidnn.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class LRN(Layer):
    """y = x * scale^-beta, scale = k + alpha / size * sum of x^2 over ``size`` neighbouring channels.

    Krizhevsky et al. 2012, section 3.3, but alpha is divided by ``size``, as in Caffe and PyTorch: the paper's 1e-4 is
    5e-4 here. With W(j) the window of channel j::

        dy_j/dx_i = [i = j] * scale_j^-beta - beta * x_j * scale_j^(-beta-1) * [i in W(j)] * 2 * alpha / size * x_i

        dx_i = dy_i * scale_i^-beta
               - 2 * alpha * beta / size * x_i * sum over j with i in W(j) of dy_j * x_j * scale_j^(-beta-1)

    Backward needs x and the scale, which forward leaves.
    """

    kind: ClassVar[str] = "lrn"

    size: int = 5
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        if len(inputs) != 1:
            raise GraphError(f"lrn takes one input, not {len(inputs)}")
        require_image("lrn", inputs[0])
        if self.size < 1 or not (self.k > 0 and self.alpha >= 0):
            raise GraphError(
                f"lrn: size {self.size} must be at least 1, k {self.k} positive, alpha {self.alpha} not negative"
            )
        return inputs[0]

    def _attrs(self) -> Mapping[str, float]:
        return {"size": self.size, "alpha": self.alpha, "beta": self.beta, "k": self.k}

    def aux(self, shapes: Shapes) -> tuple[Aux, ...]:
        return (Aux("scale", shapes.output),)

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        flops = (2.0 * self.size + 3) * shapes.output.size
        return (Call("lrn_forward", ("y", "scale"), ("x",), self._attrs(), flops),)

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        flops = (self.size + 8.0) * shapes.output.size
        return (Call("lrn_backward", ("dx",), ("dy", "x", "scale"), self._attrs(), flops),)
