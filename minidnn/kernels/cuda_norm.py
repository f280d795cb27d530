"""CUDA kernels: batch normalisation, sums over everything but the channels, local response normalisation, the loss."""

from __future__ import annotations

import ctypes
from typing import Any

from minidnn.kernels.base import Array
from minidnn.kernels.cuda_blocks import THREADS, flat_blocks
from minidnn.kernels.cuda_launch import (
    C_TYPES,
    SINGLE,
    Launcher,
    Sequential,
    Work,
    access,
    aligned,
    float32,
    float64,
    int32,
    int64,
    rows_of,
    structure,
)
from minidnn.scalars import Scalar

LOSS_THREADS, LOSS_BLOCKS = 128, 1024
RUNNING_THREADS = 1024


def batch_norm_statistics(on: Launcher, mean: Array, rstd: Array, x: Array, *, eps: float) -> Work:
    rows, channels = rows_of(x)
    names = ("batch_norm_statistics_partial", "batch_norm_statistics_final")
    return on.reduction(
        "norm", names, 2, rows, channels, str(x.dtype), access(x, extents=(channels,)), [x, int64(rows), int32(channels)],
        lambda blocks, lanes: [
            mean, rstd, ctypes.c_void_p(on.scratch), int64(rows), int32(channels), cut(rows, blocks, lanes), float64(eps)
        ],
    )  # fmt: skip


def batch_norm_statistics_running(
    on: Launcher, mean: Array, rstd: Array, running_mean: Array, running_var: Array, num_batches_tracked: Array,
    x: Array, old_mean: Array, old_var: Array, old_tracked: Array, *, eps: float, momentum: float, count: int,
) -> Work:  # fmt: skip
    rows, channels = rows_of(x)
    names = ("batch_norm_statistics_partial", "batch_norm_statistics_running_final")
    averages = [running_mean, running_var, num_batches_tracked, old_mean, old_var, old_tracked]
    constants = [float64(eps), float64(momentum), float64(count / max(count - 1, 1))]
    return on.reduction(
        "norm", names, 2, rows, channels, str(x.dtype), access(x, extents=(channels,)), [x, int64(rows), int32(channels)],
        lambda blocks, lanes: [
            mean, rstd, *averages, ctypes.c_void_p(on.scratch), int64(rows), int32(channels), cut(rows, blocks, lanes),
            *constants,
        ],
    )  # fmt: skip


