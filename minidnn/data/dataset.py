"""One split of an image set, held on the host with random access."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minidnn.errors import UserError


def check_labels(labels: NDArray[np.int64], classes: int, where: object) -> None:
    """Raise ``UserError`` naming the first label outside ``0 <= label < classes``, its index and ``where`` it was read.

    Checked on the host because on a GPU such a label is an out-of-bounds read, reported far from its cause if at all.
    """
    bad = (labels < 0) | (labels >= classes)
    if bad.any():
        index = int(np.argmax(bad))
        raise UserError(
            f"{where}: label {labels[index]} of image {index} is out of range for {classes} classes: "
            f"labels count from 0 to {classes - 1}, so correct or renumber them."
        )


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """One split: pixels as stored, labels, and what is needed to normalise. It does not augment, shuffle or decode.

    Attributes:
        name: ``"digits"``, ``"mnist"``, ``"fashion-mnist"``, ``"cifar10"`` ...
        images: ``(N, H, W, C)`` uint8; may be memory-mapped or a broadcast view.
        labels: ``(N,)`` int64, ``0 <= label < classes``.
        classes: how many classes the set has, whether or not each occurs.
        mean, std: one number a channel, of pixels scaled to [0, 1].

    Raises:
        UserError: shapes, types, counts or labels contradict the above.
    """

    name: str
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.ndim != 4 or images.dtype != np.uint8:
            raise UserError(
                f"{self.name}: images are {images.dtype} of shape {images.shape}: "
                "pass uint8 of shape (N, H, W, C), channels last."
            )
        if labels.ndim != 1 or labels.dtype != np.int64:
            raise UserError(
                f"{self.name}: labels are {labels.dtype} of shape {labels.shape}: pass int64 of shape (N,)."
            )
        if len(images) != len(labels):
            raise UserError(f"{self.name}: {len(images)} images but {len(labels)} labels: each image needs one label.")
        if images.size == 0:
            raise UserError(f"{self.name}: images of shape {images.shape} hold no pixel: give at least one image.")
        if not len(self.mean) == len(self.std) == images.shape[3] or min(self.std) <= 0:
            raise UserError(
                f"{self.name}: mean {self.mean} and std {self.std} for {images.shape[3]} channels: "
                "give one number a channel, std above 0."
            )
        check_labels(labels, self.classes, self.name)

    def __len__(self) -> int:
        return len(self.images)


class Splits(NamedTuple):
    """The two parts of a set, with the same classes, shape, mean and std."""

    train: Dataset
    test: Dataset
