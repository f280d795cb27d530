"""Lesson 2: a skip. What does a shortcut cost?

In a chain a tensor has one reader. A residual unit, x + f(x), gives x two: f, and the addition after f.
So x must stay alive while f runs, whatever happens inside f. Evaluation shows it best: nothing is kept for a
backward, and every tensor dies at its last reader. A chain then needs two tensors at a time, the one a layer
reads and the one it writes. Below, first a chain of three convolutions, then the same three with a shortcut
around the last two.
"""

import sys
from collections.abc import Sequence

from lesson import ask, options, run, show

import minidnn
from minidnn.graph import Role
from minidnn.schedule.program import Schedule
from minidnn.schedule.simulate import live_buffers


def net(skip: bool) -> minidnn.Graph:
    """conv1 -> conv2 -> conv3, with or without + conv1."""
    g = minidnn.Graph()
    x, y = g.input((8, 16, 16, 16)), g.label((8,))
    first = g.conv2d(x, 32, 1, name="conv1")
    x = g.conv2d(g.conv2d(first, 32, 1, name="conv2"), 32, 1, name="conv3")
    x = g.add(first, x, name="add") if skip else x
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(x, name="mean"), 10, name="classifier"), y)
    return g


def most_alive(schedule: Schedule) -> int:
    """The largest number of activations alive at once."""
    rows = schedule.rows
    return max(sum(b.role is Role.ACTIVATION for b in live_buffers(rows[:i])) for i in range(len(rows)))


def main(argv: Sequence[str] | None = None) -> int:
    """Show the evaluation of both nets."""
    args = options(argv, __doc__)
    peaks = []
    for skip in (False, True):
        schedule = minidnn.compile(net(skip), device=None).program["eval"]
        print("\nwith the shortcut" if skip else "\nthe chain")
        show(schedule)
        peaks.append(schedule.profile.peak_bytes)
    print(f"\nthe shortcut adds {peaks[1] - peaks[0]} bytes to the peak")
    return ask(
        args.answer,
        "in the net with the shortcut, how many activations (A) are alive in the column where conv3 runs?",
        right=most_alive(schedule),
        why="conv3 reads one and writes one, and the output of conv1 waits beside them for the addition.",
        hint="Look at the third F, and count the lines with an A or a - in that column; X and W are not activations.",
    )


if __name__ == "__main__":
    sys.exit(run(main))
