"""NumPy kernels: element-wise functions, dropout, and joining along the channels.

Masked copies cost NumPy ten times an arithmetic pass, so elements are selected by multiplying their bits with 0 or 1.
"""

from __future__ import annotations

import numpy as np

from minidnn.kernels.base import Array
from minidnn.kernels.numpy_chunks import chunk_elements, flat, integer_view, spans
from minidnn.random import philox_rounds
from minidnn.scalars import Counter

COUNTERS_PER_CHUNK = 2048


def relu_forward(y: Array, x: Array) -> None:
    np.maximum(x, 0.0, out=y)


def relu_backward(dx: Array, dy: Array, y: Array) -> None:
    out, gradient, ys = integer_view(flat(dx)), integer_view(flat(dy)), flat(y)
    step = min(chunk_elements(y), ys.size)
    mask, keep = np.empty(step, np.bool_), np.empty(step, out.dtype)
    for span in spans(ys.size, step):
        size = span.stop - span.start
        np.greater(ys[span], 0.0, out=mask[:size])
        np.copyto(keep[:size], mask[:size])
        np.multiply(gradient[span], keep[:size], out=out[span])


def tanh_forward(y: Array, x: Array, *, amplitude: float, slope: float) -> None:
    ys, xs = flat(y), flat(x)
    for span in spans(ys.size, chunk_elements(y)):
        target = ys[span]
        np.multiply(xs[span], slope, out=target)
        np.tanh(target, out=target)
        np.multiply(target, amplitude, out=target)


def tanh_backward(dx: Array, dy: Array, y: Array, *, amplitude: float, slope: float) -> None:
    out, gradient, ys = flat(dx), flat(dy), flat(y)
    step = min(chunk_elements(y), ys.size)
    scratch = np.empty(step, y.dtype)
    for span in spans(ys.size, step):
        t = scratch[: span.stop - span.start]
        np.multiply(ys[span], ys[span], out=t)
        np.multiply(t, -slope / amplitude, out=t)
        np.add(t, slope * amplitude, out=t)
        np.multiply(gradient[span], t, out=out[span])


def add_forward(y: Array, x0: Array, x1: Array) -> None:
    np.add(x0, x1, out=y)


def dropout(y: Array, x: Array, counters: Array, *, node: int, threshold: int, scale: float) -> None:
    step_low, step_high = int(counters[Counter.STEP_LOW]), int(counters[Counter.STEP_HIGH])
    seed, rank = int(counters[Counter.SEED]), int(counters[Counter.RANK])
    ys, xs = flat(y), flat(x)
    most = min(COUNTERS_PER_CHUNK, -(-ys.size // 4))
    lanes, scratch = np.empty((4, most), np.uint64), np.empty((2, most), np.uint64)
    mask, keep = np.empty((most, 4), np.bool_), np.empty(4 * most, integer_view(ys).dtype)
    for first in range(0, -(-ys.size // 4), most):
        span = slice(4 * first, min(4 * (first + most), ys.size))
        size = span.stop - span.start
        lanes[0] = np.arange(first, first + most, dtype=np.uint64)
        lanes[1], lanes[2], lanes[3] = node, step_low, step_high
        philox_rounds(lanes, scratch, seed, rank)
        for word in range(4):
            np.greater_equal(lanes[word], threshold, out=mask[:, word])
        np.copyto(keep, flat(mask))
        np.multiply(xs[span], scale, out=ys[span])
        bits = integer_view(ys[span])
        np.multiply(bits, keep[:size], out=bits)


def convert(y: Array, x: Array) -> None:
    np.copyto(y, x, casting="unsafe")


def concat_forward(y: Array, *inputs: Array) -> None:
    offset = 0
    for x in inputs:
        np.copyto(y[..., offset : offset + x.shape[-1]], x)
        offset += x.shape[-1]


def concat_backward(dx: Array, dy: Array, *, offset: int) -> None:
    np.copyto(dx, dy[..., offset : offset + dx.shape[-1]])
