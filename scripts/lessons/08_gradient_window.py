"""Lesson 8: the gradient window. Gradients of activations need not pile up.

Backward makes a gradient for every activation, and as large. But each has one purpose: the layer below turns it
into the next, and then it is worthless. So a window of a few gradients slides down the net, however deep that is.
Whoever keeps a gradient beside every activation, as older frameworks do, pays for all of them; and most dearly when
the activations themselves have left the device. Below they are offloaded, first without the window, then with it.
Gradients of weights slide the same way, because each layer is updated at once: in the ruler u follows b.
"""

import sys
from collections.abc import Sequence

from lesson import ask, chain, options, run, show

import minidnn
from minidnn import CompiledStep, Decision, Plan, Reuse
from minidnn.schedule.simulate import live_buffers


def compiled(length: int, window: bool) -> CompiledStep:
    """A chain whose activations are offloaded and come back two rows before they are read."""
    decisions = {f"conv{i}": Decision.OFFLOAD for i in range(1, length)}
    plan = Plan(decisions, Reuse(gradient_window=window), distance=2)
    return minidnn.compile(chain(length), plan, device=None)


def most_alive(step: CompiledStep) -> int:
    """The largest number of gradients d_conv1, d_conv2 ... alive at once."""
    rows = step.program["train"].rows
    alive = [[b.name for b in live_buffers(rows[:i])] for i in range(len(rows))]
    return max(sum(name.startswith("d_conv") for name in names) for names in alive)


def main(argv: Sequence[str] | None = None) -> int:
    """Show a chain of six convolutions without and with the window."""
    args = options(argv, __doc__)
    peaks = []
    for window in (False, True):
        step = compiled(6, window)
        print("\nwith the window" if window else "\nevery gradient lives to the end of the step")
        show(step.program["train"])
        peaks.append(step.profile.peak_bytes)
    print(f"\nthe window saves {peaks[0] - peaks[1]} bytes of the peak")
    return ask(
        args.answer,
        "with the window and twelve convolutions, not six: how many gradients d_conv are alive at once, at most?",
        right=most_alive(compiled(12, True)),
        why="The one a layer reads and the one it writes: the width of the window does not depend on the depth.",
        hint="Look at one column of the second map: a layer's backward reads one d_conv and writes the next.",
    )


if __name__ == "__main__":
    sys.exit(run(main))
