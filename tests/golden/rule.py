"""Weights, images and projections as functions of a seed and a name: what both sides of a golden test make for themselves.

So nothing large is stored. NumPy alone; no engine, no PyTorch. Arrays are in torchvision's layout (K, C, R, S; N, C, H, W).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BATCH, CLASSES, CHANNELS = 2, 10, 3
PROJECTIONS = 4


class Case(NamedTuple):
    """A net at its original widths on small images."""

    model: str
    image_size: int


CASES = (Case("vgg16", 32), Case("resnet18", 64), Case("alexnet", 95))  # AlexNet flattens 2 x 2: columns are permuted


def generator(seed: int, name: str) -> np.random.Generator:
    """The random stream of a name: Philox, keyed by the seed and a hash of the name."""
    digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.Generator(np.random.Philox(key=[seed, digest]))


def parameter(seed: int, name: str, shape: Sequence[int]) -> NDArray[Any]:
    """The value of a parameter or running statistic, float32 (the counter int64), so that both precisions start alike.

    Weights are N(0, 2 / fan_in), which keeps the size of activations under ReLU; no bias is 0, no scale of batch norm 1.
    """
    rng, shape = generator(seed, name), tuple(shape)
    if name.endswith("num_batches_tracked"):
        return np.full(shape, 3, np.int64)
    values = rng.standard_normal(shape, np.float32)
    if name.endswith("running_var"):
        return 1 + np.float32(0.1) * np.square(values)
    if len(shape) > 1:
        return values * np.float32(math.sqrt(2 / math.prod(shape[1:])))
    return values * np.float32(0.1) + np.float32(name.endswith("weight"))


def batch(seed: int, image_size: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Images (N, H, W, C) and labels (N,)."""
    rng = generator(seed, "batch")
    images = rng.standard_normal((BATCH, image_size, image_size, CHANNELS), np.float32)
    return images, rng.integers(0, CLASSES, BATCH)


def fingerprint(name: str, array: NDArray[Any]) -> list[float]:
    """The norm of a tensor, and its products with four random tensors, in float64.

    A random tensor is the outer product of one vector an axis, of random signs times U(0.5, 1.5), so that any exchange
    along or between axes shows; its product with the tensor is about as large as the tensor's norm.
    """
    rest = np.asarray(array, np.float64)
    norm = float(np.linalg.norm(rest))
    vectors = [_signed(generator(axis, name), (PROJECTIONS, extent)) for axis, extent in enumerate(rest.shape)]
    if not vectors:
        return [norm, *[float(rest)] * PROJECTIONS]
    rest = np.moveaxis(rest @ vectors.pop().T, -1, 0)  # one product with the whole tensor for all four
    products = []
    for number, product in enumerate(rest):
        for vector in reversed(vectors):
            product = product @ vector[number]
        products.append(float(product))
    return [norm, *products]


def _signed(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    return np.copysign(rng.uniform(0.5, 1.5, shape), rng.random(shape) - 0.5)


def difference(ours: Sequence[float], expected: Sequence[float]) -> float:
    """An estimate of |ours - expected| / |expected| of the tensors: the root mean square over the products."""
    squares = [(a - b) ** 2 for a, b in zip(ours[1:], expected[1:], strict=True)]
    error = max(math.sqrt(sum(squares) / len(squares)), abs(ours[0] - expected[0]))
    return error / max(expected[0], 1e-300)
