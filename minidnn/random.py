"""Random words as a function of their position: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As
Easy as 1, 2, 3; SC 2011).

There is no state to save or to replay: the same counter and key give the same words on every device, so a dropout mask
that is recomputed is the mask that was dropped.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minidnn.errors import UserError

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, the Weyl sequence of the key
LOW = 0xFFFFFFFF


def philox_rounds(lanes: NDArray[np.uint64], scratch: NDArray[np.uint64], k0: int, k1: int) -> None:
    """Turn counters into random words in place. Allocates nothing.

    ``lanes`` (4, n) holds 32-bit values in 64-bit cells, because a round needs both halves of a 32 x 32-bit product;
    ``scratch`` is (2, n).
    """
    a, b, c, d = lanes
    p, q = scratch
    for _ in range(ROUNDS):
        np.multiply(a, MULTIPLIERS[0], out=p)
        np.multiply(c, MULTIPLIERS[1], out=q)
        np.right_shift(q, 32, out=a)
        np.bitwise_xor(a, b, out=a)
        np.bitwise_xor(a, k0, out=a)
        np.bitwise_and(q, LOW, out=b)
        np.right_shift(p, 32, out=c)
        np.bitwise_xor(c, d, out=c)
        np.bitwise_xor(c, k1, out=c)
        np.bitwise_and(p, LOW, out=d)
        k0 = (k0 + KEY_STEPS[0]) & LOW
        k1 = (k1 + KEY_STEPS[1]) & LOW


def dropout_threshold(p: float) -> int:
    """Return the integer below which a random word drops its element: round(p * 2**32), so p = 1 drops all.

    Raises UserError unless 0 <= p <= 1.
    """
    if not 0.0 <= p <= 1.0:
        raise UserError(f"dropout probability {p} is not between 0 and 1; give the share of elements to drop")
    return round(p * 2**32)
