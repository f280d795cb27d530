"""Lesson 9: planning under a budget. All of it together, chosen for you.

Keep what is near the end of forward, since it is needed again at once; offload where copies hide; recompute what is
cheap to make; and leave alone what is not alive at the peak, for it would save nothing. Which layer gets what depends
on the whole net, the machine and the budget, so the planner tries plans, from keep down to the fewest bytes it can
reach, predicts bytes and time of each, and takes the fastest that fits. Whatever it takes, the trained bits are the
same. A budget that nothing fits is refused before the first step, with the smallest that works. Try --memory.
"""

import sys
from collections.abc import Sequence

from lesson import ask, batch, differing, laptop, options, run, show

import layup
import minidnn


def net() -> minidnn.Graph:
    """Six times convolution, batch norm, ReLU, then a classifier."""
    g = minidnn.Graph()
    x, y = g.input((16, 16, 16, 32)), g.label((16,))
    for i in range(1, 7):
        x = g.conv2d(x, 32, 1, name=f"conv{i}")
        x = g.relu(g.batch_norm(x, name=f"norm{i}"), name=f"relu{i}")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(x, name="mean"), 10, name="classifier"), y)
    return g


def main(argv: Sequence[str] | None = None) -> int:
    """Show what the planner decides under a budget and why, and train a step with it."""
    args = options(argv, __doc__, memory="45%")
    keep = minidnn.compile(net(), profile=laptop(1))
    planned = layup.plan(net(), args.memory, profile=laptop(1))
    print(planned.text())
    step = minidnn.compile(net(), planned.plan, profile=laptop(1), memory=planned.memory)
    show(step.program["train"])
    for each in (keep, step):
        each.run(*batch(each.graph))
    print(
        f"\nafter a step the weights differ from keep's in: {differing(keep.state_dict(), step.state_dict()) or 'nothing'}"
    )
    slower = step.profile.step_seconds / keep.profile.step_seconds - 1
    print(f"{step.profile.reserved_bytes} bytes instead of {keep.profile.reserved_bytes}, for {slower:.1%} more time")
    return ask(
        args.answer,
        "what is the smallest budget in bytes that this net can train in?",
        right=layup.minimum_memory(net(), profile=laptop(1)),
        why="It is reached by the last plan of the chain; with a byte less no plan fits, with any more one does.",
        hint="Ask for too little, such as --memory 1KiB: the refusal names the smallest that runs.",
    )


if __name__ == "__main__":
    sys.exit(run(main))
