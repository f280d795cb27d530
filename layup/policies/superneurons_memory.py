"""superneurons_memory: by layer type, recomputing memory-centrically.

As ``superneurons``, but what was remade for a layer's backward is dropped after it, and made again, from the last checkpoint,
for the next: fewer bytes, more time. The paper takes this only for segments that would not fit otherwise; here all take it.

Source: Wang et al. 2018 (PPoPP), "SuperNeurons: dynamic GPU memory management for training deep neural networks".
"""

from __future__ import annotations

from layup.context import Context
from layup.policies.superneurons import by_type
from layup.timed_plan import to_plan
from minidnn.schedule.plan import Plan

KNOB = False


def plans(context: Context) -> list[Plan]:
    """The one memory-centric plan."""
    return [to_plan(context.costs, by_type(context.costs), "superneurons_memory", memory_centric=True)]
