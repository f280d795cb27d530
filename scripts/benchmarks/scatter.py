"""Scatter the rows of a step over all streams, so that every dependency needs a wait, and run it in adversarial orders.

What a plan puts on four streams is mostly one stream with a few copies beside it. Here any row runs on any stream, which only
the emulated device allows; the waits are derived anew, and each of them can then be taken away to see what happens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minidnn.device.emulated import EmulatedDevice
from minidnn.schedule.instruction import STREAMS, Instruction, Op
from minidnn.schedule.program import Program, Schedule
from minidnn.schedule.synchronise import synchronise
from minidnn.step import CompiledStep

STEPS = 2  # consecutive steps, so that waits across the boundary count

Run = Callable[[Program, EmulatedDevice], dict[str, NDArray[Any]]]
"""Runs ``STEPS`` training steps of a program on a device and returns losses and state."""


class Deletion(NamedTuple):
    """A wait that is left out: the ``wait``-th one of row ``row``."""

    row: int
    wait: int


def scatter(schedule: Schedule, seed: int) -> Schedule:
    """Give every row a random stream and derive the waits anew, over two consecutive runs. Changes no offset."""
    rng = random.Random(seed)
    rows = [row._replace(stream=rng.choice(STREAMS), waits=()) for row in schedule.rows]
    return replace(schedule, rows=tuple(synchronise(rows, schedule.offsets, previous=rows)), previous=schedule.name)


def deletions(schedule: Schedule) -> list[Deletion]:
    """Every single wait of a schedule."""
    return [Deletion(i, k) for i, row in enumerate(schedule.rows) for k in range(len(row.waits))]


def without(schedule: Schedule, deletion: Deletion) -> Schedule:
    """The schedule less one wait."""
    rows = list(schedule.rows)
    waits = rows[deletion.row].waits
    rows[deletion.row] = rows[deletion.row]._replace(waits=waits[: deletion.wait] + waits[deletion.wait + 1 :])
    return replace(schedule, rows=tuple(rows))


def train_program(program: Program, schedule: Schedule) -> Program:
    """The program with another ``train`` schedule."""
    return replace(program, schedules={**program.schedules, "train": schedule})


def outcome(run: Run, program: Program, seed: int | None) -> dict[str, bytes] | None:
    """Bits that an order leaves; None where a kernel met what it cannot compute with."""
    try:
        with np.errstate(all="ignore"):
            arrays = run(program, EmulatedDevice(seed=seed))
    except (IndexError, ValueError, AssertionError):  # poison as a class number or as a position
        return None
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}


def first_wrong_order(run: Run, program: Program, expected: dict[str, bytes], seeds: Sequence[int]) -> int | None:
    """The first order that leaves other bits, or None."""
    return next((seed for seed in seeds if outcome(run, program, seed) != expected), None)


def sample(of: Sequence[Deletion], count: int, seed: int) -> list[Deletion]:
    """A fixed random sample, in order."""
    return sorted(random.Random(seed).sample(of, min(count, len(of))))


def compute_rows(rows: Sequence[Instruction]) -> Iterator[Instruction]:
    """Rows that run something."""
    return (row for row in rows if row.op not in (Op.ALLOC, Op.FREE, Op.HOLD))


def rebuilt(step: CompiledStep, program: Program, device: EmulatedDevice) -> CompiledStep:
    """The same step with other rows."""
    return CompiledStep(
        graph=step.graph, plan=step.plan, recipe=step.recipe, program=program, profile=step.profile, gpu=step.gpu,
        optimizer=step.optimizer, precision=step.precision, device=device, seed=step.seed, tail=step.tail,
        accumulate=step.accumulate, allocator=step.allocator, memory=step.memory,
    )  # fmt: skip
