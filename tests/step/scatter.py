"""Scatter the rows of a step over all streams, so that every dependency needs a wait, and run it in adversarial orders.

What a plan puts on four streams is mostly one stream with a few copies beside it. Here any row runs on any stream, which only
the emulated device allows; the waits are derived anew, and each of them can then be taken away to see what happens.
``scripts/benchmarks/orders.py`` does for every wait what the tests do for a sample.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

import minidnn
from minidnn.device.emulated import EmulatedDevice
from minidnn.layers import Graph
from minidnn.schedule.instruction import STREAMS
from minidnn.schedule.program import Schedule
from minidnn.schedule.synchronise import synchronise
from minidnn.schedule.verify import verify
from minidnn.step import CompiledStep
from tests.step import nets

STEPS = 2  # consecutive steps, so that what is in flight across the boundary counts

GRAPHS: dict[str, Callable[[], Graph]] = {
    "residual": lambda: nets.residual(units=3),
    "dense": lambda: nets.dense(units=5),
    "dropout": lambda: nets.dropout(units=6),
}


class Deletion(NamedTuple):
    """A wait that is left out: number ``wait`` of row ``row``."""

    row: int
    wait: int


class Scattered:
    """A step whose training rows run on random streams, and the bits that its rows in list order leave."""

    def __init__(self, name: str, seed: int) -> None:
        self.step = minidnn.compile(GRAPHS[name](), optimizer=nets.MOMENTUM)
        plain = self.step.program["train"]
        rng = random.Random(seed)
        rows = [row._replace(stream=rng.choice(STREAMS), waits=()) for row in plain.rows]
        self.schedule = replace(plain, rows=tuple(synchronise(rows, plain.offsets, previous=rows)))
        self.expected = outcome(self.step, plain, None)
        self.deletions = [Deletion(i, k) for i, row in enumerate(self.schedule.rows) for k in range(len(row.waits))]

    def without(self, deletion: Deletion) -> Schedule:
        """The schedule less one wait."""
        rows = list(self.schedule.rows)
        waits = rows[deletion.row].waits
        rows[deletion.row] = rows[deletion.row]._replace(waits=waits[: deletion.wait] + waits[deletion.wait + 1 :])
        return replace(self.schedule, rows=tuple(rows))

    def wrong(self, schedule: Schedule, seeds: Iterable[int]) -> int | None:
        """The first order in which a schedule leaves NaN or other bits, or None."""
        return next((seed for seed in seeds if outcome(self.step, schedule, seed) != self.expected), None)


def problems(schedule: Schedule) -> list[str]:
    """What the static reader says of a schedule that follows itself."""
    return verify(schedule.rows, schedule.offsets, previous=schedule.rows)


def outcome(step: CompiledStep, schedule: Schedule, seed: int | None) -> dict[str, bytes] | None:
    """Bits of losses and state after ``STEPS`` training steps in one order; None where a kernel met a poisoned position."""
    program = replace(step.program, schedules={**step.program.schedules, "train": schedule})
    run = nets.rebuilt(step, program, EmulatedDevice(seed=seed))
    try:
        with np.errstate(all="ignore"):
            losses = nets.train(run, STEPS)
    except IndexError:  # 0xFF as a class or as a place in a window
        return None
    arrays = {**nets.state(run), "losses": np.array(losses)}
    run.close()
    return {name: array.tobytes() for name, array in arrays.items()}
