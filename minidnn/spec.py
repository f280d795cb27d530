"""TensorSpec: the shape and element type of a tensor, and the bytes it takes."""

from __future__ import annotations

import math
from typing import NamedTuple

BLOCK_BYTES = 512  # CuPy's pool rounds every request to this; so does the planned slab

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "uint32": 4, "uint8": 1,
}  # fmt: skip


def round_up(nbytes: int, multiple: int = BLOCK_BYTES) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``nbytes``."""
    return -(-nbytes // multiple) * multiple


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor. Never holds an array.

    Images are (N, H, W, C), convolution weights (K, R, S, C / groups), linear weights (out, in).
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements alone."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def footprint(self) -> int:
        """Bytes taken in a slab or pool: ``nbytes`` rounded up to 512."""
        return round_up(self.nbytes)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"
