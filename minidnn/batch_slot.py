"""A batch on its way: checked, and written into the bytes of its pinned slot. No temporary batch is made."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidnn.errors import UserError
from minidnn.schedule.instruction import Value


def part(slot: NDArray[np.uint8], value: Value) -> NDArray[Any]:
    """A value inside the bytes of its buffer."""
    return slot[value.offset : value.offset + value.spec.nbytes].view(value.spec.dtype).reshape(value.spec.shape)


def require_pixels(x: NDArray[Any]) -> None:
    """Refuse pixels of another type than the two that have one meaning."""
    if x.dtype != np.uint8 and x.dtype.kind != "f":
        raise UserError(
            f"x has type {x.dtype}; pass float32 as the net shall see it, or uint8, which is scaled by 1/255"
        )


def write_pixels(destination: NDArray[Any], x: NDArray[Any]) -> None:
    """Fill the pinned pixels: float32 as it is, uint8 scaled by 1/255; any strides. No temporary batch is made."""
    if x.dtype == np.uint8:
        np.multiply(x, np.float32(1 / 255), out=destination, dtype=np.float32)
    else:
        np.copyto(destination, x, casting="same_kind")
