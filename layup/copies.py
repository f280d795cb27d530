"""Copies: when the offloaded keys of a plan leave the device and come back, beside the compute stream that goes on meanwhile.

Each direction of the link is a queue, first in, first out. A copy is timed either by a share of the time that it needs, or by
the plan's own lags and distances.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from layup.clock import Timeline
from layup.needs import OFFLOAD
from minidnn.schedule.plan import Plan


class Moves(NamedTuple):
    """The copies of a plan, in the order of ``keys``. ``gone``: node after whose forward the device copy goes; ``here``: node
    before whose backward it is back. ``seconds``: how much longer they make the step."""

    keys: list[int]
    gone: list[int]
    here: list[int]
    seconds: float


def copies(line: Timeline, slack: float) -> Moves:
    """When the copies of a plan run if they are given ``slack`` of the time they need, and how much longer they make the step."""
    costs, _, need, time = line
    keys = moved(line)
    ends = _ends(line, keys)
    last = len(costs.nodes) - 1
    gone = []
    for k, end in zip(keys, ends, strict=True):
        made = costs.keys[k].made
        ready = time.forward[made]
        gone.append(min(max(bisect_left(time.forward, ready + slack * (end - ready)), made), last))
    order = _order(line, keys)
    wanted = [time.backward[last - need.first[k]] for k in keys]
    begins, latest = [0.0] * len(keys), float("inf")
    for i in reversed(order):  # as late as possible: the last one needed first
        latest = min(wanted[i], latest) - costs.back_seconds[keys[i]]
        begins[i] = wanted[i] - slack * (wanted[i] - latest)
    progress, delay = _prefetches(line, keys, order, out_ends=ends, wanted=wanted, begins=begins)
    here = [max(last - max(bisect_right(time.backward, p) - 1, 0), need.first[keys[i]]) for i, p in enumerate(progress)]
    # A device copy that goes before its copy has ended is waited for when its bytes are used again: about every second time.
    waits = (1.0 - slack) / 2 * sum([costs.out_seconds[k] for k in keys])
    return Moves(keys, gone, here, max(max(ends, default=0.0) - time.turn, delay, 0.0) + waits)


def planned_copies(line: Timeline, plan: Plan) -> Moves:
    """When the copies of a plan run by its own lags and distances: rows of the compute stream become nodes."""
    costs, _, need, time = line
    keys = moved(line)
    ends = _ends(line, keys)
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
    _, delay = _prefetches(line, keys, _order(line, keys), out_ends=ends, wanted=wanted, begins=begins)
    return Moves(keys, gone, here, max(max(ends, default=0.0) - time.turn, delay, 0.0) + waits)


def moved(line: Timeline) -> list[int]:
    """Keys that are offloaded. Keys are numbered in the order in which they are made."""
    costs, decisions, need, _ = line
    return sorted([k for u in costs.units if decisions[u.number] is OFFLOAD for k in u.keys if need.first[k] >= 0])


def _order(line: Timeline, keys: list[int]) -> list[int]:
    """In which order keys come back, by their places in ``keys``: as backward wants them."""
    return sorted(range(len(keys)), key=lambda i: -line.need.first[keys[i]])


def _ends(line: Timeline, keys: list[int]) -> list[float]:
    """When the copies out end, one after the other as their values are made."""
    costs, time = line.costs, line.time
    ends, free = [], 0.0
    for k in keys:
        free = max(free, time.forward[costs.keys[k].made]) + costs.out_seconds[k]
        ends.append(free)
    return ends


def _prefetches(
    line: Timeline,
    keys: list[int],
    order: list[int],
    *,
    out_ends: list[float],
    wanted: list[float],
    begins: list[float],
) -> tuple[list[float], float]:
    """Copies back in ``order``: how far computation is when each begins, and how long it waits in all.

    ``out_ends``: when a key's copy out has ended. ``wanted``: when it is read; ``begins``: when its copy back is to begin; both
    on the clock of the compute stream alone.
    """
    costs, time = line.costs, line.time
    progress, delay, free = [0.0] * len(keys), 0.0, time.turn
    for i in order:
        begin = max(free, begins[i] + delay, out_ends[i])
        progress[i] = min(max(begin - delay, time.turn), wanted[i])
        free = begin + costs.back_seconds[keys[i]]
        if free > wanted[i] + delay + 1e-12:
            delay = free - wanted[i]
    return progress, delay
