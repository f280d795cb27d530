"""Placement: an offset for every buffer, from its ALLOC and FREE rows. A static arena: nothing is decided while rows run.

Before, with sizes in blocks of 512 bytes    After: blocks of each; the extent is 9, which is also the peak
    0 ALLOC y   (4)                              y   1..5  beside ws, which lives as long
    1 ALLOC ws  (1)                              ws  0..1
    2 ALLOC dx  (4)                              dx  5..9
    3 FREE  ws
    4 FREE  y
    5 ALLOC z   (4)                              z   0..4

What lives long (from forward to backward) is stacked at the low end in row order, by best fit into a coalescing free list;
since backward goes back the way forward came, the stack has few holes. What lives shortly is placed above the stack, not in
row order but largest first, each in the lowest gap that is free for its whole life (Pisarchyk and Lee 2020, "greedy by
size"). Then those that stick out above the peak move up in that order, and all are placed anew, a fixed number of times
(squeaky wheel optimisation, Joslin and Clements 1999), and at last single ones are moved in the order, by seeded
dice. In a small schedule all count as living shortly.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple

from minidnn.schedule.instruction import DEVICE, Buffer, Instruction, Op
from minidnn.spec import BLOCK_BYTES, round_up

_PAIRS = 300_000  # of buffers that live at the same time and are placed everywhere at once
_VISITS = 500_000  # of such pairs while placing over and over
_TRIALS = 300
_LEAST_TRIALS = 5  # from the best order to start with, however many pairs there are
_GOOD = 1024  # an extent within a part in so many of the peak is good enough to stop trying

_SHIFT = 40
_ENDLESS = (1 << _SHIFT) - 1  # blocks; more than a slab has


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the buffers of one space are.

    ``offsets``: multiples of 512, none below ``base``. ``extent``: the highest end, at least ``base``. ``peak``: the most bytes
    alive at once, without ``base``: no placement has an extent below ``base + peak``.
    """

    offsets: dict[Buffer, int]
    base: int
    extent: int
    peak: int

    @property
    def fragmentation(self) -> int:
        """Bytes of the extent that not even the peak needs."""
        return self.extent - self.base - self.peak


def place(rows: Sequence[Instruction], *, base: int = 0, space: str = DEVICE) -> Placement:
    """Place the buffers of ``space`` that have ALLOC and FREE rows, above ``base`` bytes. Persistent ones are not its business.

    A buffer without a FREE row lives to the end. The same rows always have the same placement; no budget has a say in it.
    Near-linear in the rows.
    """
    base = round_up(base)
    groups, peak = _groups(rows, space)
    spans = list(groups)
    longest = _longest_short_life(spans)
    tall = [span for span in spans if span.end - span.begin > longest]
    short = [span for span in spans if span.end - span.begin <= longest]
    begins, tops = _stack(tall)
    floors = [max(tops[span.begin : span.end], default=0) for span in short]
    begins.update(_arrange(short, floors, max([peak, *tops])))
    offsets: dict[Buffer, int] = {}
    extent = base
    for span, group in groups.items():
        at = base + begins[span] * BLOCK_BYTES
        for buffer in group:
            offsets[buffer] = at
            at += buffer.footprint
        extent = max(extent, at)
    return Placement(offsets, base, extent, peak * BLOCK_BYTES)


class _Span(NamedTuple):
    """Some blocks, needed from moment ``begin`` until before moment ``end``."""

    begin: int
    end: int
    blocks: int


