"""Made-up images of any size: for throughput, for smoke tests, for learning without files."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minidnn.data.dataset import Dataset, Splits
from minidnn.data.draws import Purpose, words
from minidnn.data.pixels import statistics
from minidnn.errors import UserError

DEFAULT = "1024,32,32,3,10"


def make_synthetic(sizes: str, seed: int) -> Splits:
    """``N`` train and ``N // 4`` (at least one) test images from ``"N,H,W,C,classes"``, a function of ``seed`` alone.

    An image is half its class's random template and half noise, so a net that works learns it in a few steps. It says
    nothing about generalisation.
    """
    try:
        count, height, width, channels, classes = (int(part) for part in sizes.split(","))
    except ValueError:
        count = height = width = channels = classes = 0
    if min(count, height, width, channels, classes) < 1:
        raise UserError(
            f"synthetic:{sizes}: give five whole numbers above 0, N,H,W,C,classes, such as synthetic:{DEFAULT}."
        )
    templates = _pixels(seed, 0, Purpose.TEMPLATE, (classes, height, width, channels)) // 2

    def part(number: int, samples: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        labels = (words(seed, number, Purpose.LABEL, samples) % np.uint64(classes)).astype(np.int64)
        images = _pixels(seed, number, Purpose.NOISE, (samples, height, width, channels))
        images //= 2
        for image, label in zip(images, labels.tolist(), strict=True):  # in place: the set may be large
            image += templates[label]
        return images, labels

    train, test = part(0, count), part(1, max(1, count // 4))
    mean, std = statistics(train[0])
    return Splits(
        Dataset("synthetic", *train, classes, mean, std),
        Dataset("synthetic", *test, classes, mean, std),
    )


def _pixels(seed: int, number: int, purpose: Purpose, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Uniform bytes, the same on machines of either byte order."""
    count = int(np.prod(shape, dtype=np.int64))
    raw = words(seed, number, purpose, -(-count // 8)).astype("<u8", copy=False)
    return raw.view(np.uint8)[:count].reshape(shape)
