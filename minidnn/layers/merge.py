"""Layers that join or reshape: Add, Concat, Flatten. None needs an activation backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from minidnn.graph import GraphError
from minidnn.layers.base import Call, Layer, Shapes, single
from minidnn.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Add(Layer):
    """y = x0 + x1 of equal shapes. Does not broadcast.

    dy/dx0 = dy/dx1 = identity: both gradients *are* dy, aliases without bytes or time.
    """

    kind: ClassVar[str] = "add"

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        if len(inputs) != 2:
            raise GraphError(f"add takes two inputs, not {len(inputs)}")
        if inputs[0].shape != inputs[1].shape:
            raise GraphError(
                f"add wants equal shapes, not {inputs[0].shape} and {inputs[1].shape}; "
                "bring one to the other's shape by a 1x1 conv2d"
            )
        return single("add", inputs[:1])

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        return (Call("add_forward", ("y",), ("x0", "x1"), flops=float(shapes.output.size), over=("x0", "x1")),)

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Concat(Layer):
    """y = the inputs side by side along channels, the last axis (Szegedy et al. 2015; Huang et al. 2017).

    Every input is copied to its own channels, so dx_i is that slice of dy.
    """

    kind: ClassVar[str] = "concat"

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        if len(inputs) < 2:
            raise GraphError(f"concat takes two inputs or more, not {len(inputs)}")
        if len({spec.shape[:-1] for spec in inputs}) > 1:
            listed = ", ".join(str(spec.shape) for spec in inputs)
            raise GraphError(f"concat wants shapes that differ in channels only, not {listed}")
        first = single("concat", inputs[:1])
        return TensorSpec((*first.shape[:-1], sum(spec.shape[-1] for spec in inputs)), first.dtype)

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        return (Call("concat_forward", ("y",), tuple(f"x{i}" for i in range(len(shapes.inputs)))),)

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        offset = sum(spec.shape[-1] for spec in shapes.inputs[:index])
        return (Call("concat_backward", (f"dx{index}",), ("dy",), {"offset": offset}),)


@dataclass(frozen=True, slots=True)
class Flatten(Layer):
    """(N, H, W, C) -> (N, H * W * C): the same bytes under another shape, forward and backward.

    The columns come in H, W, C order, not in PyTorch's C, H, W; ``minidnn.layers.layout`` permutes them in files.
    """

    kind: ClassVar[str] = "flatten"

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        spec = single("flatten", inputs)
        return TensorSpec((spec.shape[0], math.prod(spec.shape[1:])), spec.dtype)

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        return ()

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        return ()
