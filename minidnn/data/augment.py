"""Random crops and flips whose every draw belongs to a sample, not to a worker or a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minidnn.errors import UserError

_BITS = np.uint64(21)  # of a word for each offset; its bias, below (2 pad + 1) / 2 ** 21, is not measurable
_MASK = np.uint64(2**21 - 1)


@dataclass(frozen=True, slots=True)
class Augment:
    """What is done to a training image: nothing by default.

    Attributes:
        pad: zero (black) pixels put round the image before a crop of the original size is cut at a random place.
            Padding precedes normalisation, as in the usual CIFAR recipe (He et al., 2015: pad 4).
        flip: mirror left to right with probability one half, after the crop.
    """

    pad: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise UserError(f"pad {self.pad} is negative: give 0 for no crop, 4 for the usual CIFAR recipe.")

    def __bool__(self) -> bool:
        return self.pad > 0 or self.flip


def augmented(
    images: NDArray[np.uint8], indexes: NDArray[np.int64], words: NDArray[np.uint64], augment: Augment
) -> NDArray[np.uint8]:
    """Cropped and flipped copies of ``images[indexes]``, ``(n, H, W, C)``; ``words`` holds one random word for each."""
    _, height, width, channels = images.shape
    span = np.uint64(2 * augment.pad + 1)
    down = (((words & _MASK) * span) >> _BITS).astype(np.int64) - augment.pad
    right = ((((words >> _BITS) & _MASK) * span) >> _BITS).astype(np.int64) - augment.pad
    flips = (words >> np.uint64(63)).astype(bool) & augment.flip
    out = np.zeros((len(indexes), height, width, channels), np.uint8)
    # One slice copy an image: as fast as gathering from padded images, without making them.
    for target, index, y, x, flip in zip(
        out, indexes.tolist(), down.tolist(), right.tolist(), flips.tolist(), strict=True
    ):
        view = target[:, ::-1] if flip else target
        view[max(0, -y) : height - max(0, y), max(0, -x) : width - max(0, x)] = images[
            index, max(0, y) : height - max(0, -y), max(0, x) : width - max(0, -x)
        ]
    return out
