"""Where each number that changes from step to step lives in the device's two small vectors.

They are data, not schedule: a new learning rate changes no row. ``scalars`` has the statistics dtype, ``counters`` is
uint32: step low word, step high word, seed, rank.
"""

from __future__ import annotations

from enum import IntEnum

SCALAR_COUNT = 8
COUNTER_COUNT = 4


class Scalar(IntEnum):
    """Index into ``scalars``."""

    LR = 0
    LOSS_WEIGHT = 1  # what the loss is multiplied by in backward: loss scale * share of the samples / samples
    GRADIENT_SCALE = 2  # what an update multiplies gradients by: clipping / loss scale
    BIAS1 = 3  # 1 - beta1^step, of Adam
    BIAS2 = 4  # 1 - beta2^step


class Counter(IntEnum):
    """Index into ``counters``."""

    STEP_LOW = 0
    STEP_HIGH = 1
    SEED = 2
    RANK = 3
