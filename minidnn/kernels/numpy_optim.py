"""NumPy kernels: parameter updates on flat slices. Element-wise, so that any cut of the slice gives the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from minidnn.kernels.base import Array
from minidnn.kernels.numpy_chunks import chunk_elements, flat, spans
from minidnn.scalars import Scalar


def _decayed(
    weight: Array, gradient: Array, scalars: Array, weight_decay: float
) -> Iterator[tuple[slice, Array, Array]]:
    """Yield chunk by chunk (span, g, free scratch): g = gradient * scalars[GRADIENT_SCALE] + weight_decay * weight."""
    scale = float(scalars[Scalar.GRADIENT_SCALE])
    gradients, weights = flat(gradient), flat(weight)
    step = min(chunk_elements(weight), max(1, weights.size))
    space, other = np.empty(step, weight.dtype), np.empty(step, weight.dtype)
    for span in spans(weights.size, step):
        g, t = space[: span.stop - span.start], other[: span.stop - span.start]
        np.multiply(gradients[span], scale, out=g)
        np.multiply(weights[span], weight_decay, out=t)
        np.add(g, t, out=g)
        yield span, g, t


def sgd_update(weight: Array, gradient: Array, scalars: Array, *, weight_decay: float) -> None:
    rate, weights = float(scalars[Scalar.LR]), flat(weight)
    for span, g, _ in _decayed(weight, gradient, scalars, weight_decay):
        np.multiply(g, rate, out=g)
        np.subtract(weights[span], g, out=weights[span])


def sgd_momentum_update(
    weight: Array, velocity: Array, gradient: Array, scalars: Array, *, momentum: float, nesterov: bool,
    weight_decay: float,
) -> None:  # fmt: skip
    rate, weights, velocities = float(scalars[Scalar.LR]), flat(weight), flat(velocity)
    for span, g, t in _decayed(weight, gradient, scalars, weight_decay):
        v = velocities[span]
        np.multiply(v, momentum, out=v)
        np.add(v, g, out=v)
        if nesterov:
            np.multiply(v, momentum, out=t)
            np.add(t, g, out=t)
            np.multiply(t, rate, out=t)
        else:
            np.multiply(v, rate, out=t)
        np.subtract(weights[span], t, out=weights[span])


def adam_update(
    weight: Array, first: Array, second: Array, gradient: Array, scalars: Array, *, beta1: float, beta2: float,
    eps: float, weight_decay: float,
) -> None:  # fmt: skip
    rate = float(scalars[Scalar.LR]) / float(scalars[Scalar.BIAS1])
    root = float(scalars[Scalar.BIAS2]) ** 0.5
    weights, firsts, seconds = flat(weight), flat(first), flat(second)
    for span, g, t in _decayed(weight, gradient, scalars, weight_decay):
        m, v = firsts[span], seconds[span]
        np.multiply(m, beta1, out=m)
        np.multiply(g, 1.0 - beta1, out=t)
        np.add(m, t, out=m)
        np.multiply(g, g, out=g)
        np.multiply(g, 1.0 - beta2, out=g)
        np.multiply(v, beta2, out=v)
        np.add(v, g, out=v)
        np.sqrt(v, out=t)
        np.multiply(t, 1.0 / root, out=t)
        np.add(t, eps, out=t)
        np.divide(m, t, out=t)
        np.multiply(t, rate, out=t)
        np.subtract(weights[span], t, out=weights[span])
