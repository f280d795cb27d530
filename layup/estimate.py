"""Estimate: bytes and seconds of a plan from the costs of its units, without lowering it. It only ranks candidates.

Everything that is reported or compared with a budget comes from the engine (``layup.evaluate``). What is modelled are the rules
of the loop: who needs what (``layup.needs``), and when copies run (``layup.copies``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from layup.clock import Timeline, timeline
from layup.copies import Moves, copies, planned_copies
from layup.cost import Costs
from layup.needs import KEEP, Decisions, decisions_of
from minidnn.schedule.plan import Plan


class Estimate(NamedTuple):
    """What a plan would take. ``host_bytes``: of activations alone. ``least_seconds``, ``least_bytes``: no run of it takes less:
    the compute stream alone, or a link alone; what is kept, at the end of forward, and what is persistent."""

    seconds: float
    peak_bytes: int
    host_bytes: int
    least_seconds: float
    least_bytes: int


def estimate(costs: Costs, decisions: Decisions, slack: float = 1.0) -> Estimate:
    """Estimate a speed-centric plan.

    ``slack``: share of the time a copy needs for which the device copy stays (OFFLOAD) or exists before it is read
    (PREFETCH): 1 hides what can be hidden, 0 takes the fewest bytes and waits for every copy.
    """
    line = timeline(costs, decisions)
    return _estimate(line, copies(line, slack))


def estimate_plan(costs: Costs, plan: Plan) -> Estimate:
    """Estimate a plan with its own lags and distances, as if it were speed-centric and had all reuse on."""
    line = timeline(costs, decisions_of(costs, plan))
    return _estimate(line, planned_copies(line, plan))


def _estimate(line: Timeline, moves: Moves) -> Estimate:
    costs, _, need, time = line
    peak, kept = _bytes(line, moves)
    returning = sum([costs.back_seconds[k] for k in moves.keys]) / costs.back_crowding
    leaving = sum([costs.out_seconds[k] for k in moves.keys]) / costs.out_crowding
    # In the queue of the link a streamed parameter waits behind a copy back, and computation for it: part of its time.
    behind = 0.4 * returning if costs.load_seconds else 0.0
    again = float(costs.columns.weight_seconds[np.flatnonzero(np.array(need.remade) >= 0)].sum())
    links = max(costs.load_seconds + again + returning, costs.store_seconds + leaving)
    least = max(time.end, costs.load_seconds + returning, costs.store_seconds + leaving)
    host = int(costs.columns.footprint[moves.keys].sum())
    return Estimate(
        seconds=max(time.end + moves.seconds + behind, links),
        peak_bytes=peak,
        host_bytes=host,
        least_seconds=least * (1 - 1e-9),
        least_bytes=costs.base_bytes + kept,
    )


def _bytes(line: Timeline, moves: Moves) -> tuple[int, int]:
    """Most bytes alive at once, and those that are kept from forward to backward.

    The bytes of the keys are added up from where each is born and dies; what else is alive lies around them.
    """
    costs, decisions, need, _ = line
    count = len(costs.nodes)
    turned = 2 * count - 1  # a node's backward is at position ``turned - index``
    columns, size = costs.columns, costs.columns.footprint
    keep = np.array([decision is KEEP for decision in decisions])[columns.unit]
    first, last, until = np.array(need.first), np.array(need.last), columns.last_forward.copy()
    stored, back = first >= 0, first.copy()
    until[moves.keys] = np.maximum(until[moves.keys], moves.gone)
    back[moves.keys] = moves.here
    kept, away = stored & keep, stored & ~keep
    change = np.zeros(2 * count + 1, np.int64)
    for at, which, sign in (
        (columns.made, slice(None), 1),
        (until + 1, ~kept, -1),
        (turned - last + 1, stored, -1),
        (turned - back, away, 1),
    ):
        np.add.at(change, at[which], sign * size[which])
    live = np.cumsum(change)[:-1]
    peak = int((live + costs.around).max())
    remade = np.array(need.remade)
    busy = np.flatnonzero((remade >= 0) & (columns.recompute_workspace > 0))
    if len(busy):
        at = turned - remade[busy]
        peak = max(peak, int((live[at] + costs.entry[at] + columns.recompute_workspace[busy]).max()))
    return peak, int(size[kept].sum())
