"""sqrt_n: checkpoints about every square root of n layers stay, all between is recomputed.

The paper: cut the net into k segments, keep only what crosses the cuts, and run each segment forward again before its backward;
k = sqrt(n) takes O(sqrt(n)) memory for one more forward pass. A budget for a segment is searched; a variant drops only what is
cheap to compute.

What we do: segments of about equal bytes, cut where the fewest bytes cross; every segment is remade once and its values stay
to their last use. One plan for every number of segments 1, 2, 3, 4, 6, 8, 12 ...: that is the knob.

Left out: the recursive form with O(log n) memory; the cheap-layers variant, which ``auto`` covers.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost", arXiv 1604.06174.
"""

from __future__ import annotations

from layup.checkpoints import checkpoints, crossing
from layup.context import Context
from layup.needs import KEEP, RECOMPUTE
from layup.timed_plan import to_plan
from minidnn.schedule.plan import Plan

KNOB = True


def segment_counts(limit: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12 ... up to ``limit``."""
    counts = sorted({n << shift for n in (1, 3) for shift in range(limit.bit_length())} | {2})
    return [count for count in counts if count <= max(limit, 1)]


def plans(context: Context) -> list[Plan]:
    """One plan for every number of segments, those that are the same only once."""
    costs = context.costs
    total = sum(unit.footprint for unit in costs.units)
    cuts = crossing(costs)
    found: dict[frozenset[int], Plan] = {}
    for count in segment_counts(len(costs.units)):
        kept = frozenset(checkpoints(costs, total / count, cuts))
        if kept not in found:
            decisions = [KEEP if unit.number in kept else RECOMPUTE for unit in costs.units]
            found[kept] = to_plan(costs, decisions, "sqrt_n")
    return list(found.values())
