"""Arrange: offsets for buffers that live shortly, by trying orders. The part of placement that searches.

Largest first, each in the lowest gap that is free for its whole life (Pisarchyk and Lee 2020, "greedy by size"). Then those
that stick out above the goal move up in that order, and all are placed anew, a fixed number of times (squeaky wheel
optimisation, Joslin and Clements 1999), and at last single ones are moved in the order, by seeded dice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple

_VISITS = 500_000  # of pairs that live at the same time, while placing over and over
_TRIALS = 300
_LEAST_TRIALS = 5  # from the best order to start with, however many pairs there are
_GOOD = 1024  # an extent within a part in so many of the peak is good enough to stop trying

_SHIFT = 40
ENDLESS = (1 << _SHIFT) - 1
"""Blocks: more than a slab has."""


class Span(NamedTuple):
    """Some blocks, needed from moment ``begin`` until before moment ``end``."""

    begin: int
    end: int
    blocks: int


def arrange(spans: Sequence[Span], floors: Sequence[int], roofs: Sequence[int], goal: int) -> dict[Span, int]:
    """Place spans above their floors, each in the lowest gap free for its whole life. Returns the begin of each.

    ``roofs``: blocks that must be free above each. Tries orders until everything ends below ``goal``, or for a fixed amount of
    work, and takes the best.
    """
    meeting = _meeting(spans)
    visits = sum(map(len, meeting)) // 2 + len(spans) + 1
    trials = min(_TRIALS, _VISITS // visits) // 3
    numbers = range(len(spans))
    keys: tuple[Callable[[int], tuple[int, int]], ...] = (
        lambda i: (-spans[i].blocks, spans[i].begin - spans[i].end),
        lambda i: (-spans[i].blocks * (spans[i].end - spans[i].begin), 0),
        lambda i: (spans[i].begin - spans[i].end, -spans[i].blocks),
    )
    best: list[int] = []
    best_top = ENDLESS
    starts = []
    for key in keys:
        order = sorted(numbers, key=key)
        placed = _greedy(spans, floors, meeting, order)
        top = _top(placed, roofs)
        starts.append((top, order, placed))
        if top < best_top:
            best_top, best = top, placed
        if top <= goal:
            break
    starts.sort(key=lambda start: start[0])
    for turn, (_, order, placed) in enumerate(starts):
        for _ in range(trials if turn else max(trials, _LEAST_TRIALS)):
            if best_top <= goal + goal // _GOOD:
                break
            rank = [0.0] * len(spans)
            for position, i in enumerate(order):
                rank[i] = position / 2 if (placed[i] & ENDLESS) + roofs[i] > goal else position
            order = sorted(order, key=rank.__getitem__)
            placed = _greedy(spans, floors, meeting, order)
            top = _top(placed, roofs)
            if top < best_top:
                best_top, best = top, placed
    # What remains are orders in which one span, seldom the one that sticks out, should have come earlier or later.
    dice, order, reached = Random(0), starts[0][1], starts[0][0]
    for _ in range(3 * trials):
        if best_top <= goal + goal // _GOOD:
            break
        trial = list(order)
        trial.insert(dice.randrange(len(trial)), trial.pop(dice.randrange(len(trial))))
        placed = _greedy(spans, floors, meeting, trial)
        top = _top(placed, roofs)
        if top <= reached:
            reached, order = top, trial
        if top < best_top:
            best_top, best = top, placed
    return {span: place >> _SHIFT for span, place in zip(spans, best, strict=True)}


def _meeting(spans: Sequence[Span]) -> list[list[int]]:
    """For every span, given by their begin, the numbers of those that are alive at a common moment."""
    meeting: list[list[int]] = []
    alive: dict[int, None] = {}
    ends: list[tuple[int, int]] = []
    for number, span in enumerate(spans):
        while ends and ends[0][0] <= span.begin:
            del alive[heappop(ends)[1]]
        meeting.append(list(alive))
        for other in alive:
            meeting[other].append(number)
        alive[number] = None
        heappush(ends, (span.end, number))
    return meeting


def _greedy(
    spans: Sequence[Span], floors: Sequence[int], meeting: Sequence[Sequence[int]], order: Sequence[int]
) -> list[int]:
    """Place spans in a given order, each in the lowest gap. Returns ``begin << 40 | end`` of each, which sorts fast."""
    placed = [0] * len(spans)
    place_of = placed.__getitem__
    for number in order:
        blocks, begin = spans[number].blocks, floors[number]
        for other in sorted(filter(None, map(place_of, meeting[number]))):
            if (other >> _SHIFT) - begin >= blocks:
                break
            end = other & ENDLESS
            if end > begin:
                begin = end
        placed[number] = begin << _SHIFT | (begin + blocks)
    return placed


def _top(placed: Sequence[int], roofs: Sequence[int]) -> int:
    return max([(place & ENDLESS) + roof for place, roof in zip(placed, roofs, strict=True)], default=0)
