"""Policies: rules that make plans, one a file, all of one shape.

``plans(context)`` returns the plans of a policy. A policy with a memory knob has one for every setting of it, from the most
bytes to the fewest; one without is one point. A budget then selects the fastest that fits (``layup.planner``).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

from layup.context import Context
from layup.policies import auto, keep, layup, naive, sqrt_n, superneurons, superneurons_memory, vdnn, vdnn_conv
from minidnn.errors import UserError, nearest
from minidnn.schedule.plan import Plan

__all__ = ["POLICIES", "Policy", "find"]


class Policy(NamedTuple):
    """A named rule. ``knob``: whether it makes several plans, for different budgets. ``fidelity``: its docstring: what the
    paper does, what we do, what is left out, the source."""

    name: str
    plans: Callable[[Context], list[Plan]]
    knob: bool
    fidelity: str


def _policy(module: ModuleType) -> Policy:
    return Policy(module.__name__.rpartition(".")[2], module.plans, module.KNOB, (module.__doc__ or "").strip())


POLICIES = {
    policy.name: policy
    for policy in map(_policy, (keep, naive, vdnn, vdnn_conv, sqrt_n, superneurons, superneurons_memory, layup, auto))
}


def find(name: str) -> Policy:
    """Look a policy up by name. Raises UserError with the nearest names."""
    if name not in POLICIES:
        raise UserError(f"unknown policy {name!r}; {nearest(name, POLICIES)}")
    return POLICIES[name]
