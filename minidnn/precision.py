"""Precision: which element type each kind of tensor has."""

from __future__ import annotations

from typing import NamedTuple

from minidnn.errors import UserError, nearest
from minidnn.spec import TensorSpec


class Precision(NamedTuple):
    """Element types of a training run.

    ``scaled``: whether the loss is multiplied by a scale that adapts, since small gradients would vanish in the type.
    ``compute``: activations, their gradients, convolution and linear weights. ``statistics``: means, scales of batch norm,
    optimizer state, loss, scalars. ``master``: whether a wider copy of the 16-bit weights is kept for the update.
    """

    name: str
    compute: str
    statistics: str
    master: bool
    scaled: bool = False

    def resolve(self, spec: TensorSpec) -> TensorSpec:
        """Replace the symbolic dtypes "compute" and "statistics" of a graph."""
        if spec.dtype == "compute":
            return TensorSpec(spec.shape, self.compute)
        if spec.dtype == "statistics":
            return TensorSpec(spec.shape, self.statistics)
        return spec


PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp32", "float32", "float32", False),  # true fp32: no tensor cores
        Precision("tf32", "float32", "float32", False),  # fp32 storage, TF32 tensor cores in convolution and matmul
        Precision("bf16", "bfloat16", "float32", True),
        Precision("fp16", "float16", "float32", True, scaled=True),
        Precision("fp64", "float64", "float64", False),  # gradient checks, emulated device only
    )
}


def precision(name: str) -> Precision:
    """Look a precision up by name. Raises UserError with the nearest names."""
    if name not in PRECISIONS:
        raise UserError(f"unknown precision {name!r}; {nearest(name, PRECISIONS)}")
    return PRECISIONS[name]
