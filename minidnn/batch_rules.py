"""What a step accepts as a batch: of any other it says what is wrong with it, before anything runs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minidnn.errors import UserError
from minidnn.layers import BatchNorm, Graph


class BatchRules(NamedTuple):
    """``image``: (H, W, C) of a sample; ``sizes``: how many samples may train together; ``classes``: labels are below it."""

    image: tuple[int, ...]
    sizes: tuple[int, ...]
    classes: int

    def check(self, x: NDArray[Any], y: NDArray[Any]) -> int:
        """The number of samples of a batch to train on. Raises UserError for a wrong shape, type or label."""
        x, y = np.asarray(x), np.asarray(y)
        if x.shape[1:] != self.image or x.shape[0] not in self.sizes:
            raise UserError(
                f"x has shape {x.shape}, this step wants (N, {self._image_text()}) with N = {' or '.join(map(str, self.sizes))} "
                "(the batch it was compiled for, or its tail); compile with tail= for a smaller last batch"
            )
        _require_pixels(x)
        if y.shape != x.shape[:1] or y.dtype.kind not in "iu":
            raise UserError(f"y has shape {y.shape} and type {y.dtype}, this step wants ({x.shape[0]},) integers")
        if y.size and not (int(y.min()) >= 0 and int(y.max()) < self.classes):
            raise UserError(
                f"label {int(y.min()) if y.min() < 0 else int(y.max())} is out of range; labels are 0 to {self.classes - 1}"
            )
        return int(x.shape[0])

    def check_images(self, x: NDArray[Any]) -> None:
        """Raise UserError for what cannot be evaluated: any number of samples but none can."""
        if x.shape[1:] != self.image or len(x) < 1:
            raise UserError(f"x has shape {x.shape}, evaluation wants (N, {self._image_text()}) with N at least 1")
        _require_pixels(x)

    def _image_text(self) -> str:
        return ", ".join(map(str, self.image))


def unusable_tail(graph: Graph, tail: int | None) -> str | None:
    """The batch norm that would see one value per channel in a last batch of ``tail`` samples; None if there is none."""
    for node in graph.nodes if tail == 1 else ():
        if isinstance(node.layer, BatchNorm) and math.prod(node.output.shape[1:-1]) == 1:
            return node.name
    return None


def _require_pixels(x: NDArray[Any]) -> None:
    """Refuse pixels of another type than the two that have one meaning."""
    if x.dtype != np.uint8 and x.dtype.kind != "f":
        raise UserError(
            f"x has type {x.dtype}; pass float32 as the net shall see it, or uint8, which is scaled by 1/255"
        )
