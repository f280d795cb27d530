"""Every kernel once more, from its definition: float64, window by window, sharing no code with a backend."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

Array = Any


def padded(x: Array, padding: tuple[int, int], value: float = 0.0, extra: int = 0) -> Array:
    """x with ``padding`` rows and columns on each side, and ``extra`` more below and to the right."""
    rows, cols = padding
    return np.pad(x, ((0, 0), (rows, rows + extra), (cols, cols + extra), (0, 0)), constant_values=value)


def conv_terms(
    x_shape: Any, y_shape: Any, weight_shape: Any, stride: Any, padding: Any, dilation: Any
) -> Iterator[Any]:
    """Yield (p, q, r, s, h, w) for every pair of an output position and a tap that reads inside x."""
    for p, q, r, s in itertools.product(*map(range, (y_shape[1], y_shape[2], weight_shape[1], weight_shape[2]))):
        h, w = p * stride[0] - padding[0] + r * dilation[0], q * stride[1] - padding[1] + s * dilation[1]
        if 0 <= h < x_shape[1] and 0 <= w < x_shape[2]:
            yield p, q, r, s, h, w


def conv2d(
    x: Array, weight: Array, dy: Array, bias: Array, stride: Any, padding: Any, dilation: Any, groups: int
) -> Any:
    """Return y (with bias), dx and d_weight."""
    y, dx, d_weight = np.zeros(dy.shape) + bias, np.zeros(x.shape), np.zeros(weight.shape)
    inputs, outputs = x.shape[3] // groups, len(weight) // groups
    for p, q, r, s, h, w in conv_terms(x.shape, dy.shape, weight.shape, stride, padding, dilation):
        for group in range(groups):
            c, k = slice(group * inputs, (group + 1) * inputs), slice(group * outputs, (group + 1) * outputs)
            y[:, p, q, k] += x[:, h, w, c] @ weight[k, r, s].T
            dx[:, h, w, c] += dy[:, p, q, k] @ weight[k, r, s]
            d_weight[k, r, s] += dy[:, p, q, k].T @ x[:, h, w, c]
    return y, dx, d_weight


def max_pool(x: Array, y_shape: Any, kernel: Any, stride: Any, padding: Any) -> Any:
    """Return y and index; a window's NaN wins, the first of several."""
    y, index = np.full(y_shape, -np.inf), np.zeros(y_shape, np.uint8)
    for n, p, q, c in np.ndindex(*y_shape):
        for r, s in itertools.product(range(kernel[0]), range(kernel[1])):
            h, w = p * stride[0] - padding[0] + r, q * stride[1] - padding[1] + s
            if 0 <= h < x.shape[1] and 0 <= w < x.shape[2]:
                value, best = x[n, h, w, c], y[n, p, q, c]
                if value > best or (math.isnan(value) and not math.isnan(best)):
                    y[n, p, q, c], index[n, p, q, c] = value, r * kernel[1] + s
    return y, index


def max_pool_gradient(x_shape: Any, dy: Array, index: Array, kernel: Any, stride: Any, padding: Any) -> Array:
    dx = np.zeros(x_shape)
    for n, p, q, c in np.ndindex(*dy.shape):
        r, s = divmod(int(index[n, p, q, c]), kernel[1])
        dx[n, p * stride[0] - padding[0] + r, q * stride[1] - padding[1] + s, c] += dy[n, p, q, c]
    return dx


def window_sums(x: Array, y_shape: Any, kernel: Any, stride: Any, padding: Any) -> Array:
    wide = padded(x, padding, extra=max(kernel))
    y = np.zeros(y_shape)
    for p, q in np.ndindex(*y_shape[1:3]):
        h, w = p * stride[0], q * stride[1]
        y[:, p, q] = wide[:, h : h + kernel[0], w : w + kernel[1]].sum(axis=(1, 2))
    return y


def spread(dy: Array, x_shape: Any, kernel: Any, stride: Any, padding: Any) -> Array:
    """The transpose of ``window_sums``."""
    wide = padded(np.zeros(x_shape), padding, extra=max(kernel))
    for p, q in np.ndindex(*dy.shape[1:3]):
        h, w = p * stride[0], q * stride[1]
        wide[:, h : h + kernel[0], w : w + kernel[1]] += dy[:, p : p + 1, q : q + 1]
    return wide[:, padding[0] : padding[0] + x_shape[1], padding[1] : padding[1] + x_shape[2]]


def lrn_windows(channels: int, size: int) -> Iterator[tuple[int, slice]]:
    """Yield each channel and the channels of its window."""
    for c in range(channels):
        yield c, slice(max(0, c - size // 2), min(channels, c - size // 2 + size))


def lrn(x: Array, size: int, alpha: float, beta: float, k: float) -> Any:
    """Return y and scale."""
    scale = np.empty(x.shape)
    for c, window in lrn_windows(x.shape[-1], size):
        scale[..., c] = k + alpha / size * (x[..., window] ** 2).sum(axis=-1)
    return x * scale**-beta, scale


def lrn_gradient(dy: Array, x: Array, scale: Array, size: int, alpha: float, beta: float) -> Array:
    """From the derivative of y[c] with respect to every x of its window."""
    dx = dy * scale**-beta
    for c, window in lrn_windows(x.shape[-1], size):
        common = dy[..., c] * x[..., c] * scale[..., c] ** (-beta - 1.0)
        dx[..., window] -= 2.0 * alpha * beta / size * x[..., window] * common[..., np.newaxis]
    return dx


def softmax_cross_entropy(logits: Array, labels: Array, smoothing: float) -> Any:
    """Return loss, probabilities and the target distribution q."""
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    p = exponentials / exponentials.sum(axis=1, keepdims=True)
    q = np.full(logits.shape, smoothing / logits.shape[1])
    q[np.arange(len(labels)), labels] += 1.0 - smoothing
    log_p = logits - logits.max(axis=1, keepdims=True) - np.log(exponentials.sum(axis=1, keepdims=True))
    return -(q * log_p).sum() / len(labels), p, q


def philox_words(count: int, node: int, counters: Array) -> Array:
    """The first ``count`` random words of a tensor, with Python integers."""
    words: list[int] = []
    while len(words) < count:
        ctr = [len(words) // 4, node, int(counters[0]), int(counters[1])]
        k0, k1 = int(counters[2]), int(counters[3])
        for _ in range(10):
            first, second = 0xD2511F53 * ctr[0], 0xCD9E8D57 * ctr[2]
            ctr = [(second >> 32) ^ ctr[1] ^ k0, second % 2**32, (first >> 32) ^ ctr[3] ^ k1, first % 2**32]
            k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
        words += ctr
    return np.array(words[:count], np.uint64)
