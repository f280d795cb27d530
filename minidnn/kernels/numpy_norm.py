"""NumPy kernels: batch normalisation (Ioffe & Szegedy 2015), local response normalisation (Krizhevsky et al. 2012)."""

from __future__ import annotations

import numpy as np

from minidnn.kernels.base import Array
from minidnn.kernels.numpy_chunks import ChannelSum, Tiling, channel_sums, chunk_elements, rows, spans


def batch_norm_statistics(mean: Array, rstd: Array, x: Array, *, eps: float) -> None:
    tiling = Tiling.of(x)
    count = x.size // tiling.channels
    mean[...] = channel_sums(x) / count
    squares = ChannelSum(tiling, x.dtype)
    centre = tiling.tile(mean, x.dtype)
    for piece, m, t in tiling.pieces((x,), (centre,), (tiling.scratch(x.dtype),)):
        np.subtract(piece, m, out=t)
        np.multiply(t, t, out=t)
        squares.add(t)
    rstd[...] = 1.0 / np.sqrt(squares.result() / count + eps)


def _affine(y: Array, x: Array, centre: Array, scale: Array, shift: Array) -> None:
    """y = (x - centre) * scale + shift. In this order, because scale * centre may dwarf what is left of x."""
    tiling = Tiling.of(x)
    vectors = [tiling.tile(v, x.dtype) for v in (centre, scale, shift)]
    for target, source, c, s, b in tiling.pieces((y, x), vectors):
        np.subtract(source, c, out=target)
        np.multiply(target, s, out=target)
        np.add(target, b, out=target)


def batch_norm_apply(y: Array, x: Array, mean: Array, rstd: Array, weight: Array, bias: Array) -> None:
    _affine(y, x, mean, rstd * weight, bias)


def batch_norm_running(
    running_mean: Array, running_var: Array, num_batches_tracked: Array, mean: Array, rstd: Array,
    *, eps: float, momentum: float | None, count: int,
) -> None:  # fmt: skip
    num_batches_tracked += 1
    share = 1.0 / int(num_batches_tracked[0]) if momentum is None else momentum
    biased = np.maximum(1.0 / np.square(rstd.astype(np.float64)) - eps, 0.0)
    unbiased = biased * (count / max(count - 1, 1))
    running_mean[...] = (1.0 - share) * running_mean.astype(np.float64) + share * mean
    running_var[...] = (1.0 - share) * running_var.astype(np.float64) + share * unbiased


def batch_norm_inference(
    y: Array, x: Array, running_mean: Array, running_var: Array, weight: Array, bias: Array, *, eps: float
) -> None:
    _affine(y, x, running_mean, weight / np.sqrt(running_var.astype(np.float64) + eps), bias)


def batch_norm_backward_weight(d_weight: Array, d_bias: Array, dy: Array, x: Array, mean: Array, rstd: Array) -> None:
    tiling = Tiling.of(x)
    products = ChannelSum(tiling, x.dtype)
    centre = tiling.tile(mean, x.dtype)
    for gradient, source, m, t in tiling.pieces((dy, x), (centre,), (tiling.scratch(x.dtype),)):
        np.subtract(source, m, out=t)
        np.multiply(t, gradient, out=t)
        products.add(t)
    d_weight[...] = products.result() * rstd
    d_bias[...] = channel_sums(dy)


def batch_norm_backward_data(
    dx: Array, dy: Array, x: Array, mean: Array, rstd: Array, weight: Array, d_weight: Array, d_bias: Array
) -> None:
    tiling = Tiling.of(x)
    count = x.size // tiling.channels
    slope = np.asarray(rstd, np.float64)
    vectors = [tiling.tile(v, x.dtype) for v in (mean, slope * d_weight / count, d_bias / count, slope * weight)]
    scratch = (tiling.scratch(x.dtype),)
    for target, gradient, source, centre, along, constant, scale, t in tiling.pieces((dx, dy, x), vectors, scratch):
        np.subtract(source, centre, out=t)
        np.multiply(t, along, out=t)
        np.add(t, constant, out=t)
        np.subtract(gradient, t, out=target)
        np.multiply(target, scale, out=target)


def _neighbour_sum(total: Array, values: Array, size: int, channels: int) -> None:
    """total[:, c] = sum of values[:, c : c + size]; ``values`` has size - 1 columns more than ``total``."""
    np.copyto(total, values[:, :channels])
    for offset in range(1, size):
        np.add(total, values[:, offset : offset + channels], out=total)


def _raise(values: Array, exponent: float) -> None:
    """values **= exponent, in place; the exponent -0.75 of every published network without a call of pow."""
    if exponent == -0.75:
        np.sqrt(values, out=values)
        root = np.sqrt(values)
        np.multiply(values, root, out=values)
        np.divide(1.0, values, out=values)
    else:
        np.power(values, exponent, out=values)


def lrn_forward(y: Array, scale: Array, x: Array, *, size: int, alpha: float, beta: float, k: float) -> None:
    channels, before = x.shape[-1], size // 2
    xs, ys, scales = rows(x), rows(y), rows(scale)
    step = max(1, chunk_elements(x) // (channels + size - 1) // 2)
    padded = np.zeros((min(step, len(xs)), channels + size - 1), x.dtype)
    for span in spans(len(xs), step):
        source, target, total = xs[span], ys[span], scales[span]
        squares = padded[: len(source)]
        np.multiply(source, source, out=squares[:, before : before + channels])
        _neighbour_sum(total, squares, size, channels)
        np.multiply(total, alpha / size, out=total)
        np.add(total, k, out=total)
        power = total.copy()
        _raise(power, -beta)
        np.multiply(source, power, out=target)


def lrn_backward(
    dx: Array, dy: Array, x: Array, scale: Array, *, size: int, alpha: float, beta: float, k: float
) -> None:
    channels, before = x.shape[-1], size - 1 - size // 2  # the windows that hold a channel lie the other way round
    xs, dys, dxs, scales = rows(x), rows(dy), rows(dx), rows(scale)
    step = max(1, chunk_elements(x) // (channels + size - 1) // 2)
    padded = np.zeros((min(step, len(xs)), channels + size - 1), x.dtype)
    for span in spans(len(xs), step):
        source, gradient, target, total = xs[span], dys[span], dxs[span], scales[span]
        power = total.copy()
        _raise(power, -beta)
        np.multiply(gradient, power, out=target)
        products = padded[: len(source)]
        centre = products[:, before : before + channels]
        np.multiply(target, source, out=centre)
        np.divide(centre, total, out=centre)
        _neighbour_sum(power, products, size, channels)
        np.multiply(power, source, out=power)
        np.multiply(power, 2.0 * alpha * beta / size, out=power)
        np.subtract(target, power, out=target)
