"""Lesson 3: workspace. Bytes that live for one row.

Many kernels need scratch memory: this convolution first copies every window of the image side by side, and then
multiplies matrices. What is in it is worthless as soon as the row has ended.
A framework that gives every layer a workspace of its own pays for all of them all the time. But only one row
runs at a time, so one range of memory can serve them all, one after another: it must be as large as the largest.
The same holds for every buffer that lives briefly; scratch is only the extreme case.
"""

import sys
from collections.abc import Sequence

from lesson import ask, options, run, show

import minidnn
from minidnn import Plan, Reuse
from minidnn.graph import Role


def net() -> minidnn.Graph:
    """Three convolutions of different widths."""
    g = minidnn.Graph()
    x, y = g.input((4, 16, 16, 8)), g.label((4,))
    for i, channels in enumerate((8, 32, 16)):
        x = g.conv2d(x, channels, 3, padding=1, name=f"conv{i + 1}")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(x, name="mean"), 10, name="classifier"), y)
    return g


def main(argv: Sequence[str] | None = None) -> int:
    """Show the same net with a workspace a layer, and with a shared one."""
    args = options(argv, __doc__)
    sizes: dict[str, int] = {}
    peaks = {}
    for shared in (False, True):
        step = minidnn.compile(net(), Plan(reuse=Reuse(workspace=shared)), device=None)
        schedule = step.program["train"]
        print("\none workspace for all" if shared else "\na workspace for every layer")
        show(schedule, limit=10)
        peaks[shared] = step.profile.peak_bytes
        if not shared:
            sizes = {b.layer: b.footprint for b in schedule.offsets if b.role is Role.WORKSPACE}
    print(f"\nworkspaces in bytes: {sizes}\nsharing saves {peaks[False] - peaks[True]} bytes of the peak")
    return ask(
        args.answer,
        "how many bytes must the shared workspace have?",
        right=max(sizes.values()),
        why="rows run one after another, so it is as large as the largest of them, not as large as their sum.",
        hint="Two workspaces are never in use in the same column. Which one of the three numbers is enough for all?",
    )


if __name__ == "__main__":
    sys.exit(run(main))
