"""What several policies say of copies: when the device copy goes, and when it comes back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from layup.cost import Costs
from layup.estimate import OFFLOAD, Decisions, acts, clock, needs
from minidnn.schedule.plan import Plan


def one_layer_ahead(costs: Costs, decisions: Decisions, policy: str) -> Plan:
    """The device copy goes when its last forward reader has run; it comes back one layer ahead of its first reader."""
    return _timed(
        costs,
        decisions,
        policy,
        gone=lambda k: costs.keys[k].last_forward,
        here=lambda k, first: first + 1,
    )


def one_segment_ahead(costs: Costs, decisions: Decisions, policy: str) -> Plan:
    """A segment ends at an offloaded unit. Its device copy goes when the next segment has been computed forward; it comes back
    when the backward of the next segment begins."""
    ends = [unit.last for unit in costs.units if decisions[unit.index] is OFFLOAD]

    def after(node: int) -> int:
        following = bisect_right(ends, node)
        return ends[following] if following < len(ends) else len(costs.nodes) - 1

    return _timed(
        costs,
        decisions,
        policy,
        gone=lambda k: after(costs.keys[k].made),
        here=lambda k, first: after(first),
    )


def _timed(
    costs: Costs,
    decisions: Decisions,
    policy: str,
    gone: Callable[[int], int],
    here: Callable[[int, int], int],
) -> Plan:
    """``gone(key)``: node after whose forward the device copy goes; ``here(key, reader)``: node at whose backward it is back."""
    need = needs(costs, decisions)
    time = clock(costs, need.remade)
    lags: dict[str, int] = {}
    distances: dict[str, int] = {}
    last = len(costs.nodes) - 1
    for unit in costs.units:
        if decisions[unit.index] is not OFFLOAD:
            continue
        for k in unit.keys:
            first = need.first[k]
            if first >= 0:
                layer, made = costs.nodes[costs.keys[k].made].name, costs.keys[k].made
                until, back = min(max(gone(k), made), last), min(here(k, first), last)
                lags[layer] = int(time.forward_rows[until] - time.forward_rows[made])
                distances[layer] = int(time.backward_rows[first] - time.backward_rows[back])
    chosen = {unit.name: decisions[unit.index] for unit in costs.units if acts(unit, decisions[unit.index], need)}
    return Plan(chosen, policy=policy, lags=lags, distances=distances)
