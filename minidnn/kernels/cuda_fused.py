"""CUDA kernels of fused layers: batch norm with ReLU and addition, bias and ReLU behind a convolution."""

from __future__ import annotations

import ctypes

from minidnn.kernels.base import Array
from minidnn.kernels.cuda_launch import Launcher, Work, access, aligned, int32, int64, rows_of


def batch_norm_relu(on: Launcher, y: Array, x: Array, mean: Array, rstd: Array, weight: Array, bias: Array) -> Work:
    rows, channels = rows_of(x)
    arguments = [y, x, mean, rstd, weight, bias, int64(rows), int32(channels)]
    return on.rows("fused", "batch_norm_relu", x, arguments, aligned((y, x), (mean, rstd, weight, bias), channels))


def batch_norm_add_relu(
    on: Launcher, y: Array, x: Array, residual: Array, mean: Array, rstd: Array, weight: Array, bias: Array
) -> Work:
    rows, channels = rows_of(x)
    arguments = [y, x, residual, mean, rstd, weight, bias, int64(rows), int32(channels)]
    by = aligned((y, x, residual), (mean, rstd, weight, bias), channels)
    return on.rows("fused", "batch_norm_add_relu", x, arguments, by)


def batch_norm_relu_backward_weight(
    on: Launcher, d_weight: Array, d_bias: Array, dy: Array, x: Array, mean: Array, rstd: Array, weight: Array,
    bias: Array,
) -> Work:  # fmt: skip
    rows, channels = rows_of(x)
    names = ("batch_norm_relu_backward_weight_partial", "batch_norm_backward_weight_final")
    return on.reduction(
        "fused", names, 2, rows, channels, str(x.dtype), aligned((dy, x), (mean, rstd, weight, bias), channels),
        [dy, x, mean, rstd, weight, bias, int64(rows), int32(channels)],
        lambda blocks, _: [d_weight, d_bias, rstd, ctypes.c_void_p(on.scratch), int32(channels), int32(blocks)],
        final_source="norm",
    )  # fmt: skip


def batch_norm_relu_backward_data(
    on: Launcher, dx: Array, dy: Array, x: Array, mean: Array, rstd: Array, weight: Array, bias: Array,
    d_weight: Array, d_bias: Array,
) -> Work:  # fmt: skip
    rows, channels = rows_of(x)
    vectors = (mean, rstd, weight, bias, d_weight, d_bias)
    arguments = [dx, dy, x, *vectors, int64(rows), int32(channels)]
    return on.rows("fused", "batch_norm_relu_backward_data", x, arguments, aligned((dx, dy, x), vectors, channels))


def batch_norm_add_relu_backward_weight(
    on: Launcher, d_weight: Array, d_bias: Array, dz: Array, dy: Array, x: Array, y: Array, mean: Array, rstd: Array
) -> Work:
    rows, channels = rows_of(x)
    names = ("batch_norm_add_relu_backward_weight_partial", "batch_norm_backward_weight_final")
    return on.reduction(
        "fused", names, 2, rows, channels, str(x.dtype), aligned((dz, dy, x, y), (mean,), channels),
        [dz, dy, x, y, mean, int64(rows), int32(channels)],
        lambda blocks, _: [d_weight, d_bias, rstd, ctypes.c_void_p(on.scratch), int32(channels), int32(blocks)],
        final_source="norm",
    )  # fmt: skip


def batch_norm_add_relu_backward_weight_sum(
    on: Launcher, d_weight: Array, d_bias: Array, dz: Array, dy: Array, dy1: Array, x: Array, y: Array, mean: Array,
    rstd: Array,
) -> Work:  # fmt: skip
    rows, channels = rows_of(x)
    names = ("batch_norm_add_relu_backward_weight_sum_partial", "batch_norm_backward_weight_final")
    return on.reduction(
        "fused", names, 2, rows, channels, str(x.dtype), aligned((dz, dy, dy1, x, y), (mean,), channels),
        [dz, dy, dy1, x, y, mean, int64(rows), int32(channels)],
        lambda blocks, _: [d_weight, d_bias, rstd, ctypes.c_void_p(on.scratch), int32(channels), int32(blocks)],
        final_source="norm",
    )  # fmt: skip


def relu_bias_backward(on: Launcher, d_bias: Array, dz: Array, dy: Array, y: Array) -> Work:
    rows, channels = rows_of(y)
    names = ("relu_bias_backward_partial", "channel_sum_final")
    return on.reduction(
        "fused", names, 1, rows, channels, str(y.dtype), access(dz, dy, y, extents=(channels,)),
        [dz, dy, y, int64(rows), int32(channels)],
        lambda blocks, _: [d_bias, ctypes.c_void_p(on.scratch), *map(int32, (channels, blocks, 0))],
        final_source="norm",
    )  # fmt: skip
