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
row order but as ``schedule.arrange`` finds best. In a small schedule all count as living shortly.

In a deep net the copies to and from the host leave holes in the stack: what waits for its copy lives longer than most, and goes
before what lies above it. Where that costs much, such buffers get a stack of their own, which hangs from the high end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from minidnn.schedule.arrange import ENDLESS, Span, arrange
from minidnn.schedule.instruction import DEVICE, Buffer, Instruction, Op
from minidnn.spec import BLOCK_BYTES, round_up

_PAIRS = 300_000  # of buffers that live at the same time and are placed everywhere at once
_POOR = 100  # an extent beyond the peak by more than a part in so many of it is worth a second way


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
    begins, top = _pack(tall, [], short, peak)
    if top > peak + peak // _POOR and (passing := _passing(tall, spans)):
        staying = [span for span in tall if span not in passing]
        other, other_top = _pack(staying, [span for span in tall if span in passing], short, peak)
        begins = other if other_top < top else begins
    offsets: dict[Buffer, int] = {}
    extent = base
    for span, group in groups.items():
        at = base + begins[span] * BLOCK_BYTES
        for buffer in group:
            offsets[buffer] = at
            at += buffer.footprint
        extent = max(extent, at)
    return Placement(offsets, base, extent, peak * BLOCK_BYTES)


def _groups(rows: Sequence[Instruction], space: str) -> tuple[dict[Span, list[Buffer]], int]:
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
        Span(begin, end, sum(buffer.footprint for buffer in group) // BLOCK_BYTES): group
        for (begin, end), group in sorted(lives.items(), key=lambda item: item[0])
    }
    return groups, peak


def _longest_short_life(spans: Sequence[Span]) -> int:
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


def _pairs(spans: Sequence[Span]) -> int:
    """How many pairs of spans, given by their begin, meet."""
    ends = sorted(span.end for span in spans)
    ended = pairs = 0
    for index, span in enumerate(spans):
        while ends[ended] <= span.begin:
            ended += 1
        pairs += index - ended
    return pairs


def _passing(tall: Sequence[Span], spans: Sequence[Span]) -> set[Span]:
    """Of the long lives those that do not reach well to both sides of the peak: they leave the stack out of turn."""
    change = [0] * (max(span.end for span in spans) + 1)
    for span in spans:
        change[span.begin] += span.blocks
        change[span.end] -= span.blocks
    live = list(accumulate(change))
    peak = live.index(max(live))
    found = set()
    for span in tall:
        before, after = peak - span.begin + 1, span.end - peak
        if min(before, after) * 10 < max(before, after):
            found.add(span)
    return found


def _pack(low: Sequence[Span], high: Sequence[Span], short: Sequence[Span], peak: int) -> tuple[dict[Span, int], int]:
    """Stack ``low`` at the low end and ``high``, upside down, at the high one; arrange ``short`` between them.

    Returns the begin of each, and where the high end is.
    """
    begins, tops = _stack(low)
    hanging, depths = _stack(high)
    top = max([peak, *(tops or [0]), *(depths or [0]), *map(add, tops, depths)])
    floors = [max(tops[span.begin : span.end], default=0) for span in short]
    roofs = [max(depths[span.begin : span.end], default=0) for span in short]
    between = arrange(short, floors, roofs, top)
    top = max([top, *(between[span] + span.blocks + roof for span, roof in zip(short, roofs, strict=True))])
    begins.update(between)
    begins.update((span, top - begin - span.blocks) for span, begin in hanging.items())
    return begins, top


class _Holes:
    """A free list that coalesces: best fit from zero upwards, without an end."""

    def __init__(self) -> None:
        self.by_size = [(ENDLESS, 0)]  # blocks and begin of every hole
        self.end_of = {0: ENDLESS}
        self.begin_of = {ENDLESS: 0}

    @property
    def top(self) -> int:
        """From here on nothing is taken."""
        return self.begin_of[ENDLESS]

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


def _stack(spans: Sequence[Span]) -> tuple[dict[Span, int], list[int]]:
    """Place spans in row order at the low end. Returns the begin of each, and at every moment where the stack ends."""
    moments = max((span.end for span in spans), default=0)
    starting: list[list[Span]] = [[] for _ in range(moments)]
    ending: list[list[Span]] = [[] for _ in range(moments + 1)]
    for span in spans:
        starting[span.begin].append(span)
        ending[span.end].append(span)
    holes = _Holes()
    begins: dict[Span, int] = {}
    tops = []
    for moment in range(moments):
        for span in ending[moment]:
            holes.give(begins[span], span.blocks)
        for span in starting[moment]:
            begins[span] = holes.take(span.blocks)
        tops.append(holes.top)
    return begins, tops
