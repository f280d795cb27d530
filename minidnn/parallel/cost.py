"""Cost: the time of a training step on N ranks, by the alpha-beta model: a message of n bytes takes alpha + n / beta.

The rows are the engine's own. For ``ring_delayed`` and ``all_reduce`` rank 0's schedule is simulated with every ring step
priced so, which says what hides behind computation. Rank 0 stands for all, though each begins with another chunk: what is
exchanged together takes its ring steps from when backward has made the last of it, because one rank begins with that. In
``ring`` nothing hides, since the chunk of the first layers, which backward makes last and forward needs first, has all
2 (N - 1) ring steps before it; some ranks begin the next step a little earlier than that says
(``tests/unit/test_ring_cost.py`` simulates all ranks together).
``master_slave`` and ``tree`` exchange after backward, and their ranks differ: the rows of all ranks are played against each
other, and the last one to end decides.
A rank's link carries one message each way at a time. Nothing is known here of the host's time to launch rows, of switches
that are shared, or of ranks that compete for one memory: ``scripts/reproduce/ring.py`` puts measurements beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from minidnn.errors import UserError
from minidnn.parallel.rows import EXCHANGES
from minidnn.parallel.step import ParallelStep
from minidnn.profiles import D2H, H2D, Profile
from minidnn.schedule.instruction import COMM, COMPUTE, Instruction, Op, Wait
from minidnn.schedule.persistent import Persistent
from minidnn.schedule.plan import keep
from minidnn.schedule.strategy import Phase, exchange
from minidnn.schedule.timing import row_seconds, step_time
from minidnn.step import CompiledStep


@dataclass(frozen=True, slots=True)
class Links:
    """What joins the ranks: seconds before the first byte, and bytes a second, one way, while as many travel back.

    With ``ranks_per_node``, ranks 0 to ``ranks_per_node`` - 1 share a node, the next ones another, and so on; what goes
    from node to node takes the ``node_`` numbers. Raises UserError for numbers that no link has.
    """

    latency_seconds: float
    bandwidth: float
    ranks_per_node: int | None = None
    node_latency_seconds: float = 0.0
    node_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        for name, seconds in (("latency", self.latency_seconds), ("node latency", self.node_latency_seconds)):
            if not 0 <= seconds < math.inf:
                raise UserError(f"a {name} of {seconds:g} s: give seconds, at least 0, for example 5e-6")
        for name, rate in (("bandwidth", self.bandwidth), ("node bandwidth", self.node_bandwidth)):
            if not rate > 0:
                raise UserError(f"a {name} of {rate:g} bytes a second: give more than 0, for example 25GB")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise UserError(f"{self.ranks_per_node} ranks per node: give at least 1")

    @staticmethod
    def of(profile: Profile) -> Links:
        """Those of a profile: its interconnect, or, where it has none, the way through host memory."""
        if profile.interconnect_bandwidth:
            return Links(profile.interconnect_latency_seconds, profile.interconnect_bandwidth)
        seconds_per_byte = sum(1 / profile.link_bandwidth(way, both=True) for way in (D2H, H2D))
        return Links(2 * profile.copy_latency_seconds, 1 / seconds_per_byte)

    def seconds(self, nbytes: float, a: int, b: int) -> float:
        """Time of one message between two ranks."""
        if self.ranks_per_node is not None and a // self.ranks_per_node != b // self.ranks_per_node:
            return self.node_latency_seconds + nbytes / self.node_bandwidth
        return self.latency_seconds + nbytes / self.bandwidth

    def ring(self, ranks: int) -> Links:
        """One link as slow as the slowest of a ring: all ranks wait for it in every ring step."""
        if self.ranks_per_node is None or ranks <= self.ranks_per_node:
            return Links(self.latency_seconds, self.bandwidth)
        if self.ranks_per_node == 1:
            return Links(self.node_latency_seconds, self.node_bandwidth)
        return Links(max(self.latency_seconds, self.node_latency_seconds), min(self.bandwidth, self.node_bandwidth))


FREE = Links(0.0, math.inf)
"""Links that take no time."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A step on some ranks. ``batch``: samples of all of them. ``compute_seconds``: the step if links took no time.
    ``communication_seconds``: what the messages take where nothing hides them. ``sent_bytes``: by the busiest rank."""

    ranks: int
    batch: int
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    sent_bytes: float

    @property
    def exposed_seconds(self) -> float:
        """Communication that does not hide behind computation."""
        return self.step_seconds - self.compute_seconds

    @property
    def images_per_second(self) -> float:
        """Of all ranks together."""
        return self.batch / self.step_seconds

    def speed_up(self, one: Estimate) -> float:
        """Images a second over those of one rank: where ``batch`` is the same this is strong scaling, else weak."""
        return self.images_per_second / one.images_per_second


def estimate(step: CompiledStep, links: Links) -> Estimate:
    """Predict a training step of all ranks from rank 0's, which has the largest share. Runs nothing."""
    rows, profile, precision = _together(step.program["train"].rows), step.gpu, step.precision.name
    alone = step_time(rows, _priced(profile, FREE), precision)[0]
    if not isinstance(step, ParallelStep):
        return Estimate(1, step.batch, alone, alone, 0.0, 0.0)
    ranks = step.ranks
    assert ranks.rank == 0, f"rank {ranks.rank} may have a smaller share than others"
    if ranks.strategy.rooted:
        of_ranks = [rooted_rows(step, rank) for rank in range(ranks.size)]

        def price(row: Instruction) -> float:
            return row_seconds(row, profile, precision)

        own = sum(price(row) for row in of_ranks[0] if row.op not in EXCHANGES)  # already in ``alone``
        communication = rendezvous(of_ranks, links, price) - own
        total, sent = alone + communication, max(map(_sent, of_ranks))
    else:
        priced = _priced(profile, links.ring(ranks.size))
        serial = ranks.strategy.sharded and not ranks.strategy.delayed
        total = alone if serial else max(alone, step_time(rows, priced, precision)[0])
        communication = sum(row_seconds(row, priced, precision) for row in rows if row.op in EXCHANGES)
        total += communication if serial else 0.0
        sent = _sent(rows)
    return Estimate(ranks.size, ranks.batch, total, alone, communication, sent)


