"""Ranks: who takes part in data parallelism, by which strategy, and which samples and parameters belong to whom."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minidnn.errors import UserError, nearest

STRATEGIES = ("ring_delayed", "ring", "all_reduce", "master_slave", "tree")
IMPLEMENTATIONS = ("steps", "nccl")


@dataclass(frozen=True, slots=True)
class Strategy:
    """How gradients become one update on all ranks.

    ``implementation``: ``steps`` (SEND, RECV and ADD rows in a fixed order, exact) or ``nccl`` (collective rows, which a
    library carries out); None: steps. ``master_slave`` and ``tree`` consist of
    steps alone. ``warmup``: updates without delay at the beginning, of ``ring_delayed``. ``bucket_bytes``: gradients that
    ``all_reduce`` exchanges together, while backward goes on.
    """

    name: str
    implementation: str | None = None
    warmup: int = 0
    bucket_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        if self.name not in STRATEGIES:
            raise UserError(f"strategy={self.name!r} is unknown; {nearest(self.name, STRATEGIES)}")
        if self.implementation not in (None, *IMPLEMENTATIONS):
            raise UserError(
                f"implementation {self.implementation!r} of strategy {self.name} is unknown; choose steps or nccl"
            )
        if self.implementation == "nccl" and self.rooted:
            raise UserError(f"strategy {self.name} has no collective form; leave out its implementation, or use steps")
        if self.warmup < 0 or (self.warmup and not self.delayed):
            raise UserError(
                f"a warm-up of {self.warmup} updates without delay belongs to ring_delayed, not to {self.name}"
                if self.warmup > 0
                else f"a warm-up of {self.warmup} updates: give 0 or more"
            )
        if self.bucket_bytes < 1:
            raise UserError(f"bucket_bytes={self.bucket_bytes} must be at least 1")

    @staticmethod
    def parse(wish: str | Strategy) -> Strategy:
        """Read ``ring`` or ``ring:steps``. Raises UserError with the nearest names."""
        if isinstance(wish, Strategy):
            return wish
        name, _, implementation = wish.partition(":")
        return Strategy(name, implementation or None)

    @property
    def delayed(self) -> bool:
        """Whether an update uses the gradient of the step before."""
        return self.name == "ring_delayed"

    @property
    def sharded(self) -> bool:
        """Whether every rank updates, and keeps optimizer state for, an equal part of the parameters."""
        return self.name in ("ring", "ring_delayed")

    @property
    def rooted(self) -> bool:
        """Whether rank 0 alone updates."""
        return self.name in ("master_slave", "tree")


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's view of the group. ``batch`` and ``tail`` count the samples of all ranks together."""

    rank: int
    size: int
    strategy: Strategy
    batch: int
    tail: int | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size and self.strategy.implementation is not None
        if self.batch < self.size:
            raise UserError(
                f"the global batch of {self.batch} is smaller than the {self.size} ranks: give a batch of at least "
                f"{self.size}, or start fewer ranks"
            )

    def of(self, rank: int) -> Ranks:
        """The view of another rank."""
        return replace(self, rank=rank)

    def share(self, samples: int) -> slice:
        """Which of ``samples`` samples are this rank's: parts of equal size, the first ones larger by one."""
        return share(samples, self.rank, self.size)

    def taken(self, samples: int) -> slice:
        """Which samples this rank works on. One without a share repeats the last sample, with weight zero."""
        part = self.share(samples)
        return part if length(part) else slice(samples - 1, samples)

    def weight(self, samples: int) -> float:
        """1 where this rank's samples count, 0 where it only keeps step with the others."""
        return float(length(self.share(samples)) > 0)

    def local(self, samples: int) -> int:
        """How many samples this rank works on."""
        return length(self.taken(samples))

    def owned(self, elements: int) -> tuple[int, int]:
        """Begin and end of the parameters that this rank updates, in a line of ``elements`` padded to equal shards."""
        if self.strategy.sharded:
            shard = elements // self.size
            return self.rank * shard, (self.rank + 1) * shard
        return (0, elements) if not self.strategy.rooted or self.rank == 0 else (0, 0)


def length(part: slice) -> int:
    """Samples of a share."""
    return int(part.stop) - int(part.start)


def share(samples: int, rank: int, size: int) -> slice:
    """The part of ``samples`` that belongs to a rank: contiguous, sizes differ by at most one, larger ones first."""
    least, extra = divmod(samples, size)
    begin = rank * least + min(rank, extra)
    return slice(begin, begin + least + (rank < extra))
