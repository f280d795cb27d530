"""The chain of ``auto``: candidate plans from ``keep`` down to the fewest bytes. It looks at no device budget.

1. *Windows.* Units, dearest to recompute per byte first, are offloaded as long as all their copies hide: out, between the end of
   their forward and the end of the pass; back, between the turn and their first reader. Wider windows give further variants.
2. *Order.* What is offloaded for nothing goes first, earliest first; then the rest is recomputed, cheapest seconds per byte
   first, earliest first, so that what is nearest to the end of forward stays longest. Every prefix of that order is a plan.
3. *Cuts.* Long stretches that would be remade at once are cut where the fewest bytes cross, by storing what crosses.
4. *Timing.* A copy may get all the time it needs, half of it, or none, which takes the fewest bytes.
5. *Blends.* Between two plans: the leaner one for the first part of the net, the other for the rest.
6. *Polish.* Single decisions are changed as long as that is faster in the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from layup.checkpoints import checkpoints, crossing
from layup.context import Context
from layup.cost import Costs
from layup.estimate import KEEP, OFFLOAD, RECOMPUTE, Decisions, Estimate, clock, estimate, needs, to_plan
from layup.unit import Unit
from minidnn.schedule.plan import Decision, Plan

SMALLEST_OFFLOAD = 32 << 10
"""Bytes below which nothing is offloaded while something else can be done: the latency of a copy dominates."""

WINDOWS = (0.0, 0.5, 1.0, 2.0, math.inf)
SLACKS = (1.0, 0.5, 0.0)
TARGETS = 32
_BLENDS = 24
_SWEEPS = 4
_EFFORT = 600_000  # of estimates: units times their number
_NEAR = 1.001  # a candidate so little faster is not worth more bytes


class Link(NamedTuple):
    """A plan of the chain, made by a call, and its estimate."""

    plan: Callable[[], Plan]
    found: Estimate


class Point(NamedTuple):
    """A candidate: decisions by unit, how its copies are timed, and its estimate."""

    decisions: tuple[Decision, ...]
    slack: float
    found: Estimate


def chain(context: Context) -> list[Link]:
    """The plans of the chain with their estimates, from the most bytes to the fewest. A plan is made when it is called for."""
    search = _Search(context)
    search.add_all(search.families())
    search.blend()
    search.polish()
    front = search.front()
    squeezed = [OFFLOAD if unit.stored else RECOMPUTE for unit in context.costs.units]
    last = search.add(squeezed, 0.0)  # with all that is small: only where nothing else does
    if last is not None and last not in front:
        front.append(last)
    return [Link(partial(to_plan, context.costs, p.decisions, "auto", p.slack), p.found) for p in front]


def leanest(context: Context) -> Plan:
    """A plan of about the fewest bytes, found without search: all offloaded, or cut into the best number of segments."""
    costs = context.costs
    search = _Search(context)
    default = [KEEP if unit.stored else RECOMPUTE for unit in costs.units]
    search.add(default, 1.0)
    search.add([OFFLOAD if unit.stored else RECOMPUTE for unit in costs.units], 0.0)
    everything = [(unit, RECOMPUTE) for unit in costs.units if unit.stored]
    search.add_all((decisions, 0.0) for decisions in search.prefix(default, everything, math.inf, 2, 2))
    best = min(search.points.values(), key=lambda point: (point.found.peak_bytes, point.found.seconds))
    return to_plan(costs, best.decisions, "auto", best.slack)


class _Search:
    """All estimated candidates that no other beats in both bytes and time."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.costs = context.costs
        self.left = max(60, _EFFORT // max(len(self.costs.units), 100))
        self.points: dict[tuple[tuple[Decision, ...], float], Point] = {}
        self.cuts = crossing(self.costs)

    def add(self, decisions: Decisions, slack: float) -> Point | None:
        """Estimate a candidate; None if it takes too much pinned memory or the effort is used up."""
        key = (tuple(decisions), slack)
        if key in self.points:
            return self.points[key]
        if self.left <= 0:
            return None
        self.left -= 1
        found = estimate(self.costs, decisions, slack)
        if found.host_bytes > self.context.offload_bytes:
            return None
        point = self.points[key] = Point(*key, found)
        return point

    def add_all(self, candidates: Iterable[tuple[Decisions, float]]) -> None:
        """Estimate candidates."""
        for decisions, slack in candidates:
            self.add(decisions, slack)

    def front(self) -> list[Point]:
        """Candidates from the most bytes to the fewest, each slower than the one before, at most one in a step of bytes."""
        ordered = sorted(self.points.values(), key=lambda p: (p.found.peak_bytes, p.found.seconds))
        best, front = math.inf, []
        for point in ordered:
            if point.found.seconds * _NEAR < best:
                best = point.found.seconds
                front.append(point)
        return _thin(front[::-1], 2 * TARGETS)

    # -- families ---------------------------------------------------------------------------------------------------
    def families(self) -> Iterator[tuple[Decisions, float]]:
        """Decisions and timings, the extremes first. A very deep net gets fewer, since one estimate takes longer."""
        units = self.costs.units
        default = [KEEP if unit.stored else RECOMPUTE for unit in units]
        everything = [OFFLOAD if unit.stored and _worth_moving(unit) else RECOMPUTE for unit in units]
        yield default, 1.0
        for slack in SLACKS:
            yield everything, slack
        coarse = len(units) > 1500
        prefixes = 6 if coarse else 16
        first, factor = (8, 4) if coarse else (2, 2)
        for window in (1.0, 0.0, math.inf) if coarse else WINDOWS:
            order = self._order(window)
            total = sum(unit.footprint for unit, _ in order)
            for step in range(prefixes, 0, -1):
                for decisions in self.prefix(default, order, total * step / prefixes, first, factor):
                    fine = OFFLOAD in decisions and (step == prefixes or not coarse)
                    for slack in SLACKS if fine else SLACKS[:1]:
                        yield decisions, slack

    def _order(self, window: float) -> list[tuple[Unit, Decision]]:
        """Units in the order of their eviction, and what becomes of them."""
        costs = self.costs
        out = offloads(costs, window, self.context.offload_bytes)
        rest = [unit for unit in costs.units if unit.stored and unit.number not in out]
        rest.sort(key=lambda unit: (_grade(unit), unit.number))
        first = [(unit, OFFLOAD) for unit in costs.units if unit.number in out]
        return [*first, *((unit, RECOMPUTE) for unit in rest)]

    def prefix(
        self, default: Decisions, order: list[tuple[Unit, Decision]], nbytes: float, parts: int, factor: int
    ) -> Iterator[list[Decision]]:
        """The plan that evicts the first ``nbytes`` of the order, and with cuts into ``parts``, ``parts`` times ``factor`` ..."""
        decisions = list(default)
        size = 0
        for unit, decision in order:
            if size >= nbytes:
                break
            size += unit.footprint
            decisions[unit.number] = decision
        yield decisions
        remade = needs(self.costs, decisions).remade
        dropped = {unit.number for unit in self.costs.units if remade[unit.number] >= 0}
        total = sum(self.costs.units[i].footprint for i in dropped)
        largest = max((self.costs.units[i].footprint for i in dropped), default=0)
        while dropped and total / parts > largest:
            stored = checkpoints(self.costs, total / parts, self.cuts, dropped)
            small = {i for i in stored if not _worth_moving(self.costs.units[i])}
            for moved in (stored - small, set()) if self.context.offload_bytes else (set(),):
                kept = {i: OFFLOAD if i in moved else KEEP for i in stored}
                yield [kept.get(i, d) if d is RECOMPUTE else d for i, d in enumerate(decisions)]
            parts *= factor

    # -- blends and polish ------------------------------------------------------------------------------------------
    def blend(self) -> None:
        """Fill wide gaps of the front: early units as in the plan of fewer bytes, late ones as in that of more."""
        front = self.front()
        span = front[0].found.peak_bytes - front[-1].found.peak_bytes
        for more, fewer in pairwise(front):
            gap = more.found.peak_bytes - fewer.found.peak_bytes
            parts = min(8, gap * _BLENDS // max(span, 1))
            for part in range(1, parts):
                cut = len(self.costs.units) * part // parts
                self.add((*fewer.decisions[:cut], *more.decisions[cut:]), fewer.slack)

    def polish(self) -> None:
        """For every target of bytes: change single decisions of the best candidate as long as that is faster."""
        movable = [unit for unit in self.costs.units if unit.stored or unit.keys]
        if len(movable) > 400:
            return
        front = self.front()
        low, high = front[-1].found.peak_bytes, front[0].found.peak_bytes
        bits = TARGETS.bit_length() - 1
        for step in sorted(
            range(TARGETS), key=lambda n: f"{n:0{bits}b}"[::-1]
        ):  # 0, a half, a quarter, three quarters ...
            target = low + (high - low) * step // TARGETS
            fitting = [p for p in self.points.values() if p.found.peak_bytes <= target]
            if fitting and self.left > 0:
                self._polish(min(fitting, key=lambda p: (p.found.seconds, p.found.peak_bytes)), movable, target)

    def _polish(self, point: Point, movable: list[Unit], target: int) -> None:
        for _ in range(_SWEEPS):
            before = point
            for unit, decision in product(movable, (KEEP, OFFLOAD, RECOMPUTE)):
                if decision is point.decisions[unit.number] or (decision is OFFLOAD and not _worth_moving(unit)):
                    continue
                changed = list(point.decisions)
                changed[unit.number] = decision
                point = self._better(point, changed, point.slack, target)
            for slack in SLACKS:
                point = self._better(point, point.decisions, slack, target)
            if point is before:
                return

    def _better(self, point: Point, decisions: Decisions, slack: float, target: int) -> Point:
        """The other candidate if it fits the target and is faster, or as fast in fewer bytes; else the point itself."""
        other = self.add(decisions, slack)
        if other is None or other.found.peak_bytes > target:
            return point
        faster = other.found.seconds < point.found.seconds * (1 - 1e-9)
        leaner = other.found.seconds <= point.found.seconds and other.found.peak_bytes < point.found.peak_bytes
        return other if faster or leaner else point


def _grade(unit: Unit) -> int:
    """Recompute-seconds per byte, in steps of a quarter, so that units of one kind are equal."""
    per_byte = unit.recompute_seconds / max(unit.footprint, 1)
    return round(math.log(max(per_byte, 1e-30), 1.25))


def _worth_moving(unit: Unit) -> bool:
    return unit.footprint >= SMALLEST_OFFLOAD


def _thin(front: list[Point], limit: int) -> list[Point]:
    """At most about ``limit`` of a front: the fastest in each step of bytes, and both ends."""
    if len(front) <= limit:
        return front
    low, high = front[-1].found.peak_bytes, front[0].found.peak_bytes
    width = max(1, (high - low) // limit)
    steps: dict[int, Point] = {}
    for point in front[1:-1]:  # from the most bytes to the fewest: the last of a step takes the fewest bytes
        steps[(point.found.peak_bytes - low) // width] = point
    return [front[0], *steps.values(), front[-1]]


def offloads(costs: Costs, window: float, limit: float) -> set[int]:
    """Units to offload so that all copies hide, the dearest to recompute per byte first, in at most ``limit`` pinned bytes.

    ``window``: by how much longer than the free time of the link the copies may take; 0: no unit; infinite: all that are not
    small.
    """
    if not window:
        return set()
    time = clock(costs, [-1] * len(costs.units))
    last = len(costs.nodes) - 1
    units = [unit for unit in costs.units if unit.stored and _worth_moving(unit)]
    ready = np.array([time.forward[unit.last] for unit in units])
    wanted = np.array([time.backward[last - _first_reader(costs, unit)] for unit in units])
    by_ready, by_wanted = np.argsort(ready, kind="stable"), np.argsort(wanted, kind="stable")
    place_out, place_back = np.argsort(by_ready), np.argsort(by_wanted)
    out, back = time.turn - ready[by_ready], wanted[by_wanted] - time.turn
    chosen: set[int] = set()
    size = 0
    for i in sorted(range(len(units)), key=lambda i: (-_grade(units[i]), units[i].number)):
        unit = units[i]
        leaves = unit.offload_seconds * costs.out_crowding / window
        returns = unit.prefetch_seconds * costs.back_crowding / window
        p, q = place_out[i], place_back[i]
        if size + unit.footprint > limit or out[: p + 1].min() < leaves or back[q:].min() < returns:
            continue
        out[: p + 1] -= leaves
        back[q:] -= returns
        size += unit.footprint
        chosen.add(unit.number)
    return chosen


def _first_reader(costs: Costs, unit: Unit) -> int:
    return max(costs.keys[k].first_reader for k in unit.keys)
