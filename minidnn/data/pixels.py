"""What is done to the pixels of a whole set when it is loaded: statistics, resizing, grey to colour."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from minidnn.data.dataset import Dataset
from minidnn.errors import UserError

_BLOCK = 1024  # images summed at a time, so that the squares never take more than a few MiB


def statistics(images: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and (population) standard deviation of each channel of ``(N, H, W, C)``, pixels scaled to [0, 1].

    Sums are of integers, hence exact and the same on every machine. A channel of one single value gets std 1.
    """
    channels = images.shape[3]
    total, squares = [0] * channels, [0] * channels
    for first in range(0, len(images), _BLOCK):
        for channel in range(channels):
            plane = images[first : first + _BLOCK, :, :, channel]
            total[channel] += int(plane.sum(dtype=np.int64))
            squares[channel] += int(np.square(plane, dtype=np.uint16).sum(dtype=np.int64))  # 255 ** 2 < 2 ** 16
    count = images.size // channels
    mean = tuple(t / count / 255 for t in total)
    variance = ((s * count - t * t) / count**2 / 255**2 for s, t in zip(squares, total, strict=True))
    return mean, tuple(v**0.5 if v > 0 else 1.0 for v in variance)


def resized(dataset: Dataset, size: int) -> Dataset:
    """The set with every image brought to ``size`` x ``size`` by Pillow's bilinear filter, or itself if it is.

    Pillow widens the filter when it makes an image smaller (antialiasing). Mean and std stay those of the stored size,
    as is usual; an image that is not square is not cropped but stretched.
    """
    count, height, width, channels = dataset.images.shape
    if height == width == size:
        return dataset
    images = np.empty((count, size, size, channels), np.uint8)
    whole = channels == 3  # Pillow filters the bands of an RGB image separately: one call for three planes
    for source, target in zip(dataset.images, images, strict=True):
        for band in [slice(None)] if whole else range(channels):
            picture = Image.fromarray(np.ascontiguousarray(source[:, :, band]))
            target[:, :, band] = np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR))
    return dataclasses.replace(dataset, images=images)


def with_channels(dataset: Dataset, channels: int) -> Dataset:
    """A grey set with its channel repeated, as a view that takes no memory, or the set itself if it has as many.

    Colour is never turned to grey: that would be a different data set, with statistics of its own.
    """
    *shape, present = dataset.images.shape
    if present == channels:
        return dataset
    if present != 1:
        raise UserError(
            f"{dataset.name} has {present} channels and {channels} were asked for: "
            f"only a grey set can be repeated, so build the model with {present} input channels."
        )
    images = np.broadcast_to(dataset.images, (*shape, channels))
    return dataclasses.replace(dataset, images=images, mean=dataset.mean * channels, std=dataset.std * channels)
