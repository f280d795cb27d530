"""NumPy kernels: matrix products of fully connected layers, and sums over everything but the channels."""

from __future__ import annotations

import numpy as np

from minidnn.kernels.base import Array
from minidnn.kernels.numpy_chunks import add_channels, channel_sums, spans

BLOCK_ROWS = 128
BLOCK_ELEMENTS = 16384  # of an accumulated product: 128 KiB in double precision


def add_product(target: Array, a: Array, b: Array) -> None:
    """target += a @ b, block by block: NumPy's product cannot add, and a second target may be large."""
    rows = min(BLOCK_ROWS, target.shape[0])
    cols = min(BLOCK_ELEMENTS // rows, target.shape[1])
    partial = np.empty(rows * cols, target.dtype)
    for i in spans(target.shape[0], rows):
        for j in spans(target.shape[1], cols):
            block = target[i, j]
            product = partial[: block.size].reshape(block.shape)
            np.matmul(a[i], b[:, j], out=product)
            np.add(block, product, out=block)


def linear_forward(y: Array, x: Array, weight: Array, bias: Array | None = None) -> None:
    np.matmul(x, weight.T, out=y)
    if bias is not None:
        add_channels(y, bias)


def linear_backward_data(dx: Array, dy: Array, weight: Array) -> None:
    np.matmul(dy, weight, out=dx)


def linear_backward_weight(d_weight: Array, x: Array, dy: Array, *, accumulate: bool = False) -> None:
    if accumulate:
        add_product(d_weight, dy.T, x)
    else:
        np.matmul(dy.T, x, out=d_weight)


def channel_sum(d_bias: Array, dy: Array, *, accumulate: bool = False) -> None:
    sums = channel_sums(dy)
    d_bias[...] = d_bias + sums if accumulate else sums
