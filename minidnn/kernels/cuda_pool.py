"""CUDA kernels: pooling. Every thread gathers one pack of channels of the result."""

from __future__ import annotations

import ctypes
from typing import Any

from minidnn.kernels.base import Array, Pair
from minidnn.kernels.cuda_launch import THREADS, Launcher, Work, access, block_shape, int32, int64, structure


def _window(x: Array, y: Array, kernel: Pair, stride: Pair, padding: Pair) -> Any:
    return structure(*x.shape[1:3], *y.shape[1:3], x.shape[3], *kernel, *stride, *padding)


def _gather(on: Launcher, name: str, out: Array, operands: list[Any], packed: tuple[Array, ...], *rest: Any) -> Work:
    """Bind ``name(*operands, images, *rest)`` with one thread for each pack of ``out``; ``packed``: what moves in packs."""
    by = access(*packed, extents=(int(out.shape[-1]),))
    blocks = -(-(int(out.size) // by.width) // THREADS)
    arguments = [*operands, int64(int(out.shape[0])), *rest]
    return on.launch("pool", name, str(out.dtype), by, (blocks,), (THREADS,), arguments)


def max_pool_forward(
    on: Launcher, y: Array, index: Array, x: Array, *, kernel: Pair, stride: Pair, padding: Pair
) -> Work:
    return _gather(on, "max_pool_forward", y, [y, index, x], (y, index, x), _window(x, y, kernel, stride, padding))


def max_pool_inference(on: Launcher, y: Array, x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> Work:
    return _gather(on, "max_pool_inference", y, [y, x], (y, x), _window(x, y, kernel, stride, padding))


def max_pool_backward(
    on: Launcher, dx: Array, dy: Array, index: Array, *, kernel: Pair, stride: Pair, padding: Pair
) -> Work:
    return _gather(
        on, "max_pool_backward", dx, [dx, dy, index], (dx, dy, index), _window(dx, dy, kernel, stride, padding)
    )


def avg_pool_forward(on: Launcher, y: Array, x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> Work:
    return _gather(on, "avg_pool_forward", y, [y, x], (y, x), _window(x, y, kernel, stride, padding))


def avg_pool_backward(on: Launcher, dx: Array, dy: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> Work:
    return _gather(on, "avg_pool_backward", dx, [dx, dy], (dx, dy), _window(dx, dy, kernel, stride, padding))


def global_avg_pool_forward(on: Launcher, y: Array, x: Array) -> Work:
    images, height, columns, channels = x.shape
    by = access(y, x, extents=(channels,))
    across, lanes = block_shape(channels, by.width)
    grid = (-(-channels // (across * by.width)), images)
    return on.launch(
        "pool", "global_avg_pool_forward", str(x.dtype), by, grid, (across, lanes),
        [y, x, int32(height * columns), int32(channels)],
    )  # fmt: skip


def global_avg_pool_backward(on: Launcher, dx: Array, dy: Array) -> Work:
    positions, channels = int32(dx.shape[1] * dx.shape[2]), int32(dx.shape[3])
    return _gather(on, "global_avg_pool_backward", dx, [dx, dy], (dx, dy), positions, channels)


def subsample_forward(on: Launcher, y: Array, x: Array, weight: Array, bias: Array, *, kernel: Pair) -> Work:
    operands = [y, x, weight, bias]
    return _gather(on, "subsample_forward", y, operands, (y, x, weight, bias), _window(x, y, kernel, kernel, (0, 0)))


def subsample_backward_data(on: Launcher, dx: Array, dy: Array, weight: Array, *, kernel: Pair) -> Work:
    window = _window(dx, dy, kernel, kernel, (0, 0))
    return _gather(on, "subsample_backward_data", dx, [dx, dy, weight], (dx, dy, weight), window)


def subsample_backward_weight(
    on: Launcher, d_weight: Array, d_bias: Array, dy: Array, x: Array, *, kernel: Pair
) -> Work:
    images, height, columns, channels = dy.shape
    names = ("subsample_backward_weight_partial", "subsample_backward_weight_final")
    window = _window(x, dy, kernel, kernel, (0, 0))
    return on.reduction(
        "pool", names, 2, images * height * columns, channels, str(dy.dtype), access(dy, x, extents=(channels,)),
        [dy, x, int64(images), window],
        lambda blocks, _: [d_weight, d_bias, ctypes.c_void_p(on.scratch), int32(channels), int32(blocks)],
    )  # fmt: skip
