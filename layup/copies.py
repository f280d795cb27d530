"""Copies: when the offloaded keys of a plan leave the device and come back, beside the compute stream that goes on meanwhile.

Each direction of the link is a queue, first in, first out. A copy is timed either by a share of the time that it needs, or by
the plan's own lags and distances.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from layup.clock import Clock
from layup.cost import Costs
from layup.needs import OFFLOAD, Decisions, Needs
from minidnn.schedule.plan import Plan


class Moves(NamedTuple):
    """The copies of a plan, in the order of ``keys``. ``gone``: node after whose forward the device copy goes; ``here``: node
    before whose backward it is back. ``seconds``: how much longer they make the step. ``late``: keys computation waits for."""

    keys: list[int]
    gone: list[int]
    here: list[int]
    seconds: float
    late: list[int]


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


def planned_copies(costs: Costs, plan: Plan, decisions: Decisions, need: Needs, time: Clock) -> Moves:
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
