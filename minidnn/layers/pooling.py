"""Pooling: MaxPool, AvgPool, GlobalAvgPool, and the trainable SubSample of LeNet-5, which alone needs x backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from minidnn.graph import GraphError
from minidnn.layers.base import Aux, Call, Layer, Pair, ParameterSpec, Shapes, require_image, slide
from minidnn.spec import TensorSpec

MAX_WINDOW = 256  # positions that one byte of index can name


def _image(kind: str, inputs: Sequence[TensorSpec]) -> tuple[int, int, int, int]:
    if len(inputs) != 1:
        raise GraphError(f"{kind} takes one input, not {len(inputs)}")
    return require_image(kind, inputs[0])


def _pooled(
    kind: str, inputs: Sequence[TensorSpec], kernel: Pair, stride: Pair, padding: Pair, *, ceil_mode: bool = False
) -> TensorSpec:
    """Output spec. ``ceil_mode``: windows may hang over the far edge, but not start beyond it."""
    n, h, w, c = _image(kind, inputs)
    if any(2 * pad > size for pad, size in zip(padding, kernel, strict=True)):
        raise GraphError(
            f"{kind}: padding {padding} is more than half of the kernel {kernel}, so a window could miss the image"
        )
    extents = []
    for extent, size, step, pad in zip((h, w), kernel, stride, padding, strict=True):
        count = slide(extent + (step - 1 if ceil_mode else 0), size, step, pad)
        if ceil_mode and (count - 1) * step >= extent + pad:
            count -= 1
        if count < 1:
            raise GraphError(
                f"{kind}: a {kernel[0]}x{kernel[1]} window does not fit into the input {inputs[0].shape} "
                f"with padding {padding}; use a larger image or a smaller window"
            )
        extents.append(count)
    return TensorSpec((n, extents[0], extents[1], c), inputs[0].dtype)


@dataclass(frozen=True, slots=True)
class MaxPool(Layer):
    """y = the maximum over a window, x (N, H, W, C) -> y (N, P, Q, C). Padding counts as minus infinity.

    y is a copy of one chosen element, so dy goes to that element and to no other, and sums where windows overlap. The
    choice is stored as one byte per output, hence at most 256 positions a window, and backward needs neither x nor y.

    ``ceil_mode`` as in PyTorch: the extent is rounded up, unless the last window would start in the far padding.
    """

    kind: ClassVar[str] = "max_pool"

    kernel: Pair
    stride: Pair
    padding: Pair = (0, 0)
    ceil_mode: bool = False

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        rows, columns = self.kernel
        if rows * columns > MAX_WINDOW:
            raise GraphError(
                f"max_pool: a window of {rows}x{columns} = {rows * columns} positions exceeds the {MAX_WINDOW} that a "
                "one-byte index can name; pool twice with smaller windows, or take the average"
            )
        return _pooled("max_pool", inputs, self.kernel, self.stride, self.padding, ceil_mode=self.ceil_mode)

    def _attrs(self) -> Mapping[str, Pair]:
        return {"kernel": self.kernel, "stride": self.stride, "padding": self.padding}

    def _flops(self, shapes: Shapes) -> float:
        return float(shapes.output.size * self.kernel[0] * self.kernel[1])

    def aux(self, shapes: Shapes) -> tuple[Aux, ...]:
        return (Aux("index", TensorSpec(shapes.output.shape, "uint8")),)

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        return (Call("max_pool_forward", ("y", "index"), ("x",), self._attrs(), self._flops(shapes)),)

    def inference(self, shapes: Shapes) -> tuple[Call, ...]:
        return (Call("max_pool_inference", ("y",), ("x",), self._attrs(), self._flops(shapes)),)

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        return (Call("max_pool_backward", ("dx",), ("dy", "index"), self._attrs(), float(shapes.output.size)),)


@dataclass(frozen=True, slots=True)
class AvgPool(Layer):
    """y = sum over an R x S window / (R * S), x (N, H, W, C) -> y (N, P, Q, C). Padding counts as zeros, as in PyTorch.

    y is linear in x with the coefficient 1 / (R * S) for each element of its window, so dx is the sum of dy / (R * S)
    over the windows that contain the element. Nothing is stored. Windows never hang over the far edge.
    """

    kind: ClassVar[str] = "avg_pool"

    kernel: Pair
    stride: Pair
    padding: Pair = (0, 0)

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        return _pooled("avg_pool", inputs, self.kernel, self.stride, self.padding)

    def _call(self, kernel: str, write: str, read: str, shapes: Shapes) -> tuple[Call, ...]:
        attrs = {"kernel": self.kernel, "stride": self.stride, "padding": self.padding}
        return (Call(kernel, (write,), (read,), attrs, float(shapes.output.size * self.kernel[0] * self.kernel[1])),)

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        return self._call("avg_pool_forward", "y", "x", shapes)

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        return self._call("avg_pool_backward", "dx", "dy", shapes)


@dataclass(frozen=True, slots=True)
class GlobalAvgPool(Layer):
    """y (N, C) = mean of x (N, H, W, C) over the map: the output is flat (Lin et al. 2014, "Network in network").

    Every element enters the mean with 1 / (H * W), so dx = dy / (H * W) at every position. Nothing is stored.
    """

    kind: ClassVar[str] = "global_avg_pool"

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        n, _, _, c = _image("global_avg_pool", inputs)
        return TensorSpec((n, c), inputs[0].dtype)

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        return (Call("global_avg_pool_forward", ("y",), ("x",), flops=float(shapes.inputs[0].size)),)

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        return (Call("global_avg_pool_backward", ("dx",), ("dy",), flops=float(shapes.inputs[0].size)),)


@dataclass(frozen=True, slots=True)
class SubSample(Layer):
    """y = weight[c] * (sum over a window) + bias[c], windows side by side: the S layers of LeCun et al. 1998, II-B.

    Does not apply their squashing function: add ``tanh``. The weight starts at 1 / (R * S), the average. y is linear in
    the weight and in the sum t, and every x is in one window, whose dy is dy(x)::

        d_weight[c] = sum dy * t        d_bias[c] = sum dy        dx = weight[c] * dy(x)

    Rows and columns beyond the last whole window are not read and get zero gradient. Backward needs x and the weight.
    """

    kind: ClassVar[str] = "subsample"

    kernel: Pair

    def infer(self, inputs: Sequence[TensorSpec]) -> TensorSpec:
        return _pooled("subsample", inputs, self.kernel, self.kernel, (0, 0))

    def parameters(self, inputs: Sequence[TensorSpec]) -> tuple[ParameterSpec, ...]:
        shape = (inputs[0].shape[3],)
        average = f"constant:{1 / (self.kernel[0] * self.kernel[1])!r}"
        return (ParameterSpec("weight", shape, average), ParameterSpec("bias", shape, "zeros"))

    def _call(self, kernel: str, writes: tuple[str, ...], reads: tuple[str, ...], shapes: Shapes) -> tuple[Call, ...]:
        return (Call(kernel, writes, reads, {"kernel": self.kernel}, float(shapes.inputs[0].size)),)

    def forward(self, shapes: Shapes) -> tuple[Call, ...]:
        return self._call("subsample_forward", ("y",), ("x", "weight", "bias"), shapes)

    def backward_weight(self, shapes: Shapes) -> tuple[Call, ...]:
        return self._call("subsample_backward_weight", ("d_weight", "d_bias"), ("dy", "x"), shapes)

    def backward_data(self, shapes: Shapes, index: int) -> tuple[Call, ...]:
        return self._call("subsample_backward_data", ("dx",), ("dy", "weight"), shapes)
