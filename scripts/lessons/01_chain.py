"""Lesson 1: a chain. Who waits for whom?

Training runs a net twice: forward from the batch to the loss, then backward from the loss to the batch.
A layer's backward often needs what its forward read, so that must wait in memory until backward comes by.
In a chain the first to be born is therefore the last to die, and the lifetimes lie inside each other.
Each line below is a buffer, each column one row of work: a letter where the row touches the buffer, "-" where
the buffer only waits. The bytes alive in the fullest column are what the step needs: the peak.
"""

import sys
from collections.abc import Sequence

from lesson import ask, options, run, show

import minidnn


def net(length: int) -> minidnn.Graph:
    """Convolutions one after another, then a classifier: images in, one of ten classes out."""
    g = minidnn.Graph()
    x, y = g.input((8, 16, 16, 16)), g.label((8,))
    for i in range(length):
        x = g.conv2d(x, 16, 1, name=f"conv{i + 1}")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(x, name="mean"), 10, name="classifier"), y)
    return g


def main(argv: Sequence[str] | None = None) -> int:
    """Show the map of a chain of four convolutions."""
    args = options(argv, __doc__)
    step = minidnn.compile(net(4), device=None)  # no device: nothing runs, and everything is known
    show(step.program["train"])
    print(f"\npeak: {step.profile.peak_bytes} bytes")
    return ask(
        args.answer,
        "the output of conv1 is alive for most of the step. In how many columns is it touched?",
        right=3,
        why="conv1 writes it, conv2 reads it, and much later conv2's weight gradient reads it again. In between it "
        "waits: the other lessons are about what to do with those dashes.",
        hint="Find the line conv1 and count its letters A, not its dashes.",
    )


if __name__ == "__main__":
    sys.exit(run(main))
