"""CUDA kernels: element-wise functions, dropout, and joining along channels. See ``cuda_launch`` for the form."""

from __future__ import annotations

import ctypes

from minidnn.kernels.base import Array
from minidnn.kernels.cuda_blocks import THREADS
from minidnn.kernels.cuda_launch import C_TYPES, Launcher, Sequential, Work, access, float32, int32, int64, rows_of


def relu_forward(on: Launcher, y: Array, x: Array) -> Work:
    return on.flat("pointwise", "relu_forward", y, (y, x))


def relu_backward(on: Launcher, dx: Array, dy: Array, y: Array) -> Work:
    return on.flat("pointwise", "relu_backward", dx, (dx, dy, y))


def tanh_forward(on: Launcher, y: Array, x: Array, *, amplitude: float, slope: float) -> Work:
    return on.flat("pointwise", "tanh_forward", y, (y, x), (float32(amplitude), float32(slope)))


def tanh_backward(on: Launcher, dx: Array, dy: Array, y: Array, *, amplitude: float, slope: float) -> Work:
    return on.flat("pointwise", "tanh_backward", dx, (dx, dy, y), (float32(amplitude), float32(slope)))


def add_forward(on: Launcher, y: Array, x0: Array, x1: Array) -> Work:
    return on.flat("pointwise", "add_forward", y, (y, x0, x1))


def dropout(on: Launcher, y: Array, x: Array, counters: Array, *, node: int, threshold: int, scale: float) -> Work:
    values = (ctypes.c_uint(node), ctypes.c_ulonglong(threshold), float32(scale))
    blocks = -(-int(y.size) // (4 * THREADS))  # a thread makes four words
    arguments = [y, x, counters, int64(int(y.size)), *values]
    return on.launch("pointwise", "dropout", str(y.dtype), access(y, x), (blocks,), (THREADS,), arguments)


def convert(on: Launcher, y: Array, x: Array) -> Work:
    options = (f"-DFROM={C_TYPES[str(x.dtype)]}", f"-DTO={C_TYPES[str(y.dtype)]}")
    wider = x if x.dtype.itemsize >= y.dtype.itemsize else y
    return on.flat("convert", "convert", y, (y, x), dtype="float32", by=access(wider, y, x), options=options)


def bias_add(on: Launcher, y: Array, bias: Array) -> Work:
    """y += bias, per channel: not a kernel of the protocol, but the second half of two of them."""
    rows, channels = rows_of(y)
    return on.rows(
        "pointwise", "bias_add", y, [y, bias, int64(rows), int32(channels)], access(y, bias, extents=(channels,))
    )


def _copy_channels(on: Launcher, target: Array, source: Array, channels: int, at: int, start: int) -> Work:
    """target[..., at : at + channels] = source[..., start : start + channels]."""
    rows = rows_of(target)[0]
    strides = int(target.shape[-1]), int(source.shape[-1])
    narrower = target if target.shape[-1] == channels else source
    addresses = [
        ctypes.c_void_p(a.data.ptr + offset * a.dtype.itemsize) for a, offset in ((target, at), (source, start))
    ]
    by = access(target, source, extents=(channels, *strides, at, start))
    arguments = [*addresses, int64(rows), int32(channels), *map(int64, strides)]
    return on.rows("pointwise", "copy_channels", narrower, arguments, by)


def concat_forward(on: Launcher, y: Array, *inputs: Array) -> Work:
    works, offset = [], 0
    for x in inputs:
        works.append(_copy_channels(on, y, x, int(x.shape[-1]), offset, 0))
        offset += int(x.shape[-1])
    return Sequential(*works)


def concat_backward(on: Launcher, dx: Array, dy: Array, *, offset: int) -> Work:
    return _copy_channels(on, dx, dy, int(dx.shape[-1]), 0, offset)
