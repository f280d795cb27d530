"""Front: estimated candidates, and those among them that no other beats in both bytes and time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from layup.context import Context
from layup.estimate import Estimate, estimate
from layup.needs import Decisions
from minidnn.schedule.plan import Decision

TARGETS = 32
"""Steps of bytes, from the leanest candidate to the fastest, in which there is to be about one plan."""

_EFFORT = 600_000  # of estimates: units times their number
_NEAR = 1.001  # a candidate so little faster is not worth more bytes


class Point(NamedTuple):
    """A candidate: decisions by unit, how its copies are timed, and its estimate."""

    decisions: tuple[Decision, ...]
    slack: float
    found: Estimate


class Front:
    """All candidates so far, by decisions and timing; only so many are estimated.

    Attributes:
        left: estimates that may still be made.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.costs = context.costs
        self.left = max(60, _EFFORT // max(len(self.costs.units), 100))
        self.points: dict[tuple[tuple[Decision, ...], float], Point] = {}

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
        """Estimate candidates: their decisions and timings."""
        for decisions, slack in candidates:
            self.add(decisions, slack)

    def best(self) -> list[Point]:
        """Candidates from the most bytes to the fewest, each slower than the one before, at most one in a step of bytes."""
        ordered = sorted(self.points.values(), key=lambda p: (p.found.peak_bytes, p.found.seconds))
        seconds, front = math.inf, []
        for point in ordered:
            if point.found.seconds * _NEAR < seconds:
                seconds = point.found.seconds
                front.append(point)
        return _thin(front[::-1], 2 * TARGETS)


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