def cut(rows: int, blocks: int, lanes: int) -> Any:
    """``Cut`` of common.cuh: how many rows each of ``blocks`` blocks visits, ``lanes`` at a time."""
    groups, rest = divmod(rows, lanes)
    return structure(blocks, lanes, groups // blocks * lanes, groups % blocks, rest)


def batch_norm_apply(on: Launcher, y: Array, x: Array, mean: Array, rstd: Array, weight: Array, bias: Array) -> Work:
    rows, channels = rows_of(x)
    arguments = [y, x, mean, rstd, weight, bias, int64(rows), int32(channels)]
    return on.rows("norm", "batch_norm_apply", x, arguments, aligned((y, x), (mean, rstd, weight, bias), channels))


def batch_norm_running(
    on: Launcher, running_mean: Array, running_var: Array, num_batches_tracked: Array, mean: Array, rstd: Array,
    *, eps: float, momentum: float | None, count: int,
) -> Work:  # fmt: skip
    share = -1.0 if momentum is None else momentum
    arguments = [running_mean, running_var, num_batches_tracked, mean, rstd, int32(int(mean.size))]
    arguments += [float64(eps), float64(share), float64(count / max(count - 1, 1))]
    return on.launch("norm", "batch_norm_running", "float32", SINGLE, (1,), (RUNNING_THREADS,), arguments)


def batch_norm_inference(
    on: Launcher, y: Array, x: Array, running_mean: Array, running_var: Array, weight: Array, bias: Array, *, eps: float
) -> Work:
    rows, channels = rows_of(x)
    arguments = [y, x, running_mean, running_var, weight, bias, int64(rows), int32(channels), float32(eps)]
    by = aligned((y, x), (running_mean, running_var, weight, bias), channels)
    return on.rows("norm", "batch_norm_inference", x, arguments, by)


def batch_norm_backward_weight(
    on: Launcher, d_weight: Array, d_bias: Array, dy: Array, x: Array, mean: Array, rstd: Array
) -> Work:
    rows, channels = rows_of(x)
    names = ("batch_norm_backward_weight_partial", "batch_norm_backward_weight_final")
    return on.reduction(
        "norm", names, 2, rows, channels, str(x.dtype), aligned((dy, x), (mean,), channels),
        [dy, x, mean, int64(rows), int32(channels)],
        lambda blocks, _: [d_weight, d_bias, rstd, ctypes.c_void_p(on.scratch), int32(channels), int32(blocks)],
    )  # fmt: skip


def batch_norm_backward_data(
    on: Launcher,
    dx: Array,
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Array,
    d_weight: Array,
    d_bias: Array,
) -> Work:
    rows, channels = rows_of(x)
    arguments = [dx, dy, x, mean, rstd, weight, d_weight, d_bias, int64(rows), int32(channels)]
    by = aligned((dx, dy, x), (mean, rstd, weight, d_weight, d_bias), channels)
    return on.rows("norm", "batch_norm_backward_data", x, arguments, by)


def channel_sum(on: Launcher, d_bias: Array, dy: Array, *, accumulate: bool = False) -> Work:
    rows, channels = rows_of(dy)
    names = ("channel_sum_partial", "channel_sum_final")
    return on.reduction(
        "norm", names, 1, rows, channels, str(dy.dtype), access(dy, extents=(channels,)), [dy, int64(rows), int32(channels)],
        lambda blocks, _: [d_bias, ctypes.c_void_p(on.scratch), *map(int32, (channels, blocks, int(accumulate)))],
    )  # fmt: skip


def lrn_forward(
    on: Launcher, y: Array, scale: Array, x: Array, *, size: int, alpha: float, beta: float, k: float
) -> Work:
    values = (int32(int(x.shape[-1])), int32(size), float32(alpha), float32(beta), float32(k))
    return on.flat("norm", "lrn_forward", y, (y, scale, x), values, by=SINGLE)


def lrn_backward(
    on: Launcher, dx: Array, dy: Array, x: Array, scale: Array, *, size: int, alpha: float, beta: float, k: float
) -> Work:
    values = (int32(int(x.shape[-1])), int32(size), float32(alpha), float32(beta))
    return on.flat("norm", "lrn_backward", dx, (dx, dy, x, scale), values, by=SINGLE)


def softmax_cross_entropy_forward(
    on: Launcher, loss: Array, probabilities: Array, logits: Array, labels: Array, *, smoothing: float
) -> Work:
    samples, classes = logits.shape
    blocks, dtype, scratch = min(samples, LOSS_BLOCKS), str(logits.dtype), ctypes.c_void_p(on.scratch)
    arguments = [scratch, probabilities, logits, labels, int32(samples), int32(classes), float64(smoothing)]
    first = _loss_kernel(on, "softmax_forward_partial", dtype, labels, blocks, LOSS_THREADS, arguments)
    arguments = [loss, scratch, int32(blocks), int32(samples)]
    return Sequential(first, _loss_kernel(on, "softmax_forward_final", dtype, labels, 1, LOSS_THREADS, arguments))


def softmax_cross_entropy_backward(
    on: Launcher, d_logits: Array, probabilities: Array, labels: Array, scalars: Array, *, smoothing: float
) -> Work:
    size, classes = int(probabilities.size), int(probabilities.shape[1])
    arguments = [d_logits, probabilities, labels, scalars, int32(Scalar.LOSS_WEIGHT)]
    arguments += [int64(size), int32(classes), float64(smoothing)]
    blocks = flat_blocks(size, 1)
    return _loss_kernel(on, "softmax_backward", str(d_logits.dtype), labels, blocks, THREADS, arguments)


def _loss_kernel(
    on: Launcher, name: str, dtype: str, labels: Array, blocks: int, threads: int, arguments: list[Any]
) -> Work:
    """Bind a kernel of the source that knows the type of the labels."""
    options = (f"-DLABEL={C_TYPES[str(labels.dtype)]}",)
    return on.launch("loss", name, dtype, SINGLE, (blocks,), (threads,), arguments, options)