def _groups(rows: Sequence[Instruction], space: str) -> tuple[dict[_Span, list[Buffer]], int]:
    """Return the buffers grouped by life, and the peak in blocks.

    Time is counted in moments: a moment begins with an ALLOC row that follows a FREE row. All that is alive in a moment is
    alive together at its end. Buffers of equal life are placed side by side, as one.
    """
    born: dict[Buffer, int] = {}
    lives: dict[tuple[int, int], list[Buffer]] = {}
    moment = live = peak = 0
    freed = False
    for row in rows:
        buffer = row.buffer
        if buffer is None or buffer.space != space:
            continue
        if row.op is Op.ALLOC:
            moment += freed
            freed = False
            born[buffer] = moment
            live += buffer.footprint // BLOCK_BYTES
            peak = max(peak, live)
        elif row.op is Op.FREE:
            freed = True
            lives.setdefault((born.pop(buffer), moment + 1), []).append(buffer)
            live -= buffer.footprint // BLOCK_BYTES
    for buffer, begin in born.items():
        lives.setdefault((begin, moment + 1), []).append(buffer)
    groups = {
        _Span(begin, end, sum(buffer.footprint for buffer in group) // BLOCK_BYTES): group
        for (begin, end), group in sorted(lives.items(), key=lambda item: item[0])
    }
    return groups, peak


def _longest_short_life(spans: Sequence[_Span]) -> int:
    """The longest life that counts as short: as long as there are not too many pairs of short ones that meet."""
    lengths = sorted({span.end - span.begin for span in spans})
    few, many = 0, len(lengths)  # as many of the lengths certainly make few pairs, and certainly too many
    while few < many:
        middle = (few + many + 1) // 2
        if _pairs([span for span in spans if span.end - span.begin <= lengths[middle - 1]]) <= _PAIRS:
            few = middle
        else:
            many = middle - 1
    return lengths[few - 1] if few else 0


def _pairs(spans: Sequence[_Span]) -> int:
    """How many pairs of spans, given by their begin, meet."""
    ends = sorted(span.end for span in spans)
    ended = pairs = 0
    for index, span in enumerate(spans):
        while ends[ended] <= span.begin:
            ended += 1
        pairs += index - ended
    return pairs


class _Holes:
    """A free list that coalesces: best fit from zero upwards, without an end."""

    def __init__(self) -> None:
        self.by_size = [(_ENDLESS, 0)]  # blocks and begin of every hole
        self.end_of = {0: _ENDLESS}
        self.begin_of = {_ENDLESS: 0}

    @property
    def top(self) -> int:
        """From here on nothing is taken."""
        return self.begin_of[_ENDLESS]

    def take(self, blocks: int) -> int:
        """Cut a range from the smallest hole that has it, the lowest of equals. Returns its begin."""
        _, begin = self.by_size[bisect_left(self.by_size, (blocks, 0))]
        end = self._remove(begin)
        if end - begin > blocks:
            self._add(begin + blocks, end)
        return begin

    def give(self, begin: int, blocks: int) -> None:
        """Return a range, and join it with the holes beside it."""
        end = begin + blocks
        if end in self.end_of:
            end = self._remove(end)
        if begin in self.begin_of:
            begin = self.begin_of[begin]
            self._remove(begin)
        self._add(begin, end)

    def _add(self, begin: int, end: int) -> None:
        insort(self.by_size, (end - begin, begin))
        self.end_of[begin], self.begin_of[end] = end, begin

    def _remove(self, begin: int) -> int:
        end = self.end_of.pop(begin)
        del self.begin_of[end], self.by_size[bisect_left(self.by_size, (end - begin, begin))]
        return end


def _stack(spans: Sequence[_Span]) -> tuple[dict[_Span, int], list[int]]:
    """Place spans in row order at the low end. Returns the begin of each, and at every moment where the stack ends."""
    moments = max((span.end for span in spans), default=0)
    starting: list[list[_Span]] = [[] for _ in range(moments)]
    ending: list[list[_Span]] = [[] for _ in range(moments + 1)]
    for span in spans:
        starting[span.begin].append(span)
        ending[span.end].append(span)
    holes = _Holes()
    begins: dict[_Span, int] = {}
    tops = []
    for moment in range(moments):
        for span in ending[moment]:
            holes.give(begins[span], span.blocks)
        for span in starting[moment]:
            begins[span] = holes.take(span.blocks)
        tops.append(holes.top)
    return begins, tops


def _arrange(spans: Sequence[_Span], floors: Sequence[int], goal: int) -> dict[_Span, int]:
    """Place spans above their floors, each in the lowest gap free for its whole life. Returns the begin of each.

    Tries orders until everything ends below ``goal``, or for a fixed amount of work, and takes the best.
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
    best_top = _ENDLESS
    starts = []
    for key in keys:
        order = sorted(numbers, key=key)
        placed = _greedy(spans, floors, meeting, order)
        top = _top(placed)
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
                rank[i] = position / 2 if placed[i] & _ENDLESS > goal else position
            order = sorted(order, key=rank.__getitem__)
            placed = _greedy(spans, floors, meeting, order)
            top = _top(placed)
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
        top = _top(placed)
        if top <= reached:
            reached, order = top, trial
        if top < best_top:
            best_top, best = top, placed
    return {span: place >> _SHIFT for span, place in zip(spans, best, strict=True)}


def _meeting(spans: Sequence[_Span]) -> list[list[int]]:
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
    spans: Sequence[_Span], floors: Sequence[int], meeting: Sequence[Sequence[int]], order: Sequence[int]
) -> list[int]:
    """Place spans in a given order, each in the lowest gap. Returns ``begin << 40 | end`` of each, which sorts fast."""
    placed = [0] * len(spans)
    place_of = placed.__getitem__
    for number in order:
        blocks, begin = spans[number].blocks, floors[number]
        for other in sorted(filter(None, map(place_of, meeting[number]))):
            if (other >> _SHIFT) - begin >= blocks:
                break
            begin = max(begin, other & _ENDLESS)
        placed[number] = begin << _SHIFT | (begin + blocks)
    return placed


def _top(placed: Sequence[int]) -> int:
    return max((place & _ENDLESS for place in placed), default=0)
