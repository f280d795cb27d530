"""Lesson 5: recompute, and the batch-norm trap. Throw away what can be made again.

A tensor that waits long can be dropped after forward and computed again when backward asks: time for memory. Its
line in the map breaks off, and goes on under an R shortly before its use.
The trap: batch norm's forward also moves the running averages that evaluation uses. Whoever simply calls it twice
moves them twice, and nothing complains: loss and weights are right, evaluation is not. So batch norm is three kinds
of row here, statistics, apply and running averages, and RECOMPUTE repeats *apply* alone.
"""

import sys
from collections.abc import Sequence

from lesson import ask, batch, differing, inserted, options, run, show, tampered

import minidnn
from minidnn import CompiledStep, Decision, Plan
from minidnn.schedule.instruction import Op

DROP = Plan({f"relu{i}": Decision.RECOMPUTE for i in (1, 2, 3)})  # with the batch norm that each overwrites


def net() -> minidnn.Graph:
    """Three times convolution, batch norm, ReLU."""
    g = minidnn.Graph()
    x, y = g.input((8, 16, 16, 8)), g.label((8,))
    for i in (1, 2, 3):
        x = g.relu(g.batch_norm(g.conv2d(x, 16, 1, name=f"conv{i}"), name=f"norm{i}"), name=f"relu{i}")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(x, name="mean"), 10, name="classifier"), y)
    return g


def trapped(step: CompiledStep) -> CompiledStep:
    """The step, but recomputing norm1 moves its running averages, too."""
    rows = step.program["train"].rows
    again = next(row for row in rows if row.kernel == "batch_norm_running")  # the first is norm1's
    at = [(row.op, row.target) for row in rows].index((Op.RECOMPUTE, "norm1"))
    return tampered(step, inserted(rows, at + 1, again))


def main(argv: Sequence[str] | None = None) -> int:
    """Show the map; compare the state after one step: keep, recompute, and the trap."""
    args = options(argv, __doc__)
    keep, drop, trap = minidnn.compile(net()), minidnn.compile(net(), DROP), trapped(minidnn.compile(net(), DROP))
    show(drop.program["train"])
    print(f"\nrecomputing saves {keep.profile.peak_bytes - drop.profile.peak_bytes} bytes of the peak")
    for name, step in {"keep": keep, "recompute": drop, "the trap": trap}.items():
        step.run(*batch(step.graph))
        print(f"{name} differs from keep in: {differing(keep.state_dict(), step.state_dict()) or 'nothing'}")
    ratio = trap.state_dict()["norm1.running_mean"][0] / keep.state_dict()["norm1.running_mean"][0]
    return ask(
        args.answer,
        "running_mean starts at 0; new = 0.9 old + 0.1 m. After one step keep has 0.1 m. How many m has the trap?",
        right=0.19,
        why=f"0.9 x 0.1 + 0.1. Measured, in units of keep's 0.1 m: {ratio:.3f}.",
        hint="Apply the formula twice, the second time to what the first has left.",
    )


if __name__ == "__main__":
    sys.exit(run(main))
