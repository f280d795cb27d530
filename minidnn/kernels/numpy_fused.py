"""NumPy kernels of fused layers: the same passes as on a GPU, so that their rows can be tested without one."""

from __future__ import annotations

import numpy as np

from minidnn.kernels.base import Array, Pair
from minidnn.kernels.numpy_chunks import ChannelSum, Tiling, channel_sums, integer_view
from minidnn.kernels.numpy_conv import conv2d_forward
from minidnn.kernels.numpy_norm import batch_norm_backward_weight, batch_norm_running, batch_norm_statistics
from minidnn.kernels.numpy_pointwise import relu_backward, relu_forward


def batch_norm_statistics_running(
    mean: Array, rstd: Array, running_mean: Array, running_var: Array, num_batches_tracked: Array, x: Array,
    old_mean: Array, old_var: Array, old_tracked: Array, *, eps: float, momentum: float, count: int,
) -> None:  # fmt: skip
    batch_norm_statistics(mean, rstd, x, eps=eps)
    for target, source in ((running_mean, old_mean), (running_var, old_var), (num_batches_tracked, old_tracked)):
        target[...] = source
    averages = (running_mean, running_var, num_batches_tracked)
    batch_norm_running(*averages, mean, rstd, eps=eps, momentum=momentum, count=count)


def batch_norm_relu(y: Array, x: Array, mean: Array, rstd: Array, weight: Array, bias: Array) -> None:
    tiling = Tiling.of(x)
    vectors = [tiling.tile(v, x.dtype) for v in (mean, rstd * weight, bias)]
    for target, source, centre, scale, shift in tiling.pieces((y, x), vectors):
        np.subtract(source, centre, out=target)
        np.multiply(target, scale, out=target)
        np.add(target, shift, out=target)
        np.maximum(target, 0.0, out=target)


def batch_norm_add_relu(
    y: Array, x: Array, residual: Array, mean: Array, rstd: Array, weight: Array, bias: Array
) -> None:
    tiling = Tiling.of(x)
    vectors = [tiling.tile(v, x.dtype) for v in (mean, rstd * weight, bias)]
    scratch = (tiling.scratch(x.dtype),)
    for target, source, skip, centre, scale, shift, t in tiling.pieces((y, x, residual), vectors, scratch):
        np.subtract(source, centre, out=t)
        np.multiply(t, scale, out=t)
        np.add(t, shift, out=t)
        np.add(t, skip, out=target)
        np.maximum(target, 0.0, out=target)


def _select(out: Array, gradient: Array, normal: Array, scale: Array, shift: Array, mask: Array) -> None:
    """out = gradient where normal * scale + shift > 0, else 0; normal is overwritten. Selects bits, so NaN is hidden, too."""
    np.multiply(normal, scale, out=normal)
    np.add(normal, shift, out=normal)
    np.greater(normal, 0.0, out=mask)
    np.multiply(integer_view(gradient), mask, out=integer_view(out), casting="unsafe")


def batch_norm_relu_backward_weight(
    d_weight: Array, d_bias: Array, dy: Array, x: Array, mean: Array, rstd: Array, weight: Array, bias: Array
) -> None:
    tiling = Tiling.of(x)
    products, sums = ChannelSum(tiling, x.dtype), ChannelSum(tiling, x.dtype)
    vectors = [tiling.tile(v, x.dtype) for v in (mean, rstd * weight, bias)]
    scratch = (tiling.scratch(x.dtype), tiling.scratch(x.dtype), tiling.scratch(np.bool_))
    for gradient, source, centre, scale, shift, t, g, mask in tiling.pieces((dy, x), vectors, scratch):
        np.subtract(source, centre, out=t)
        _select(g, gradient, t, scale, shift, mask)
        sums.add(g)
        np.subtract(source, centre, out=t)
        np.multiply(t, g, out=t)
        products.add(t)
    d_weight[...] = products.result() * rstd
    d_bias[...] = sums.result()


def batch_norm_relu_backward_data(
    dx: Array, dy: Array, x: Array, mean: Array, rstd: Array, weight: Array, bias: Array, d_weight: Array, d_bias: Array
) -> None:
    tiling = Tiling.of(x)
    count = x.size // tiling.channels
    slope = np.asarray(rstd, np.float64)
    steps = (mean, rstd * weight, bias, slope * d_weight / count, d_bias / count, slope * weight)
    vectors = [tiling.tile(v, x.dtype) for v in steps]
    scratch = (tiling.scratch(x.dtype), tiling.scratch(np.bool_))
    for target, gradient, source, centre, apply, shift, along, constant, scale, t, mask in tiling.pieces(
        (dx, dy, x), vectors, scratch
    ):
        np.subtract(source, centre, out=t)
        _select(target, gradient, t, apply, shift, mask)
        np.subtract(source, centre, out=t)
        np.multiply(t, along, out=t)
        np.add(t, constant, out=t)
        np.subtract(target, t, out=target)
        np.multiply(target, scale, out=target)


def batch_norm_add_relu_backward_weight(
    d_weight: Array, d_bias: Array, dz: Array, dy: Array, x: Array, y: Array, mean: Array, rstd: Array
) -> None:
    relu_backward(dz, dy, y)
    batch_norm_backward_weight(d_weight, d_bias, dz, x, mean, rstd)


def batch_norm_add_relu_backward_weight_sum(
    d_weight: Array, d_bias: Array, dz: Array, dy: Array, dy1: Array, x: Array, y: Array, mean: Array, rstd: Array
) -> None:
    np.add(dy, dy1, out=dz)
    batch_norm_add_relu_backward_weight(d_weight, d_bias, dz, dz, x, y, mean, rstd)


def relu_bias_backward(d_bias: Array, dz: Array, dy: Array, y: Array) -> None:
    relu_backward(dz, dy, y)
    d_bias[...] = channel_sums(dz)


def conv2d_relu_forward(
    y: Array, x: Array, weight: Array, bias: Array, *, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    images: int, scratch: Array | None = None,
) -> None:  # fmt: skip
    conv2d_forward(
        y, x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups, images=images,
        scratch=scratch,
    )  # fmt: skip
    relu_forward(y, y)
