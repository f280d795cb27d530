"""NumPy kernels: pooling, tap by tap of the window: each tap is a strided view of x, met by a cache-sized box of y.

Windows may hang over any edge; what lies outside counts as -inf for a maximum and 0 for a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from minidnn.kernels.base import Array, Pair
from minidnn.kernels.numpy_chunks import SUM_ROWS, boxes, channel_sums, chunk_elements, integer_view

Box = tuple[slice, ...]


class Tap(NamedTuple):
    """One tap of the windows of a box: the part of the box (``inner``) whose tap is inside x, and where (``outer``)."""

    inner: Box
    outer: Box
    whole: bool


def _inside(span: slice, extent: int, stride: int, offset: int) -> tuple[slice, slice]:
    """Outputs p of ``span``, counted from its start, with 0 <= p * stride + offset < extent, and those positions."""
    first = max(span.start, -(offset // stride))
    last = max(first, min(span.stop, (extent - 1 - offset) // stride + 1))
    start = first * stride + offset
    return slice(first - span.start, last - span.start), slice(start, start + (last - first - 1) * stride + 1, stride)


def _taps(box: Box, shape: tuple[int, ...], kernel: Pair, stride: Pair, padding: Pair) -> Iterator[Tap | None]:
    """The taps of a box of y in row-major order; None for a tap that lies outside x everywhere."""
    n, p, q, c = box
    for r in range(kernel[0]):
        rows, source_rows = _inside(p, shape[1], stride[0], r - padding[0])
        for s in range(kernel[1]):
            cols, source_cols = _inside(q, shape[2], stride[1], s - padding[1])
            if rows.start == rows.stop or cols.start == cols.stop:
                yield None
            else:
                whole = rows.stop - rows.start == p.stop - p.start and cols.stop - cols.start == q.stop - q.start
                yield Tap((slice(None), rows, cols), (n, source_rows, source_cols, c), whole)


def _gather(out: Array, x: Array, tap: Tap, outside: float) -> None:
    """The elements of x that the tap reads, ``outside`` where there are none."""
    if not tap.whole:
        out.fill(outside)
    np.copyto(out[tap.inner], x[tap.outer])


def _extent(array: Array, box: Box) -> tuple[int, ...]:
    return tuple(span.stop - span.start for span in box)


def max_pool_forward(y: Array, index: Array, x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> None:
    _max_pool(y, index, x, kernel, stride, padding)


def max_pool_inference(y: Array, x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> None:
    _max_pool(y, None, x, kernel, stride, padding)


def _max_pool(y: Array, index: Array | None, x: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    most = min(chunk_elements(y), y.size)
    candidates, masks = np.empty(most, y.dtype), np.empty((2, most), np.bool_)
    for box in boxes(y.shape, most):
        best = y[box]
        candidate = candidates[: best.size].reshape(best.shape)
        best.fill(-np.inf)
        if index is None:
            for tap in _taps(box, x.shape, kernel, stride, padding):
                if tap is not None:
                    np.maximum(best[tap.inner], x[tap.outer], out=best[tap.inner])
            continue
        where = index[box]
        greater, number = (mask[: best.size].reshape(best.shape) for mask in masks)
        for careful in (False, True):  # comparisons with NaN are false: only a box that holds one pays for looking
            best.fill(-np.inf)
            where.fill(0)
            for t, tap in enumerate(_taps(box, x.shape, kernel, stride, padding)):
                if tap is None:
                    continue
                _gather(candidate, x, tap, -np.inf)
                if careful:
                    np.less_equal(candidate, best, out=greater)
                    np.logical_not(greater, out=greater)
                    np.equal(best, best, out=number)
                    np.logical_and(greater, number, out=greater)
                else:
                    np.greater(candidate, best, out=greater)
                chosen = greater.view(np.uint8)
                np.multiply(chosen, t, out=chosen)  # taps only grow, so the later of two choices is the larger number
                np.maximum(where, chosen, out=where)
                np.maximum(best, candidate, out=best)
            np.isnan(best, out=greater)
            if not greater.any():
                break


def max_pool_backward(dx: Array, dy: Array, index: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> None:
    most = min(chunk_elements(dy), dy.size)
    mask, share = np.empty(most, np.bool_), np.empty(most, dy.dtype)
    dx.fill(0)
    for box in boxes(dy.shape, most):
        gradient, where = integer_view(dy[box]), index[box]
        chosen, part = (space[: where.size].reshape(where.shape) for space in (mask, share))
        bits = integer_view(part)
        for t, tap in enumerate(_taps(box, dx.shape, kernel, stride, padding)):
            if tap is not None:
                np.equal(where, t, out=chosen)
                np.copyto(bits, chosen)
                np.multiply(bits, gradient, out=bits)
                np.add(dx[tap.outer], part[tap.inner], out=dx[tap.outer])


def _window_sums(total: Array, x: Array, box: Box, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """Write the sums over the windows of a box of y."""
    total.fill(0)
    for tap in _taps(box, x.shape, kernel, stride, padding):
        if tap is not None:
            np.add(total[tap.inner], x[tap.outer], out=total[tap.inner])


def avg_pool_forward(y: Array, x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> None:
    for box in boxes(y.shape, chunk_elements(y)):
        _window_sums(y[box], x, box, kernel, stride, padding)
        np.divide(y[box], kernel[0] * kernel[1], out=y[box])


def avg_pool_backward(dx: Array, dy: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> None:
    most = min(chunk_elements(dy), dy.size)
    share = np.empty(most, dy.dtype)
    dx.fill(0)
    for box in boxes(dy.shape, most):
        part = share[: dy[box].size].reshape(dy[box].shape)
        np.divide(dy[box], kernel[0] * kernel[1], out=part)
        for tap in _taps(box, dx.shape, kernel, stride, padding):
            if tap is not None:
                np.add(dx[tap.outer], part[tap.inner], out=dx[tap.outer])


def global_avg_pool_forward(y: Array, x: Array) -> None:
    n, h, w, c = x.shape
    if h * w <= SUM_ROWS:
        np.add.reduce(x.reshape(n, h * w, c), axis=1, out=y)
    else:
        for image in range(n):
            y[image] = channel_sums(x[image])
    np.divide(y, h * w, out=y)


def global_avg_pool_backward(dx: Array, dy: Array) -> None:
    n, h, w, c = dx.shape
    np.divide(dy[:, np.newaxis], h * w, out=dx.reshape(n, h * w, c))


def subsample_forward(y: Array, x: Array, weight: Array, bias: Array, *, kernel: Pair) -> None:
    for box in boxes(y.shape, chunk_elements(y)):
        _window_sums(y[box], x, box, kernel, kernel, (0, 0))
        np.multiply(y[box], weight[box[3]], out=y[box])
        np.add(y[box], bias[box[3]], out=y[box])


def subsample_backward_data(dx: Array, dy: Array, weight: Array, *, kernel: Pair) -> None:
    dx.fill(0)
    for box in boxes(dy.shape, chunk_elements(dy)):
        for tap in _taps(box, dx.shape, kernel, kernel, (0, 0)):
            assert tap is not None, "a window of y lies outside x"
            np.multiply(dy[box], weight[box[3]], out=dx[tap.outer])


def subsample_backward_weight(d_weight: Array, d_bias: Array, dy: Array, x: Array, *, kernel: Pair) -> None:
    most = min(chunk_elements(dy), dy.size)
    sums = np.empty(most, dy.dtype)
    total = np.zeros(dy.shape[3])
    for box in boxes(dy.shape, most):
        window = sums[: dy[box].size].reshape(dy[box].shape)
        _window_sums(window, x, box, kernel, kernel, (0, 0))
        np.multiply(window, dy[box], out=window)
        total[box[3]] += channel_sums(window)
    d_weight[...] = total
    d_bias[...] = channel_sums(dy)
