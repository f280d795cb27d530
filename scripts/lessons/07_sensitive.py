"""Lesson 7: compute-sensitive or transfer-sensitive? Send it away, or make it again?

Offloading costs nothing if the copy hides behind computation. So walk the layers and add up the forward time since
the last offload: if copying a layer's output takes less, the layer is compute-sensitive: offload it, and start the
sum again. If it takes longer, it is transfer-sensitive: computation would wait for the copy, so drop the output and
recompute it. The answer is not a property of the layer alone: --link 4 makes the link between device and host four
times as fast. Then layers change sides, and not all the same way, since each offload uses up the time to hide in.
"""

import sys
from collections.abc import Sequence

from lesson import ask, laptop, options, run, show

import minidnn
from layup.classify import COMPUTE_SENSITIVE, TRANSFER_SENSITIVE, Classification, classify
from layup.context import Context
from minidnn import Decision, Plan
from minidnn.prepare import prepare

DECISION = {COMPUTE_SENSITIVE: Decision.OFFLOAD, TRANSFER_SENSITIVE: Decision.RECOMPUTE}


def net() -> minidnn.Graph:
    """Convolutions, which compute much for each byte, and pools, which compute little."""
    g = minidnn.Graph()
    x, y = g.input((64, 64, 64, 3)), g.label((64,))
    for i, channels in enumerate((64, 64, 128, 256)):
        x = g.max_pool(g.conv2d(x, channels, 3, padding=1, name=f"conv{i + 1}"), 2, name=f"pool{i + 1}")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(x, name="mean"), 10, name="classifier"), y)
    return g


def classes(link: float) -> list[Classification]:
    """The class of every layer that stores something."""
    rows = classify(Context(prepare(net(), device=None, profile=laptop(link))).costs)
    return [row for row in rows if row.layer == row.unit and row.kind_of_cost in DECISION]


def main(argv: Sequence[str] | None = None) -> int:
    """Show the classes at a link speed, and the map of the plan they make."""
    args = options(argv, __doc__, link=1.0)
    for row in (rows := classes(args.link)):
        copy, hide = (f"{1e3 * seconds:5.2f} ms" for seconds in (row.ratio * row.since, row.since))
        print(f"{row.layer:<6} copy {copy}, to hide in {hide}: {row.kind_of_cost}")
    plan = Plan({row.layer: DECISION[row.kind_of_cost] for row in rows})
    step = minidnn.compile(net(), plan, device=None, profile=laptop(args.link))
    show(step.program["train"])
    print(f"\na step takes {1e3 * step.profile.step_seconds:.2f} ms")
    return ask(
        args.answer,
        "how many layers change sides when the link becomes four times as fast?",
        right=sum(a.kind_of_cost != b.kind_of_cost for a, b in zip(classes(1), classes(4), strict=True)),
        why="Faster copies hide where slow ones do not; but each offload leaves less time for the next to hide in.",
        hint="Compare the last column without an option and with --link 4, line by line.",
    )


if __name__ == "__main__":
    sys.exit(run(main))
