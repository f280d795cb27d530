"""Arithmetic of depth: the deepest net of the family for which what must stay on the device, and no more, fills a budget.

Sums over shapes, without a plan: it says how much of a depth is due to where weights, gradients and momentum live, whatever a
policy does to activations. What it leaves out (live values of a step, workspaces) has to come out of the reserve.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from figures import markdown, size

import models

BLOCKS, BATCH, IMAGE_SIZE = (6, 32, 6), 16, 224
WALLS = (("weights, gradients, momentum", 12), ("weights, momentum (update in backward)", 8), ("weights alone", 4))
RESERVES = (1_000_000_000, 400_000_000, 0)
EAGER_RESERVES = (1_000_000_000, 500_000_000)
CHECKPOINT_RESERVES = (500_000_000,)
_DEEPEST = 20_000


def depth(n3: int, stages: tuple[int, int, int] = BLOCKS) -> int:
    """Layers of the net, without projections, as the papers count."""
    return 3 * (sum(stages) + n3) + 2


def parameters(n3: int, stages: tuple[int, int, int] = BLOCKS) -> int:
    """Trained numbers of the net; linear in n3 by construction."""
    first, second, last = stages

    def count(n: int) -> int:
        return models.build("resnet", batch=1, image_size=32, blocks=(first, second, n, last)).parameter_count

    one, two = count(1), count(2)
    return one + (n3 - 1) * (two - one)


class Maps(NamedTuple):
    """Bytes of feature maps, fp32. ``first``: all of the net with n3 = 1; ``unit``: of one more unit; ``output``: of its end.

    Outputs of convolutions and of ReLU, as frameworks save them that share no bytes between a layer and the next.
    """

    first: int
    unit: int
    output: int


@cache
def maps() -> Maps:
    """Feature maps of the family."""

    def saved(n3: int) -> list[int]:
        first, second, last = BLOCKS
        graph = models.build("resnet", batch=BATCH, image_size=IMAGE_SIZE, blocks=(first, second, n3, last))
        shapes = [node.output.shape for node in graph.nodes if node.layer.kind in ("conv2d", "relu")]
        return sorted(4 * math.prod(shape) for shape in shapes)

    one, two = saved(1), saved(2)
    added = two.copy()
    for nbytes in one:
        added.remove(nbytes)
    return Maps(sum(one), sum(added), max(added))


def eager(n3: int) -> int:
    """All that is saved for backward by a framework that drops nothing."""
    return maps().first + (n3 - 1) * maps().unit


def checkpoints(n3: int) -> int:
    """The output of every k-th unit of the third stage, and the insides of the k units that run again, for the best k.

    The sqrt(n) scheme of Chen et al. 2016, arXiv 1604.06174. The other stages are left out.
    """
    return min(-(-n3 * maps().output // k) + k * maps().unit for k in range(1, 200))


def nothing(n3: int) -> int:
    """No activation stays."""
    return 0


def arithmetic(budgets: Sequence[int]) -> list[dict[str, Any]]:
    """The depth at which what stays on the device fills the budget, less a reserve for all else; None: no net does."""
    (all_three, most), (two, fewer), (weights, fewest) = WALLS
    ladder: list[tuple[str, int, Callable[[int], int], tuple[int, ...]]] = [
        ("weights, gradients, momentum, outputs of convolutions and ReLU", most, eager, EAGER_RESERVES),
        (all_three, most, nothing, RESERVES),
        (f"{all_three}, √n checkpoints", most, checkpoints, CHECKPOINT_RESERVES),
        (two, fewer, nothing, RESERVES),
        ("weights, momentum, √n checkpoints", fewer, checkpoints, CHECKPOINT_RESERVES),
        (weights, fewest, nothing, RESERVES),
        ("weights, √n checkpoints", fewest, checkpoints, CHECKPOINT_RESERVES),
    ]
    first, unit = parameters(1), parameters(2) - parameters(1)
    rows = []
    for what, per_number, activations, reserves in ladder:

        def needs(n3: int, per_number: int = per_number, more: Callable[[int], int] = activations) -> int:
            return per_number * (first + (n3 - 1) * unit) + more(n3)

        for reserve in reserves:
            for memory in budgets:
                n3 = bisect_right(range(1, _DEEPEST), memory - reserve, key=needs)
                deep = depth(n3) if n3 else None
                row = {"kept": what, "bytes_per_parameter": per_number, "reserve_bytes": reserve}
                rows.append(row | {"memory_bytes": memory, "depth": deep})
    return rows


def wall_table(walls: Sequence[dict[str, Any]], budgets: Sequence[int]) -> str:
    """The arithmetic as a table, a column for every budget."""
    lines: dict[tuple[str, int, int], dict[int, str]] = {}
    for wall in walls:
        line = lines.setdefault((wall["kept"], wall["bytes_per_parameter"], wall["reserve_bytes"]), {})
        line[wall["memory_bytes"]] = "none" if wall["depth"] is None else f"{wall['depth']:,}"
    rows = [(what, per, size(spare), *(line[b] for b in budgets)) for (what, per, spare), line in lines.items()]
    return markdown(("stays on the device", "B a parameter", "reserve", *map(exactly, budgets)), rows)


def exactly(nbytes: int) -> str:
    """A budget in the unit in which it is round."""
    for unit, scale in (("GB", 10**9), ("GiB", 2**30), ("MiB", 2**20)):
        if nbytes % scale == 0:
            return f"{nbytes // scale:,} {unit}"
    return f"{nbytes:,} B"
