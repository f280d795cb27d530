"""Eviction: in which order the units of a net leave the device, and what becomes of each; every prefix of an order is a plan.

1. *Windows.* Units, dearest to recompute per byte first, are offloaded as long as all their copies hide: out, between the end of
   their forward and the end of the pass; back, between the turn and their first reader. Wider windows give further variants.
2. *Order.* What is offloaded for nothing goes first, earliest first; then the rest is recomputed, cheapest seconds per byte
   first, earliest first, so that what is nearest to the end of forward stays longest.
3. *Cuts.* Long stretches that would be remade at once are cut where the fewest bytes cross, by storing what crosses.
4. *Timing.* A copy may get all the time it needs, half of it, or none, which takes the fewest bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from layup.checkpoints import checkpoints, crossing
from layup.clock import clock
from layup.context import Context
from layup.cost import Costs
from layup.needs import KEEP, OFFLOAD, RECOMPUTE, Decisions, needs
from layup.unit import Unit
from minidnn.schedule.plan import Decision

SMALLEST_OFFLOAD = 32 << 10
"""Bytes below which nothing is offloaded while something else can be done: the latency of a copy dominates."""

WINDOWS = (0.0, 0.5, 1.0, 2.0, math.inf)
"""How much longer the copies may take than the link is free, as a factor."""

SLACKS = (1.0, 0.5, 0.0)
"""Shares of the time it needs that a copy gets."""


class Eviction:
    """The decisions that evicting the units of one net leads to.

    Attributes:
        default: nothing evicted; what no backward reads is not stored.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.costs = context.costs
        self.cuts = crossing(self.costs)
        self.default: Decisions = [KEEP if unit.stored else RECOMPUTE for unit in self.costs.units]

    def families(self) -> Iterator[tuple[Decisions, float]]:
        """Decisions and timings, the extremes first. A very deep net gets fewer, since one estimate takes longer."""
        units = self.costs.units
        everything = [OFFLOAD if unit.stored and worth_moving(unit) else RECOMPUTE for unit in units]
        yield self.default, 1.0
        for slack in SLACKS:
            yield everything, slack
        coarse = len(units) > 1500
        prefixes = 6 if coarse else 16
        first, factor = (8, 4) if coarse else (2, 2)
        for window in (1.0, 0.0, math.inf) if coarse else WINDOWS:
            order = self._order(window)
            total = sum(unit.footprint for unit, _ in order)
            for step in range(prefixes, 0, -1):
                for decisions in self.prefix(order, total * step / prefixes, first, factor):
                    fine = OFFLOAD in decisions and (step == prefixes or not coarse)
                    for slack in SLACKS if fine else SLACKS[:1]:
                        yield decisions, slack

    def _order(self, window: float) -> list[tuple[Unit, Decision]]:
        """Units in the order of their eviction, and what becomes of them."""
        costs = self.costs
        out = _offloads(costs, window, self.context.offload_bytes)
        rest = [unit for unit in costs.units if unit.stored and unit.number not in out]
        rest.sort(key=lambda unit: (_grade(unit), unit.number))
        first = [(unit, OFFLOAD) for unit in costs.units if unit.number in out]
        return [*first, *((unit, RECOMPUTE) for unit in rest)]

    def prefix(
        self, order: list[tuple[Unit, Decision]], nbytes: float, parts: int, factor: int
    ) -> Iterator[list[Decision]]:
        """The plan that evicts the first ``nbytes`` of an order, and with cuts into ``parts``, ``parts`` times ``factor`` …

        There are no more parts than would be as small as the largest unit that is remade.
        """
        decisions = list(self.default)
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
            small = {i for i in stored if not worth_moving(self.costs.units[i])}
            for moved in (stored - small, set()) if self.context.offload_bytes else (set(),):
                kept = {i: OFFLOAD if i in moved else KEEP for i in stored}
                yield [kept.get(i, d) if d is RECOMPUTE else d for i, d in enumerate(decisions)]
            parts *= factor


def _grade(unit: Unit) -> int:
    """Recompute-seconds per byte, in steps of a quarter, so that units of one kind are equal."""
    per_byte = unit.recompute_seconds / max(unit.footprint, 1)
    return round(math.log(max(per_byte, 1e-30), 1.25))


def worth_moving(unit: Unit) -> bool:
    """Whether a unit is large enough for its copies."""
    return unit.footprint >= SMALLEST_OFFLOAD


def _offloads(costs: Costs, window: float, limit: float) -> set[int]:
    """Units to offload so that all copies hide, the dearest to recompute per byte first, in at most ``limit`` pinned bytes.

    ``window``: by how much longer than the free time of the link the copies may take; 0: no unit; infinite: all that are not
    small.
    """
    if not window:
        return set()
    time = clock(costs, [-1] * len(costs.units))
    last = len(costs.nodes) - 1
    units = [unit for unit in costs.units if unit.stored and worth_moving(unit)]
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
