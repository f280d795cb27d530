"""superneurons: by layer type, recomputing speed-centrically.

The paper: liveness analysis; outputs of convolutions go to the host under a tensor cache (least recently used first, and only
when memory runs out), prefetched one convolution ahead; checkpoints are the outputs of CONV, FC, JOIN, FORK and CONCAT layers;
everything else (pooling, activation, LRN, batch norm, dropout) is recomputed from the nearest checkpoint, segment by segment
speed-centrically (once, and kept) or memory-centrically (again for every layer), whichever stays below the largest layer.

What we do: a unit with a convolution is offloaded, one with another checkpoint layer (linear, add, concat, or with several
readers) is kept, the rest is recomputed; all segments speed-centrically here, memory-centrically in ``superneurons_memory``.
An in-place chain counts as its strongest member.

Left out: the tensor cache, so that everything that may go to the host does: one point, their minimum; the dynamic convolution
workspace, which is our recipe.

Source: Wang et al. 2018 (PPoPP), "SuperNeurons: dynamic GPU memory management for training deep neural networks"; the layer
types from its released code, ``include/mem_control.h``.
"""

from __future__ import annotations

from layup.context import Context
from layup.cost import Costs
from layup.timed_plan import to_plan
from minidnn.schedule.plan import Decision, Plan

KNOB = False

CHECKPOINTS = ("linear", "add", "concat")


def by_type(costs: Costs) -> list[Decision]:
    """A decision for every unit by the types of its layers."""
    decisions = []
    for unit in costs.units:
        last = costs.nodes[unit.last].output
        forks = costs.analysis.readers.get(last, 0) > 1
        if "conv2d" in unit.kinds:
            decisions.append(Decision.OFFLOAD)
        elif forks or any(kind in CHECKPOINTS for kind in unit.kinds):
            decisions.append(Decision.KEEP)
        else:
            decisions.append(Decision.RECOMPUTE)
    return decisions


def plans(context: Context) -> list[Plan]:
    """The one speed-centric plan."""
    return [to_plan(context.costs, by_type(context.costs), "superneurons")]
