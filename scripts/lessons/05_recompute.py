"""Lesson 5: recompute, and the batch-norm trap. Throw away what can be made again.

A tensor that waits long can be dropped after forward and computed again when backward asks: time for memory.
In the map the line of such a tensor breaks off, and begins again near its use (R).
The trap: batch norm's forward also has a side effect, it moves the running averages used at evaluation. Whoever
simply calls forward twice moves them twice, and no error is raised: the loss is right, the evaluation is not.
Here batch norm is three kinds of row: statistics, apply, running averages. RECOMPUTE repeats only *apply*.
"""

import sys
from collections.abc import Sequence

import numpy as np

import minidnn
from lesson import ask, batch, options, show, tampered
from minidnn import Decision, Plan
from minidnn.schedule.instruction import Instruction, Op

DROP = Plan({"norm": Decision.RECOMPUTE, "relu": Decision.RECOMPUTE})


def net() -> minidnn.Graph:
    """conv1 -> batch norm -> tanh -> conv2."""
    g = minidnn.Graph()
    x, y = g.input((8, 16, 16, 3)), g.label((8,))
    x = g.tanh(g.batch_norm(g.conv2d(x, 16, 1, name="conv1"), momentum=0.1, name="norm"), name="tanh")
    x = g.conv2d(x, 16, 1, name="conv2")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(x, name="mean"), 10, name="classifier"), y)
    return g


def trapped(rows: Sequence[Instruction]) -> list[Instruction]:
    """The same rows, but the running averages move again when the layer is recomputed."""
    again = next(row for row in rows if row.kernel == "batch_norm_running")
    at = 1 + next(i for i, row in enumerate(rows) if row.op is Op.RECOMPUTE and row.target == "norm")
    later = [r._replace(waits=tuple(w._replace(row=w.row + (w.row >= at)) for w in r.waits)) for r in rows]
    return [*later[:at], again._replace(waits=()), *later[at:]]


def main(argv: Sequence[str] | None = None) -> int:
    """Show the map, and the running mean of the first channel after one step: keep, recompute, trapped."""
    args = options(argv, __doc__)
    step = minidnn.compile(net(), DROP)
    show(step.program["train"])
