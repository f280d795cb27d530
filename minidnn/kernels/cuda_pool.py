"""CUDA kernels: pooling. Every thread gathers one pack of channels of the result."""

from __future__ import annotations

import ctypes
from typing import Any

from minidnn.kernels.base import Array, Pair
from minidnn.kernels.cuda_blocks import THREADS, block_shape
from minidnn.kernels.cuda_launch import Launcher, Work, access, int32, int64, structure

WARP = 32
TILE = 2  # rows and columns of dx that a thread makes, at most, where windows overlap; as in pool.cu


def _window(x: Array, y: Array, kernel: Pair, stride: Pair, padding: Pair) -> Any:
    return structure(*x.shape[1:3], *y.shape[1:3], x.shape[3], *kernel, *stride, *padding)


def _gather(
    on: Launcher, name: str, out: Array, columns: int, operands: list[Any], packed: tuple[Array, ...], *rest: Any,
    options: tuple[str, ...] = (), rows: int = 0,
) -> Work:  # fmt: skip
    """Bind ``name(*operands, *rest)`` with one thread for each pack of ``out``; ``packed``: what moves in packs.

    A block works on ``columns`` neighbouring positions, one of ``rows`` (0: those of ``out``), or on 256 packs of them.
    """
    by = access(*packed, extents=(int(out.shape[-1]),))
    packs = columns * int(out.shape[-1]) // by.width
    rows = rows or int(out.size) // (packs * by.width)
    threads = min(THREADS, -(-packs // WARP) * WARP)
    grid = (rows, -(-packs // threads))
    return on.launch("pool", name, str(out.dtype), by, grid, (threads,), [*operands, *rest], options)


def _fixed(kernel: Pair, stride: Pair, padding: Pair) -> tuple[str, ...]:
    """Compile for this window."""
    names = ("KERNEL_H", "KERNEL_W", "STRIDE_H", "STRIDE_W", "PAD_H", "PAD_W")
    return tuple(f"-D{name}={value}" for name, value in zip(names, (*kernel, *stride, *padding), strict=True))


def max_pool_forward(
    on: Launcher, y: Array, index: Array, x: Array, *, kernel: Pair, stride: Pair, padding: Pair
) -> Work:
    window, operands = _window(x, y, kernel, stride, padding), (y, index, x)
    options = _fixed(kernel, stride, padding)
    return _gather(on, "max_pool_forward", y, y.shape[2], [*operands], operands, window, options=options)


def max_pool_inference(on: Launcher, y: Array, x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> Work:
    return _gather(on, "max_pool_inference", y, y.shape[2], [y, x], (y, x), _window(x, y, kernel, stride, padding))


def max_pool_backward(
    on: Launcher, dx: Array, dy: Array, index: Array, *, kernel: Pair, stride: Pair, padding: Pair
) -> Work:
    window, operands, options = (
        _window(dx, dy, kernel, stride, padding),
        (dx, dy, index),
        _fixed(kernel, stride, padding),
    )
    covered = tuple(extent * step for extent, step in zip(dy.shape[1:3], stride, strict=True))
    if kernel == stride and padding == (0, 0) and covered == tuple(dx.shape[1:3]):
        return _gather(on, "max_pool_backward_tiles", dy, dy.shape[2], [*operands], operands, window, options=options)
    down, across = (-(-extent // min(step, TILE)) for extent, step in zip(dx.shape[1:3], stride, strict=True))
    rows = dx.shape[0] * down
    return _gather(on, "max_pool_backward", dx, across, [*operands], operands, window, options=options, rows=rows)


def avg_pool_forward(on: Launcher, y: Array, x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> Work:
    return _gather(on, "avg_pool_forward", y, y.shape[2], [y, x], (y, x), _window(x, y, kernel, stride, padding))


def avg_pool_backward(on: Launcher, dx: Array, dy: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> Work:
    return _gather(
        on, "avg_pool_backward", dx, dx.shape[2], [dx, dy], (dx, dy), _window(dx, dy, kernel, stride, padding)
    )


def global_avg_pool_forward(on: Launcher, y: Array, x: Array) -> Work:
    images, height, width, channels = x.shape
    by = access(y, x, extents=(channels,))
    across, lanes = block_shape(channels, by.width)
    grid = (-(-channels // (across * by.width)), images)
    return on.launch(
        "pool", "global_avg_pool_forward", str(x.dtype), by, grid, (across, lanes),
        [y, x, int32(height * width), int32(channels)],
    )  # fmt: skip


def global_avg_pool_backward(on: Launcher, dx: Array, dy: Array) -> Work:
    positions, channels = int32(dx.shape[1] * dx.shape[2]), int32(dx.shape[3])
    return _gather(on, "global_avg_pool_backward", dx, 1, [dx, dy], (dx, dy), positions, channels)


def subsample_forward(on: Launcher, y: Array, x: Array, weight: Array, bias: Array, *, kernel: Pair) -> Work:
    operands = [y, x, weight, bias]
    return _gather(
        on, "subsample_forward", y, y.shape[2], operands, (y, x, weight, bias), _window(x, y, kernel, kernel, (0, 0))
    )


def subsample_backward_data(on: Launcher, dx: Array, dy: Array, weight: Array, *, kernel: Pair) -> Work:
    window = _window(dx, dy, kernel, kernel, (0, 0))
    return _gather(on, "subsample_backward_data", dx, dx.shape[2], [dx, dy, weight], (dx, dy, weight), window)


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
