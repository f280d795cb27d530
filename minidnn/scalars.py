"""Where each number that changes from step to step lives in the device's two small vectors.

They are data, not schedule: a new learning rate changes no row. ``scalars`` has the statistics dtype, ``counters`` is
uint32: step low word, step high word, seed, rank.
"""

from __future__ import annotations

from enum import IntEnum

SCALAR_COUNT = 8
COUNTER_COUNT = 4
SCALING_COUNT = 4

INITIAL_SCALE = 2.0**16
"""Of the loss: as ``torch.amp.GradScaler``."""


class Scalar(IntEnum):
    """Index into ``scalars``."""

    LR = 0
    LOSS_WEIGHT = 1  # what the loss is multiplied by in backward: loss scale * share of the samples / samples
    GRADIENT_SCALE = 2  # what an update multiplies gradients by: clipping / loss scale
    BIAS1 = 3  # 1 - beta1^step, of Adam
    BIAS2 = 4  # 1 - beta2^step
    FINITE = 5  # 0: some gradient is not finite, and no update changes anything; else 1


class Counter(IntEnum):
    """Index into ``counters``."""

    STEP_LOW = 0
    STEP_HIGH = 1
    SEED = 2
    RANK = 3


class Scaling(IntEnum):
    """Index into ``scaling``, the state of dynamic loss scaling. It lives on the device, and the host never waits for it."""

    SCALE = 0  # what the loss is multiplied by
    GOOD = 1  # updates since the scale changed
    FINITE = 2  # whether all gradients since the last update are finite
    SKIPPED = 3  # updates that were not made
