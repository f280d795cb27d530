"""SoftmaxCrossEntropy: the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from minidnn.graph import GraphError
from minidnn.layers.base import Aux, Call, Layer, Shapes
from minidnn.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class SoftmaxCrossEntropy(Layer):
    """Mean cross-entropy of softmax(logits (N, classes)) against labels (N,): a scalar. Does not ignore any label.

    With p = softmax(z), q = (1 - smoothing) * onehot + smoothing / classes (Szegedy et al. 2016, section 7) and
    L = mean over samples of -sum_k q_k log p_k: since log p_k = z_k - log sum_j exp z_j and sum_k q_k = 1,
    dL_n/dz_k = p_k - q_k, and the mean over samples makes it ::

        d_logits = (p - q) * scalars[LOSS_WEIGHT]        LOSS_WEIGHT = loss scale / samples of the whole update

    So backward needs the probabilities and labels, and writes its result over the probabilities. They are kept in the
    statistics dtype: 16 bits would round a confident p to 1 and its gradient to 0.
    """

    kind: ClassVar[str] = "softmax_cross_entropy"

    smoothing: float = 0.0

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        if not 0 <= self.smoothing < 1:
            raise GraphError(f"softmax_cross_entropy: smoothing must be at least 0 and below 1, not {self.smoothing}")
        if len(inputs) != 2:
            raise GraphError(f"softmax_cross_entropy takes logits and labels, not {len(inputs)} inputs")
        logits, label = inputs
        if len(logits.shape) != 2 or logits.shape[1] < 2:
            raise GraphError(
                f"softmax_cross_entropy wants logits (N, classes) with at least 2 classes, not {logits.shape}; "
                "end the net with linear"
            )
        if label.dtype != "int32" or label.shape != logits.shape[:1]:
            raise GraphError(
                f"softmax_cross_entropy wants one label for each row of the logits {logits.shape}, "
                f"so label(({logits.shape[0]},)), not {label}"
            )
        return TensorSpec((), "statistics")

    def _attrs(self) -> Mapping[str, float]:
        return {"smoothing": self.smoothing}

    def aux(self, shapes: Shapes) -> tuple[Aux, ...]:
        return (Aux("probabilities", TensorSpec(shapes.inputs[0].shape, "statistics"), kept=True),)

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        flops = 5.0 * shapes.inputs[0].size
        return (Call("softmax_cross_entropy_forward", ("y", "probabilities"), ("x0", "x1"), self._attrs(), flops),)

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        reads = ("probabilities", "x1", "scalars")
        flops = 2.0 * shapes.inputs[0].size
        return (Call("softmax_cross_entropy_backward", ("dx",), reads, self._attrs(), flops, over=("probabilities",)),)
