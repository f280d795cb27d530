"""A batch on its way: written, with the numbers of its run, into the bytes of its pinned slot. No temporary batch is made."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minidnn.layers import Graph
from minidnn.optim import Optimizer
from minidnn.scalars import Counter, Scalar
from minidnn.schedule.instruction import Value
from minidnn.schedule.program import Program


class RunNumbers(NamedTuple):
    """What changes from run to run besides the batch.

    ``loss_weight``: what a sample's loss counts in the mean; ``gradient_scale``: what an update multiplies gradients by;
    ``update``: number of the update, from 1. ``step`` (number of the run, from 0), ``seed`` and ``rank`` draw the random numbers.
    """

    lr: float
    loss_weight: float
    gradient_scale: float
    update: int
    step: int
    seed: int
    rank: int


class SlotViews(NamedTuple):
    """The arrays of a slot in which a run of one schedule finds what changes."""

    pixels: NDArray[Any]
    labels: NDArray[Any]
    constants: NDArray[Any]
    scalars: NDArray[Any]
    counters: NDArray[Any]


class SlotWriter:
    """Writes all that changes from run to run: it travels in one pinned slot, and no row of a schedule knows a number."""

    def __init__(self, graph: Graph, program: Program, optimizer: Optimizer) -> None:
        self._graph, self._program, self._optimizer = graph, program, optimizer

    def views(self, slot: NDArray[np.uint8], name: str) -> SlotViews:
        """The places in the bytes of a slot for runs of schedule ``name``."""
        persistent, batch = self._program.persistent, self._program[name].batch
        graph = self._graph if batch == self._graph.inputs[0].shape[0] else self._graph.with_batch(batch)
        parts = persistent.batch_values(graph, persistent.slot)
        values = (parts["pixels"], parts["labels"], parts["constants"], persistent.scalars, persistent.counters)
        return SlotViews(*(_part(slot, value) for value in values))

    def write(self, views: SlotViews, x: NDArray[Any] | None, y: NDArray[Any] | None, numbers: RunNumbers) -> None:
        """Fill a slot for a run. ``x`` and ``y`` None: left as they are."""
        if x is not None:
            _write_pixels(views.pixels, x)
        if y is not None:
            views.labels[...] = y
        scalars, counters = views.scalars, views.counters
        views.constants[...] = 0
        scalars[Scalar.LR], scalars[Scalar.LOSS_WEIGHT] = numbers.lr, numbers.loss_weight
        scalars[Scalar.GRADIENT_SCALE], scalars[Scalar.FINITE] = numbers.gradient_scale, 1.0
        scalars[Scalar.BIAS1], scalars[Scalar.BIAS2] = self._optimizer.bias_corrections(numbers.update)
        counters[Counter.STEP_LOW], counters[Counter.STEP_HIGH] = numbers.step & 0xFFFFFFFF, numbers.step >> 32
        counters[Counter.SEED], counters[Counter.RANK] = numbers.seed & 0xFFFFFFFF, numbers.rank


def _part(slot: NDArray[np.uint8], value: Value) -> NDArray[Any]:
    """A value inside the bytes of its buffer."""
    return slot[value.offset : value.offset + value.spec.nbytes].view(value.spec.dtype).reshape(value.spec.shape)


def _write_pixels(destination: NDArray[Any], x: NDArray[Any]) -> None:
    """Fill the pinned pixels: float32 as it is, uint8 scaled by 1/255; any strides. No temporary batch is made."""
    if x.dtype == np.uint8:
        np.multiply(x, np.float32(1 / 255), out=destination, dtype=np.float32)
    else:
        np.copyto(destination, x, casting="same_kind")
