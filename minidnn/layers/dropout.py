"""Dropout whose mask is a function of a key, so that it is never stored and recomputing cannot change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from minidnn.graph import GraphError
from minidnn.layers.base import Call, Layer, Shapes, single
from minidnn.random import dropout_threshold
from minidnn.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Dropout(Layer):
    """y = m * x / (1 - p), m = 0 with probability p, else 1; at evaluation the identity (Srivastava et al. 2014).

    m depends on x in no way, so dx = m * dy / (1 - p): the same kernel with the same mask, made again from the counters
    (step, seed, rank), the node's index (or ``stream``, by which a rewritten graph keeps it) and the element's index.
    Backward needs no activation.
    """

    kind: ClassVar[str] = "dropout"

    p: float = 0.5
    stream: int | None = None  # of random numbers; None: the node's index

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        if not (0 <= self.p < 1 and dropout_threshold(self.p) < 2**32):
            raise GraphError(f"dropout: p is the share to drop, at least 0 and below 1; got {self.p}")
        return single("dropout", inputs)

    def _call(self, write: str, read: str, shapes: Shapes) -> tuple[Call, ...]:
        threshold = dropout_threshold(self.p)
        if threshold == 0:
            return ()
        node = shapes.node if self.stream is None else self.stream
        attrs = {"node": node, "threshold": threshold, "scale": 1 / (1 - self.p)}
        return (Call("dropout", (write,), (read, "counters"), attrs, float(shapes.output.size), over=(read,)),)

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        return self._call("y", "x", shapes)

    def inference(self, shapes: Shapes) -> tuple[Call, ...]:
        return ()

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        return self._call("dx", "dy", shapes)
