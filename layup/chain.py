"""The chain of ``auto``: candidate plans from ``keep`` down to the fewest bytes. It looks at no device budget.

Units are evicted in several orders, up to several amounts (``layup.eviction``). Then the gaps between these plans are filled:

* *Blends.* Between two plans: the leaner one for the first part of the net, the other for the rest.
* *Polish.* Single decisions are changed as long as that is faster in the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from typing import NamedTuple

from layup.context import Context
from layup.estimate import Estimate
from layup.eviction import SLACKS, Eviction, worth_moving
from layup.front import TARGETS, Front, Point
from layup.needs import KEEP, OFFLOAD, RECOMPUTE, Decisions
from layup.timed_plan import to_plan
from layup.unit import Unit
from minidnn.schedule.plan import Decision, Plan

_BLENDS = 24  # over the whole front
_SWEEPS = 4  # over all units, at most
_MOST_POLISHED = 400  # units; in a larger net one sweep would use up the effort


class Link(NamedTuple):
    """A plan of the chain, made by a call, and its estimate."""

    plan: Callable[[], Plan]
    found: Estimate


def chain(context: Context) -> list[Link]:
    """The plans of the chain with their estimates, from the most bytes to the fewest. A plan is made when it is called for."""
    front = Front(context)
    front.add_all(Eviction(context).families())
    _blend(front)
    _polish(front)
    best = front.best()
    last = front.add(_squeezed(context), 0.0)  # with all that is small: only where nothing else does
    if last is not None and last not in best:
        best.append(last)
    return [Link(partial(to_plan, context.costs, p.decisions, "auto", p.slack), p.found) for p in best]


def leanest(context: Context) -> Plan:
    """A plan of about the fewest bytes, found without search: all offloaded, or cut into the best number of segments."""
    costs = context.costs
    front, eviction = Front(context), Eviction(context)
    front.add(eviction.default, 1.0)
    front.add(_squeezed(context), 0.0)
    everything = [(unit, RECOMPUTE) for unit in costs.units if unit.stored]
    front.add_all((decisions, 0.0) for decisions in eviction.prefix(everything, math.inf, 2, 2))
    best = min(front.points.values(), key=lambda point: (point.found.peak_bytes, point.found.seconds))
    return to_plan(costs, best.decisions, "auto", best.slack)


def _squeezed(context: Context) -> list[Decision]:
    """All that is stored goes to the host, however small it is."""
    return [OFFLOAD if unit.stored else RECOMPUTE for unit in context.costs.units]


def _blend(front: Front) -> None:
    """Fill wide gaps of the front: early units as in the plan of fewer bytes, late ones as in that of more."""
    best = front.best()
    span = best[0].found.peak_bytes - best[-1].found.peak_bytes
    for more, fewer in pairwise(best):
        gap = more.found.peak_bytes - fewer.found.peak_bytes
        parts = min(8, gap * _BLENDS // max(span, 1))
        for part in range(1, parts):
            cut = len(front.costs.units) * part // parts
            front.add((*fewer.decisions[:cut], *more.decisions[cut:]), fewer.slack)


def _polish(front: Front) -> None:
    """For every target of bytes: change single decisions of the best candidate as long as that is faster."""
    movable = [unit for unit in front.costs.units if unit.stored or unit.keys]
    if len(movable) > _MOST_POLISHED:
        return
    best = front.best()
    low, high = best[-1].found.peak_bytes, best[0].found.peak_bytes
    bits = TARGETS.bit_length() - 1
    # 0, a half, a quarter, three quarters …: the effort may be used up before the last.
    for step in sorted(range(TARGETS), key=lambda n: f"{n:0{bits}b}"[::-1]):
        target = low + (high - low) * step // TARGETS
        fitting = [p for p in front.points.values() if p.found.peak_bytes <= target]
        if fitting and front.left > 0:
            fastest = min(fitting, key=lambda p: (p.found.seconds, p.found.peak_bytes))
            _polish_one(front, fastest, movable, target)


def _polish_one(front: Front, point: Point, movable: list[Unit], target: int) -> None:
    for _ in range(_SWEEPS):
        before = point
        for unit, decision in product(movable, (KEEP, OFFLOAD, RECOMPUTE)):
            if decision is point.decisions[unit.number] or (decision is OFFLOAD and not worth_moving(unit)):
                continue
            changed = list(point.decisions)
            changed[unit.number] = decision
            point = _better(front, point, changed, point.slack, target)
        for slack in SLACKS:
            point = _better(front, point, point.decisions, slack, target)
        if point is before:
            return


def _better(front: Front, point: Point, decisions: Decisions, slack: float, target: int) -> Point:
    """The other candidate if it fits the target and is faster, or as fast in fewer bytes; else the point itself."""
    other = front.add(decisions, slack)
    if other is None or other.found.peak_bytes > target:
        return point
    faster = other.found.seconds < point.found.seconds * (1 - 1e-9)
    leaner = other.found.seconds <= point.found.seconds and other.found.peak_bytes < point.found.peak_bytes
    return other if faster or leaner else point
