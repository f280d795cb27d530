"""The plan of some decisions, with the lags and distances by which its copies run when they are meant to."""

from __future__ import annotations

from layup.clock import Timeline, timeline
from layup.copies import Moves, copies
from layup.cost import Costs
from layup.needs import Decisions, acts
from minidnn.schedule.plan import Plan


def to_plan(
    costs: Costs, decisions: Decisions, policy: str, slack: float = 1.0, *, memory_centric: bool = False
) -> Plan:
    """The plan of these decisions, with lags and distances for its copies. Decisions that move nothing are left out."""
    line = timeline(costs, decisions)
    return timed_plan(line, copies(line, slack), policy, memory_centric=memory_centric)


def timed_plan(line: Timeline, moves: Moves, policy: str, *, memory_centric: bool = False) -> Plan:
    """The plan of a timeline's decisions whose copies run as ``moves`` says: nodes become rows of the compute stream."""
    costs, decisions, need, time = line
    last = len(costs.nodes) - 1
    lags: dict[str, int] = {}
    distances: dict[str, int] = {}
    for k, gone, here in zip(moves.keys, moves.gone, moves.here, strict=True):
        made = costs.keys[k].made
        layer = costs.nodes[made].name
        lag = time.forward_rows[gone] - time.forward_rows[made]
        distance = time.backward_rows[last - need.first[k]] - time.backward_rows[last - here]
        lags[layer] = max(lags.get(layer, 0), lag)
        distances[layer] = max(distances.get(layer, 0), distance)
    chosen = {unit.name: decisions[unit.number] for unit in costs.units if acts(unit, decisions[unit.number], need)}
    return Plan(chosen, policy=policy, lags=lags, distances=distances, memory_centric=memory_centric)
