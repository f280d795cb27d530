"""BatchNorm: per-channel normalisation by the statistics of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from minidnn.graph import GraphError
from minidnn.layers.base import Aux, Call, Layer, ParameterSpec, Shapes, single
from minidnn.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class BatchNorm(Layer):
    """Normalise every channel over all other axes, then scale and shift. Does not synchronise statistics across ranks.

    Three rows: *statistics* (x -> mean, rstd), *apply* (x -> y), *running averages* (once a step). Recomputing repeats
    apply only: mean and rstd are kept, so that neither the bits nor the running averages can differ.

    With M values per channel, h = (x - mean) * rstd and y = weight * h + bias (Ioffe & Szegedy 2015, "Batch
    normalization", algorithm 1)::

        d_bias = sum dy        d_weight = sum dy * h        dh = weight * dy

    x_i reaches every h_j = (x_j - mean) * rstd directly (i = j), through mean, d mean / dx_i = 1 / M, and through
    rstd = (variance + eps)^(-1/2), d rstd / dx_i = -rstd^3 * (x_i - mean) / M, so that ::

        dx_i = rstd * dh_i - rstd * sum_j dh_j / M - rstd * h_i * sum_j (dh_j * h_j) / M
        dx   = weight * rstd * (dy - d_bias / M - h * d_weight / M)

    exactly, for any eps. So backward needs x, mean, rstd, weight and *this* micro-batch's d_weight and d_bias, never
    sums accumulated over several.

    Running averages, as PyTorch: running = (1 - momentum) * running + momentum * batch, with the unbiased variance;
    momentum None is the cumulative average.
    """

    kind: ClassVar[str] = "batch_norm"

    eps: float = 1e-5
    momentum: float | None = 0.1
    weight_init: str = "ones"

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        if not self.eps > 0:
            raise GraphError(f"batch_norm: eps must be positive, not {self.eps}")
        if self.momentum is not None and not 0 <= self.momentum <= 1:
            raise GraphError(
                f"batch_norm: momentum is a number from 0 to 1, or None for the cumulative average; got {self.momentum}"
            )
        return single("batch_norm", inputs)

    def parameters(self, inputs: Sequence[TensorSpec]) -> tuple[ParameterSpec, ...]:
        shape = (inputs[0].shape[-1],)
        return (
            ParameterSpec("weight", shape, self.weight_init, dtype="statistics"),
            ParameterSpec("bias", shape, "zeros", dtype="statistics"),
            ParameterSpec("running_mean", shape, "zeros", trainable=False, dtype="statistics"),
            ParameterSpec("running_var", shape, "ones", trainable=False, dtype="statistics"),
            ParameterSpec("num_batches_tracked", (1,), "zeros_int", trainable=False, dtype="int64"),
        )

    def aux(self, shapes: Shapes) -> tuple[Aux, ...]:
        spec = TensorSpec((shapes.output.shape[-1],), "statistics")
        return (Aux("mean", spec, kept=True), Aux("rstd", spec, kept=True))

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        x = shapes.inputs[0]
        if x.size // x.shape[-1] < 2:
            raise GraphError(
                f"batch_norm: {x.shape} has one value per channel, which has no variance; train with a larger batch"
            )
        statistics = Call("batch_norm_statistics", ("mean", "rstd"), ("x",), {"eps": self.eps}, flops=4.0 * x.size)
        return (statistics, *self.recompute(shapes))

    def recompute(self, shapes: Shapes) -> tuple[Call, ...]:
        reads = ("x", "mean", "rstd", "weight", "bias")
        return (Call("batch_norm_apply", ("y",), reads, flops=4.0 * shapes.output.size, over=("x",)),)

    def once(self, shapes: Shapes) -> tuple[Call, ...]:
        x = shapes.inputs[0]
        attrs = {"eps": self.eps, "momentum": self.momentum, "count": x.size // x.shape[-1]}
        writes = ("running_mean", "running_var", "num_batches_tracked")
        return (Call("batch_norm_running", writes, ("mean", "rstd"), attrs, accumulates=True),)

    def inference(self, shapes: Shapes) -> tuple[Call, ...]:
        reads = ("x", "running_mean", "running_var", "weight", "bias")
        return (
            Call("batch_norm_inference", ("y",), reads, {"eps": self.eps}, flops=4.0 * shapes.output.size, over=("x",)),
        )

    def backward_weight(self, shapes: Shapes) -> tuple[Call, ...]:
        reads = ("dy", "x", "mean", "rstd")
        return (Call("batch_norm_backward_weight", ("d_weight", "d_bias"), reads, flops=5.0 * shapes.output.size),)

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        reads = ("dy", "x", "mean", "rstd", "weight", "d_weight", "d_bias")
        return (Call("batch_norm_backward_data", ("dx",), reads, flops=6.0 * shapes.output.size, over=("dy",)),)
