"""Estimate: bytes and seconds of a plan from the costs of its units, without lowering it. It only ranks candidates.

Everything that is reported or compared with a budget comes from the engine (``layup.evaluate``). What is modelled here are
the rules of the loop: when a dropped value is remade (at the first backward that needs it or something made of it), until
when it stays, and when a copy, in a first-in-first-out link, must start to be in time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from layup.cost import Costs
from layup.unit import Unit
from minidnn.schedule.plan import Decision, Plan

KEEP, OFFLOAD, RECOMPUTE = Decision.KEEP, Decision.OFFLOAD, Decision.RECOMPUTE

Decisions = Sequence[Decision]
"""One decision for every unit, by its number."""


class Needs(NamedTuple):
    """When stored keys are needed in backward. By key: ``first`` and ``last`` node whose backward, or the remaking before it,
    reads it (highest and lowest index; -1: nobody). ``remade``: by unit, the node before whose backward it is remade; -1: not.
    """

    first: list[int]
    last: list[int]
    remade: list[int]


class Clock(NamedTuple):
    """Time and row numbers on the compute stream. ``forward``, ``forward_rows``: when a node's forward has ended.

    ``backward``, ``backward_rows``: when a node's backward, with all that is remade before it, begins, from the last node on.
    """

    forward: list[float]
    forward_rows: list[int]
    backward: list[float]
    backward_rows: list[int]
    turn: float
    end: float


class Moves(NamedTuple):
    """The copies of a plan, in the order of ``keys``. ``gone``: node after whose forward the device copy goes; ``here``: node
    before whose backward it is back. ``seconds``: how much longer they make the step. ``late``: keys computation waits for."""

    keys: list[int]
    gone: list[int]
    here: list[int]
    seconds: float
    late: list[int]


class Estimate(NamedTuple):
    """What a plan would take. ``host_bytes``: of activations alone. ``least_seconds``, ``least_bytes``: no run of it takes less:
    the compute stream alone, or a link alone; what is kept, at the end of forward, and what is persistent."""

    seconds: float
    peak_bytes: int
    host_bytes: int
    least_seconds: float
    least_bytes: int


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


def clock(costs: Costs, remade: Sequence[int]) -> Clock:
    """Run the compute stream alone."""
    seconds, rows, at = np.array(costs.backward_seconds), np.array(costs.backward_rows), np.array(remade)
    units = np.flatnonzero(at >= 0)
    np.add.at(seconds, at[units], costs.columns.recompute_seconds[units])
    np.add.at(rows, at[units], costs.columns.recompute_rows[units])
    turn = costs.forward_ends[-1]
    # Backward runs from the last node to the first: what a node's prefix sums to is what is left when it begins.
    left, rows_left = np.cumsum(seconds), np.cumsum(rows)
    end = turn + float(left[-1])
    return Clock(
        costs.forward_ends,
        costs.forward_row_ends,
        (end - left[::-1]).tolist(),
        (rows_left[-1] - rows_left[::-1]).tolist(),
        turn,
        end,
    )


def estimate(costs: Costs, decisions: Decisions, slack: float = 1.0) -> Estimate:
    """Estimate a speed-centric plan.

    ``slack``: share of the time a copy needs for which the device copy stays (OFFLOAD) or exists before it is read
    (PREFETCH): 1 hides what can be hidden, 0 takes the fewest bytes and waits for every copy.
    """
    need = needs(costs, decisions)
    time = clock(costs, need.remade)
    return _estimate(costs, decisions, need, time, copies(costs, decisions, need, time, slack))


def estimate_plan(costs: Costs, plan: Plan) -> Estimate:
    """Estimate a plan with its own lags and distances, as if it were speed-centric and had all reuse on."""
    decisions = [plan.decision(unit.name) for unit in costs.units]
    need = needs(costs, decisions)
    time = clock(costs, need.remade)
    return _estimate(costs, decisions, need, time, _planned_copies(costs, plan, decisions, need, time))


def _estimate(costs: Costs, decisions: Decisions, need: Needs, time: Clock, moves: Moves) -> Estimate:
    count = len(costs.nodes)
    turned = 2 * count - 1  # a node's backward is at position ``turned - index``
    columns = costs.columns
    keep = np.array([decision is KEEP for decision in decisions])[columns.unit]
    first, last, until = np.array(need.first), np.array(need.last), columns.last_forward.copy()
    stored, back = first >= 0, first.copy()
    until[moves.keys] = np.maximum(until[moves.keys], moves.gone)
    back[moves.keys] = moves.here
    change = np.zeros(2 * count + 1, np.int64)
    size, kept, away = columns.footprint, stored & keep, stored & ~keep
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
    again = np.flatnonzero(remade >= 0)
    busy = again[columns.recompute_workspace[again] > 0]
    if len(busy):
        at = turned - remade[busy]
        peak = max(peak, int((live[at] + costs.entry[at] + columns.recompute_workspace[busy]).max()))
    host = int(size[moves.keys].sum())
    returning = sum([costs.back_seconds[k] for k in moves.keys]) / costs.back_crowding
    leaving = sum([costs.out_seconds[k] for k in moves.keys]) / costs.out_crowding
    # In the queue of the link a streamed parameter waits behind a copy back, and computation for it: part of its time.
    behind = 0.4 * returning if costs.load_seconds else 0.0
    in_all = max(
        costs.load_seconds + float(columns.weight_seconds[again].sum()) + returning, costs.store_seconds + leaving
    )
    least = max(time.end, costs.load_seconds + returning, costs.store_seconds + leaving)
    held = costs.base_bytes + int(size[kept].sum())
    return Estimate(max(time.end + moves.seconds + behind, in_all), peak, host, least * (1 - 1e-9), held)


def copies(costs: Costs, decisions: Decisions, need: Needs, time: Clock, slack: float) -> Moves:
    """When the copies of a plan run if they are given ``slack`` of the time they need, and how much longer they make the step."""
    keys = _moved(costs, decisions, need)
    ends = _ends(costs, keys, time)
    last = len(costs.nodes) - 1
    gone = []
    for k, end in zip(keys, ends, strict=True):
        made = costs.keys[k].made
        ready = time.forward[made]
        gone.append(min(max(bisect_left(time.forward, ready + slack * (end - ready)), made), last))
    order = sorted(range(len(keys)), key=lambda i: -need.first[keys[i]])
    wanted = [time.backward[last - need.first[k]] for k in keys]
    begins, latest = [0.0] * len(keys), float("inf")
    for i in reversed(order):  # as late as possible: the last one needed first
        latest = min(wanted[i], latest) - costs.back_seconds[keys[i]]
        begins[i] = wanted[i] - slack * (wanted[i] - latest)
    progress, delay, late = _prefetches(costs, keys, order, ends, wanted, begins, time)
    here = [max(last - max(bisect_right(time.backward, p) - 1, 0), need.first[keys[i]]) for i, p in enumerate(progress)]
    # A device copy that goes before its copy has ended is waited for when its bytes are used again: about every second time.
    waits = (1.0 - slack) / 2 * sum([costs.out_seconds[k] for k in keys])
    return Moves(keys, gone, here, max(max(ends, default=0.0) - time.turn, delay, 0.0) + waits, late)


def _planned_copies(costs: Costs, plan: Plan, decisions: Decisions, need: Needs, time: Clock) -> Moves:
    """When the copies of a plan run by its own lags and distances: rows of the compute stream become nodes."""
    keys = _moved(costs, decisions, need)
    ends = _ends(costs, keys, time)
    last = len(costs.nodes) - 1
    gone, here, wanted, begins = [], [], [], []
    waits = 0.0
    for k, end in zip(keys, ends, strict=True):
        made, first = costs.keys[k].made, need.first[k]
        layer = costs.nodes[made].name
        until = time.forward_rows[made] + plan.lags.get(layer, plan.lag)
        gone.append(min(max(bisect_left(time.forward_rows, until), made), last))
        back = time.backward_rows[last - first] - plan.distances.get(layer, plan.distance)
        step = min(max(bisect_right(time.backward_rows, back) - 1, 0), last - first)
        here.append(last - step)
        wanted.append(time.backward[last - first])
        begins.append(time.backward[step])
        waits += min(max(end - time.forward[gone[-1]], 0.0), costs.out_seconds[k]) / 2
    order = sorted(range(len(keys)), key=lambda i: -need.first[keys[i]])
    _, delay, late = _prefetches(costs, keys, order, ends, wanted, begins, time)
    return Moves(keys, gone, here, max(max(ends, default=0.0) - time.turn, delay, 0.0) + waits, late)


def _moved(costs: Costs, decisions: Decisions, need: Needs) -> list[int]:
    """Keys that are offloaded. Keys are numbered in the order in which they are made."""
    return sorted([k for u in costs.units if decisions[u.number] is OFFLOAD for k in u.keys if need.first[k] >= 0])


def _ends(costs: Costs, keys: list[int], time: Clock) -> list[float]:
    """When the copies out end, one after the other as their values are made."""
    ends, free = [], 0.0
    for k in keys:
        free = max(free, time.forward[costs.keys[k].made]) + costs.out_seconds[k]
        ends.append(free)
    return ends


def _prefetches(
    costs: Costs,
    keys: list[int],
    order: list[int],
    ends: list[float],
    wanted: list[float],
    begins: list[float],
    time: Clock,
) -> tuple[list[float], float, list[int]]:
    """Copies back in ``order``: how far computation is when each begins, how long it waits in all, and the late keys.

    ``wanted``: when a key is read; ``begins``: when its copy back is to begin. Both on the clock of the compute stream alone.
    """
    progress, late = [0.0] * len(keys), []
    delay, free = 0.0, time.turn
    for i in order:
        begin = max(free, begins[i] + delay, ends[i])
        progress[i] = min(max(begin - delay, time.turn), wanted[i])
        free = begin + costs.back_seconds[keys[i]]
        if free > wanted[i] + delay + 1e-12:
            delay = free - wanted[i]
            late.append(keys[i])
    return progress, delay, late


def to_plan(
    costs: Costs, decisions: Decisions, policy: str, slack: float = 1.0, *, memory_centric: bool = False
) -> Plan:
    """The plan of these decisions, with lags and distances for its copies. Decisions that move nothing are left out."""
    need = needs(costs, decisions)
    time = clock(costs, need.remade)
    moves = copies(costs, decisions, need, time, slack)
    return timed_plan(costs, decisions, policy, moves, need, time, memory_centric=memory_centric)


def timed_plan(
    costs: Costs,
    decisions: Decisions,
    policy: str,
    moves: Moves,
    need: Needs,
    time: Clock,
    *,
    memory_centric: bool = False,
) -> Plan:
    """The plan of these decisions whose copies run as ``moves`` says: nodes become rows of the compute stream."""
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


def acts(unit: Unit, decision: Decision, need: Needs) -> bool:
    """Whether a decision other than KEEP does anything: something that the unit makes is needed in backward."""
    return decision is not KEEP and any(need.first[k] >= 0 for k in unit.keys)
