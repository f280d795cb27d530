"""keep: everything stays on the device until its last use.

Source: none; what a framework with perfect liveness does without a memory optimiser. Nothing is offloaded, recomputed or
streamed; all reuse is on. Every percentage of memory in this project is of what this policy reserves.
"""

from __future__ import annotations

from layup.context import Context
from minidnn.schedule.plan import Plan
from minidnn.schedule.plan import keep as keep_plan

KNOB = False


def plans(context: Context) -> list[Plan]:
    """The one plan without decisions."""
    return [keep_plan()]
