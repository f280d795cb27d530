"""Estimate: bytes and seconds of a plan from the costs of its units, without lowering it. It only ranks candidates.

Everything that is reported or compared with a budget comes from the engine (``layup.evaluate``). What is modelled here are
the rules of the loop: when a dropped value is remade (at the first backward that needs it or something made of it), until
when it stays, and when a copy, in a first-in-first-out link, must start to be in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from layup.cost import Costs, Unit
from minidnn.schedule.plan import Decision, Plan

KEEP, OFFLOAD, RECOMPUTE = Decision.KEEP, Decision.OFFLOAD, Decision.RECOMPUTE

Decisions = Sequence[Decision]
"""One decision for every unit, by its index."""


class Needs(NamedTuple):
    """When stored keys are needed in backward. By key: ``first`` and ``last`` node whose backward, or the remaking before it,
    reads it (highest and lowest index; -1: nobody). ``remade``: by unit, the node before whose backward it is remade; -1: not.
    """

    first: list[int]
    last: list[int]
    remade: list[int]


class Estimate(NamedTuple):
    """What a plan would take. ``lags`` and ``distances``: by layer, in rows of the compute stream, for its copies to be in time.

    ``late``: units for whose copy back computation waits.
    """

    seconds: float
    peak_bytes: int
    host_bytes: int
    lags: dict[str, int]
    distances: dict[str, int]
    late: frozenset[int]


def needs(costs: Costs, decisions: Decisions) -> Needs:
    """Who needs what, closed over the inputs of RECOMPUTE units. O(units)."""
    first = [key.first_reader for key in costs.keys]
    last = [key.last_reader for key in costs.keys]
    remade = [-1] * len(costs.units)
    for unit in reversed(costs.units):
        if decisions[unit.index] is not RECOMPUTE:
            continue
        at = max((first[k] for k in unit.keys), default=-1)
        if at < 0:
            continue
        remade[unit.index] = at
        for k in unit.sources:
            first[k] = max(first[k], at)
            last[k] = at if last[k] < 0 else min(last[k], at)
    return Needs(first, last, remade)


class Clock(NamedTuple):
    """Time and row numbers on the compute stream. ``forward``, ``forward_rows``: when a node's forward has ended.

    ``backward``, ``backward_rows``: when a node's backward, with all that is remade before it, begins.
    """

    forward: NDArray[np.float64]
    forward_rows: NDArray[np.int64]
    backward: NDArray[np.float64]
    backward_rows: NDArray[np.int64]
    turn: float
    end: float


def clock(costs: Costs, remade: Sequence[int]) -> Clock:
    """Run the compute stream alone."""
    seconds, rows = costs.backward_seconds.copy(), costs.backward_rows.copy()
    for unit in costs.units:
        at = remade[unit.index]
        if at >= 0:
            seconds[at] += unit.recompute_seconds
            rows[at] += unit.recompute_rows
    forward = np.cumsum(costs.forward_seconds)
    turn = float(forward[-1])
    left, rows_left = np.cumsum(seconds), np.cumsum(rows)  # from a node's backward to the end, last node first
    end = turn + float(left[-1])
    backward, backward_rows = end - left, rows_left[-1] - rows_left
    return Clock(forward, np.cumsum(costs.forward_rows), backward, backward_rows, turn, end)


def estimate(costs: Costs, decisions: Decisions, slack: float = 1.0) -> Estimate:
    """Estimate a speed-centric plan.

    ``slack``: share of the time a copy needs for which the device copy stays (OFFLOAD) or exists before it is read
    (PREFETCH): 1 hides what can be hidden, 0 takes the fewest bytes and waits for every copy.
    """
    need = needs(costs, decisions)
    time = clock(costs, need.remade)
    moved = [
        k
        for unit in costs.units
        if decisions[unit.index] is OFFLOAD
        for k in unit.keys
        if need.first[k] >= 0
    ]
    out, lags, gone, lag_nodes = _offloads(costs, moved, time, slack)
    back, distances, here, late = _prefetches(costs, moved, need, time, slack, gone)
    change = np.zeros(2 * len(costs.nodes) + 1, np.int64)
    moving = dict(zip(moved, range(len(moved)), strict=True))
    for unit in costs.units:
        decision = decisions[unit.index]
        for k in unit.keys:
            key = costs.keys[k]
            first, last = need.first[k], need.last[k]
            change[key.made] += key.footprint
            if first < 0 or decision is not KEEP:
                until = key.last_forward
                if k in moving:
                    until = max(until, lag_nodes[moving[k]])
                    change[here[moving[k]]] += key.footprint
                elif first >= 0:
                    change[costs.position(first)] += key.footprint
                change[until + 1] -= key.footprint
            if first >= 0:
                change[costs.position(last) + 1] -= key.footprint
    live = np.cumsum(change)[:-1] + costs.around
    # A device copy that leaves before the copy has ended is waited for when its bytes are used again: about every second time.
    waits = (1.0 - slack) / 2 * sum(costs.gpu.copy_seconds(costs.keys[k].nbytes, "d2h") for k in moved)
    return Estimate(
        time.end + max(out, back) + waits,
        int(live.max()),
        sum(costs.keys[k].footprint for k in moved),
        lags,
        distances,
        frozenset(costs.keys[k].unit for k in late),
    )


def _offloads(
    costs: Costs, moved: list[int], time: Clock, slack: float
) -> tuple[float, dict[str, int], list[float], list[int]]:
    """Copies out, in the order in which they are made: seconds after the end of forward, lags, ends, nodes of these."""
    lags: dict[str, int] = {}
    ends, nodes, free = [], [], 0.0
    for k in sorted(moved, key=lambda k: costs.keys[k].made):
        key = costs.keys[k]
        ready = float(time.forward[key.made])
        free = max(free, ready) + costs.gpu.copy_seconds(key.nbytes, "d2h")
        ends.append(free)
        until = int(np.searchsorted(time.forward, ready + slack * (free - ready)))
        until = min(max(until, key.made), len(costs.nodes) - 1)
        layer = costs.nodes[key.made].name
        lags[layer] = max(lags.get(layer, 0), int(time.forward_rows[until] - time.forward_rows[key.made]))
        nodes.append(until)
    order = {k: i for i, k in enumerate(sorted(moved, key=lambda k: costs.keys[k].made))}
    places = [order[k] for k in moved]
    return max(0.0, free - time.turn), lags, [ends[i] for i in places], [nodes[i] for i in places]


def _prefetches(
    costs: Costs, moved: list[int], need: Needs, time: Clock, slack: float, gone: list[float]
) -> tuple[float, dict[str, int], list[int], list[int]]:
    """Copies back, in the order in which they are needed: seconds compute waits, distances, positions, late keys."""
    order = sorted(range(len(moved)), key=lambda i: (-need.first[moved[i]], costs.keys[moved[i]].made))
    wanted = [float(time.backward[need.first[moved[i]]]) for i in order]
    takes = [costs.gpu.copy_seconds(costs.keys[moved[i]].nbytes, "h2d") for i in order]
    starts, latest = [0.0] * len(order), np.inf
    for j in reversed(range(len(order))):
        latest = starts[j] = min(wanted[j], latest) - takes[j]
    distances: dict[str, int] = {}
    here = [0] * len(moved)
    late: list[int] = []
    delay, free = 0.0, time.turn
    towards = time.backward[::-1]  # ascending: last node first
    for j, i in enumerate(order):
        k = moved[i]
        begin = max(free, wanted[j] - slack * (wanted[j] - starts[j]) + delay, gone[i], time.turn)
        progress = min(max(begin - delay, time.turn), wanted[j])
        free = begin + takes[j]
        if free > wanted[j] + delay + 1e-12:
            delay = free - wanted[j]
            late.append(k)
        first = need.first[k]
        step = int(np.searchsorted(towards, progress, side="right")) - 1
        node = max(len(costs.nodes) - 1 - max(step, 0), first)
        layer = costs.nodes[costs.keys[k].made].name
        rows = int(time.backward_rows[first] - time.backward_rows[node])
        distances[layer] = max(distances.get(layer, 0), rows)
        here[i] = costs.position(node)
    return delay, distances, here, late


def to_plan(costs: Costs, decisions: Decisions, policy: str, slack: float = 1.0, *, memory_centric: bool = False) -> Plan:
    """The plan of these decisions, with lags and distances for its copies. Decisions that move nothing are left out."""
    need = needs(costs, decisions)
    chosen = {unit.name: decisions[unit.index] for unit in costs.units if acts(unit, decisions[unit.index], need)}
    found = estimate(costs, decisions, slack)
    return Plan(
        chosen, policy=policy, lags=found.lags, distances=found.distances, memory_centric=memory_centric
    )


def acts(unit: Unit, decision: Decision, need: Needs) -> bool:
    """Whether a decision other than KEEP does anything: something that the unit makes is needed in backward."""
    return decision is not KEEP and any(need.first[k] >= 0 for k in unit.keys)
