"""What several policies say of copies: when the device copy goes, and when it comes back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from layup.clock import timeline
from layup.copies import Moves, moved
from layup.cost import Costs
from layup.needs import OFFLOAD, Decisions
from layup.timed_plan import timed_plan
from minidnn.schedule.plan import Plan


def one_layer_ahead(costs: Costs, decisions: Decisions, policy: str) -> Plan:
    """The device copy goes when its last forward reader has run; it comes back one layer ahead of its first reader."""
    return _timed(costs, decisions, policy, lambda k: costs.keys[k].last_forward, lambda first: first + 1)


def one_segment_ahead(costs: Costs, decisions: Decisions, policy: str) -> Plan:
    """A segment ends at an offloaded unit. Its device copy goes when the next segment has been computed forward; it comes
    back when the backward of the next segment begins."""
    ends = [unit.last for unit in costs.units if decisions[unit.number] is OFFLOAD]

    def after(node: int) -> int:
        following = bisect_right(ends, node)
        return ends[following] if following < len(ends) else len(costs.nodes) - 1

    return _timed(costs, decisions, policy, lambda k: after(costs.keys[k].made), after)


def _timed(
    costs: Costs, decisions: Decisions, policy: str, gone: Callable[[int], int], here: Callable[[int], int]
) -> Plan:
    """``gone(key)``: node after whose forward the device copy goes; ``here(reader)``: node at whose backward it is back."""
    line = timeline(costs, decisions)
    last = len(costs.nodes) - 1
    keys = moved(line)
    until = [min(max(gone(k), costs.keys[k].made), last) for k in keys]
    back = [min(here(line.need.first[k]), last) for k in keys]
    return timed_plan(line, Moves(keys, until, back, 0.0), policy)
