"""Random words that are a pure function of (seed, epoch, purpose, index).

Philox is counter-based: word i of a key does not depend on how many words are drawn, by which thread or when.
Only raw words are used, because NumPy keeps those the same between versions, and its distributions not (NEP 19).
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from minidnn.errors import UserError


class Purpose(IntEnum):
    """What the words are for: each purpose has its own independent stream."""

    ORDER = 0
    AUGMENT = 1
    TEMPLATE = 2
    LABEL = 3
    NOISE = 4


def words(seed: int, epoch: int, purpose: Purpose, count: int) -> NDArray[np.uint64]:
    """The first ``count`` 64-bit words of the stream; word i belongs to sample i, whatever ``count`` is."""
    if not 0 <= seed < 2**64:
        raise UserError(f"seed {seed} is out of range: give an integer from 0 to 2**64 - 1.")
    if not 0 <= epoch < 2**56:
        raise UserError(f"epoch {epoch} is out of range: epochs count from 0.")
    key = np.array([seed, epoch << 8 | purpose], np.uint64)
    return np.asarray(np.random.Philox(key=key).random_raw(count), np.uint64)
