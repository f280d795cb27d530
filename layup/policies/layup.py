"""layup: the thesis' rule: a feature map is offloaded if its copy hides under the computation since the last one.

The thesis: layers are compute-sensitive (feature maps offloaded) or transfer-sensitive (recomputed), by their transfer and
recompute costs; gradient maps in a sliding window, one convolution workspace and one cuDNN handle are reused layer by layer.
Its rule as two re-implementations read it: walk the layers, add up forward time since the last offload; if the copy of a
layer's output takes less than theta times that, it is a checkpoint and is offloaded, and the sum starts again; else it is
recomputed. Offload lags the computation by one segment, prefetch runs one segment ahead, on a stream of its own.

What we do: the same by units, theta 1.0 by default (one re-implementation has 1.0, the other 2.0; the paper's value is not
known to us), with separate streams out and back. A segment must be remade from its checkpoint alone, so what reaches across a
checkpoint, such as a residual unit's shortcut, is offloaded with it; the re-implementations know chains only. The reuse of the
second part is on in every plan here (``Plan.reuse``).

Left out: timing the layers on the first batch (costs come from the profile, measured or analytic); one stream for both
directions; handles per layer, of which there is one anyway.

Source: Jiang et al. 2019 (ACM TACO 16(4)), "Layup: layer-adaptive and multi-type intermediate-oriented memory optimization for
GPU-based CNNs", by its abstract and two re-implementations, grapheo12/Layup-HP3 and suchintan-p/HP3CUDA.
"""

from __future__ import annotations

from layup.checkpoints import crossing
from layup.classify import COMPUTE_SENSITIVE, TRANSFER_SENSITIVE, classify
from layup.context import Context
from layup.policies.shared import one_segment_ahead
from minidnn.schedule.plan import Decision, Plan

KNOB = False

_DECISION = {COMPUTE_SENSITIVE: Decision.OFFLOAD, TRANSFER_SENSITIVE: Decision.RECOMPUTE}


def plans(context: Context) -> list[Plan]:
    """The one plan of the rule at this theta."""
    costs = context.costs
    kinds = {row.layer: row.kind_of_cost for row in classify(costs, context.theta)}
    decisions = [_DECISION.get(kinds[unit.name], Decision.KEEP) for unit in costs.units]
    for unit, crosses in zip(costs.units, crossing(costs), strict=True):
        if kinds[unit.name] == COMPUTE_SENSITIVE:
            for k in crosses:
                decisions[costs.keys[k].unit] = Decision.OFFLOAD
    return [one_segment_ahead(costs, decisions, "layup")]
