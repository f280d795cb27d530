"""Needs: what backward reads of a plan's decisions: which keys, from when to when, and what is remade for it.

A dropped value is remade at the first backward that needs it, or something that is made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from layup.cost import Costs
from layup.unit import Unit
from minidnn.schedule.plan import Decision, Plan

KEEP, OFFLOAD, RECOMPUTE = Decision.KEEP, Decision.OFFLOAD, Decision.RECOMPUTE

Decisions = Sequence[Decision]
"""One decision for every unit, by its number."""


def decisions_of(costs: Costs, plan: Plan) -> list[Decision]:
    """The plan's decision for every unit."""
    return [plan.decision(unit.name) for unit in costs.units]


class Needs(NamedTuple):
    """When stored keys are needed in backward. By key: ``first`` and ``last`` node whose backward, or the remaking before it,
    reads it (highest and lowest index; -1: nobody). ``remade``: by unit, the node before whose backward it is remade; -1: not.
    """

    first: list[int]
    last: list[int]
    remade: list[int]


def needs(costs: Costs, decisions: Decisions) -> Needs:
    """Who needs what, closed over the inputs of RECOMPUTE units. O(units)."""
    first, last = costs.first_readers.copy(), costs.last_readers.copy()
    remade = [-1] * len(costs.units)
    for number, keys, sources in costs.reversed_links:
        if decisions[number] is not RECOMPUTE:
            continue
        at = -1
        for k in keys:
            if first[k] > at:
                at = first[k]
        if at < 0:
            continue
        remade[number] = at
        for k in sources:
            if first[k] < at:
                first[k] = at
            if last[k] < 0 or last[k] > at:
                last[k] = at
    return Needs(first, last, remade)


def acts(unit: Unit, decision: Decision, need: Needs) -> bool:
    """Whether a decision other than KEEP does anything: something that the unit makes is needed in backward."""
    return decision is not KEEP and any(need.first[k] >= 0 for k in unit.keys)
