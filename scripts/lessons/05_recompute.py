"""Lesson 5: recompute, and the batch-norm trap. Throw away what can be made again.

A tensor that waits long can be dropped after forward and computed again when backward asks: time for memory.
In the map its line breaks off, and goes on under an R, short before its use.
The trap: batch norm's forward also moves the running averages that evaluation uses. Whoever simply calls it twice
moves them twice, and nothing complains: loss and weights are right, evaluation is not. Here batch norm is
three kinds of row, statistics, apply and running averages, and RECOMPUTE repeats *apply* alone.
"""

import sys
from collections.abc import Sequence

import minidnn
from minidnn.commandline import run
from lesson import ask, batch, differing, inserted, options, show, tampered
from minidnn import CompiledStep, Decision, Plan
from minidnn.schedule.instruction import Op

DROP = Plan({f"relu{i}": Decision.RECOMPUTE for i in (1, 2, 3)})  # and the batch norm that each overwrites


def net() -> minidnn.Graph:
    """Three times convolution, batch norm, ReLU."""
    g = minidnn.Graph()
    x, y = g.input((8, 16, 16, 8)), g.label((8,))
    for i in (1, 2, 3):
        x = g.batch_norm(g.conv2d(x, 16, 1, name=f"conv{i}"), momentum=0.1, name=f"norm{i}")
        x = g.relu(x, name=f"relu{i}")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(x, name="mean"), 10, name="classifier"), y)
    return g


def trapped() -> CompiledStep:
    """``DROP``, but recomputing norm1 moves its running averages, too."""
    step = minidnn.compile(net(), DROP)
    rows = step.program["train"].rows
    again = next(row for row in rows if row.target == "norm1" and row.kernel == "batch_norm_running")
    at = next(i for i, row in enumerate(rows) if row.target == "norm1" and row.op is Op.RECOMPUTE)
    return tampered(step, inserted(rows, at + 1, again))


def main(argv: Sequence[str] | None = None) -> int:
    """Show the map; compare the state after one step: keep, recompute, and the trap."""
    args = options(argv, __doc__)
    keep, drop = minidnn.compile(net()), minidnn.compile(net(), DROP)
    show(drop.program["train"])
    print(f"\nrecomputing saves {keep.profile.peak_bytes - drop.profile.peak_bytes} bytes of the peak")
    means = {}
    for name, step in (("keep", keep), ("recompute", drop), ("trapped", trapped())):
        step.run(*batch(step.graph))
        means[name] = step.state_dict()["norm1.running_mean"]
        print(f"{name} differs from keep in {differing(keep.state_dict(), step.state_dict())}")
    return ask(
        args.answer,
        "running_mean starts at 0 and moves by momentum: new = 0.9 old + 0.1 m, where m is the mean of the batch.\n"
        "After one step keep has 0.1 m. How many m has the trapped net?",
        right=0.19,
        why=f"0.9 x 0.1 + 0.1. Measured, in units of keep's: {(means['trapped'] / means['keep'])[0]:.3f}.",
        hint="Apply the formula twice, the second time to what the first has left.",
    )


if __name__ == "__main__":
    sys.exit(run(main))