def rooted_rows(step: ParallelStep, rank: int) -> list[Instruction]:
    """What any rank does on ``comm`` under ``master_slave`` or ``tree``."""
    persistent = Persistent(
        step.graph,
        step.precision,
        step.optimizer,
        accumulate=step.accumulate > 1,
        plan=keep(),
        ranks=step.ranks.of(rank),
    )
    return exchange((), persistent, Phase.TRAIN)


def rendezvous(of_ranks: Sequence[Sequence[Instruction]], links: Links, price: Callable[[Instruction], float]) -> float:
    """When the last rank ends, if all begin at 0 and a message takes sender and receiver from when both are ready for it.

    ``price``: seconds of a row that is no message.
    """
    clock, at = [0.0] * len(of_ranks), [0] * len(of_ranks)

    def head(rank: int) -> Instruction | None:
        return of_ranks[rank][at[rank]] if at[rank] < len(of_ranks[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(of_ranks)):
            while (row := head(rank)) is not None and row.op is not Op.RECV:
                if row.op is Op.SEND:
                    peer = int(row.attrs["peer"])
                    other = head(peer)
                    if other is None or other.op is not Op.RECV or other.attrs["peer"] != rank:
                        break
                    seconds = links.seconds(row.reads[0].spec.nbytes, rank, peer)
                    clock[rank] = clock[peer] = max(clock[rank], clock[peer]) + seconds
                    at[peer] += 1
                else:
                    clock[rank] += price(row)
                at[rank] += 1
                moved = True
    assert all(head(rank) is None for rank in range(len(of_ranks))), "the ranks wait for each other in a circle"
    return max(clock)


def _priced(profile: Profile, links: Links) -> Profile:
    return replace(profile, interconnect_latency_seconds=links.latency_seconds, interconnect_bandwidth=links.bandwidth)


def _together(rows: Sequence[Instruction]) -> list[Instruction]:
    """The rows, where an exchange begins only when ``compute`` has come to its place in the list, and not chunk by chunk."""
    made, last, before = [], None, ""
    for index, row in enumerate(rows):
        if row.stream == COMM and before != COMM and last is not None:
            row = row._replace(waits=(*row.waits, Wait(last)))
        if row.stream == COMPUTE and row.kernel:
            last = index
        before = before if row.op in (Op.ALLOC, Op.FREE) else row.stream
        made.append(row)
    return made


def _sent(rows: Sequence[Instruction]) -> float:
    """Bytes that a rank sends in a step. A collective row counts as the ring would carry it out."""
    total = 0.0
    for row in rows:
        if row.op is Op.SEND:
            total += row.reads[0].spec.nbytes
        elif row.op in EXCHANGES and row.op is not Op.RECV:
            ranks = int(row.attrs["ranks"])
            nbytes = max(value.spec.nbytes for value in (*row.writes, *row.reads))
            total += nbytes * (ranks - 1) / ranks * (2 if row.op is Op.ALL_REDUCE else 1)
    return total


def counts(ranks: int) -> list[int]:
    """Numbers of ranks for a table: all up to 8, then doubling, and the last."""
    doubled = [8 << k for k in range(1, ranks.bit_length()) if 8 << k < ranks]
    return sorted({*range(1, min(ranks, 8) + 1), *doubled, ranks})
