"""NumPy kernels: parameter updates on flat slices. Element-wise, so that any cut of the slice gives the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from minidnn.kernels.base import Array
from minidnn.kernels.numpy_chunks import CHUNK_BYTES, chunk_elements, flat, spans
from minidnn.scalars import Scalar, Scaling

SMALLEST_SCALE, LARGEST_SCALE = 1.0, 2.0**24
NORM_EPS = 1e-6  # as PyTorch's


def _decayed(
    weight: Array, gradient: Array, scalars: Array, weight_decay: float
) -> Iterator[tuple[slice, Array, Array]]:
    """Yield chunk by chunk (span, g, free scratch): g = gradient * scalars[GRADIENT_SCALE] + weight_decay * weight.

    Nothing where scalars[FINITE] is 0: no update is made then.
    """
    if scalars[Scalar.FINITE] == 0:
        return
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


def scale_loss(scalars: Array, scaling: Array) -> None:
    scalars[Scalar.LOSS_WEIGHT] *= scaling[Scaling.SCALE]
    scalars[Scalar.GRADIENT_SCALE] /= scaling[Scaling.SCALE]


def check_finite(scaling: Array, *gradients: Array) -> None:
    for gradient in gradients:
        values = flat(gradient)
        for span in spans(values.size, chunk_elements(values)):
            if not np.isfinite(values[span]).all():
                scaling[Scaling.FINITE] = 0
                return


def adapt_scale(scaling: Array, scalars: Array, *, interval: int) -> None:
    finite = scaling[Scaling.FINITE] != 0
    scale, good = float(scaling[Scaling.SCALE]), int(scaling[Scaling.GOOD]) + 1
    if not finite:
        scale, good = max(scale / 2, SMALLEST_SCALE), 0
        scaling[Scaling.SKIPPED] += 1
    elif good == interval:
        scale, good = min(scale * 2, LARGEST_SCALE), 0
    scaling[Scaling.SCALE], scaling[Scaling.GOOD], scaling[Scaling.FINITE] = scale, good, 1
    scalars[Scalar.FINITE] = float(finite)


def clip_scale(scalars: Array, *gradients: Array, max_norm: float) -> None:
    total, space = 0.0, np.empty(CHUNK_BYTES // 8)
    for gradient in gradients:
        values = flat(gradient)
        for span in spans(values.size, space.size):
            wide = space[: span.stop - span.start]
            np.copyto(wide, values[span])
            np.multiply(wide, wide, out=wide)
            total += float(wide.sum())
    scale = float(scalars[Scalar.GRADIENT_SCALE])
    factor = max_norm / (total**0.5 * scale + NORM_EPS)
    if not factor >= 1:  # NaN is not
        scalars[Scalar.GRADIENT_SCALE] = scale * factor


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


def update_all(*operands: Array, kernel: str, count: int, narrow: bool, settings: Mapping[str, Any]) -> None:
    update: Any = {"sgd_update": sgd_update, "sgd_momentum_update": sgd_momentum_update, "adam_update": adam_update}[
        kernel
    ]
    *tensors, scalars = operands
    for slice_number in range(count):
        *state, gradient = tensors[slice_number::count]
        rounded = state.pop() if narrow else None
        update(*state, gradient, scalars, **settings)
        if rounded is not None:
            np.copyto(rounded, state[0], casting="unsafe")
