"""How the NumPy kernels walk over tensors: in cache-sized pieces whose size depends on the problem, never on memory.

Pieces keep every pass of a kernel in the cache and every hidden temporary under 256 KiB. Per-channel vectors are
repeated until a row is some thousand elements long ("tile"), because NumPy pays per row: with 16 channels a plain
broadcast takes several times as long. Per-channel vectors themselves count as small, up to about 8,192 channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minidnn.kernels.base import Array

CHUNK_BYTES = 64 << 10  # of one operand; three or four of these sit in an L2 cache
TILE_ELEMENTS = 2048  # measured: at 4096 the rows of a chunk evict one another from the first-level cache
SUM_ROWS = 64  # rows added one after the other in working precision before a partial sum is folded
FOLD_EVERY = 16


def flat(array: Array) -> Array:
    """The elements as one row: a view, never a copy."""
    assert array.flags.c_contiguous
    return array.reshape(-1)


def rows(array: Array) -> Array:
    """The tensor as (all other axes, channels): a view, never a copy."""
    assert array.flags.c_contiguous
    return array.reshape(-1, array.shape[-1])


def chunk_elements(array: Array) -> int:
    """Elements of this dtype in a chunk."""
    return CHUNK_BYTES // int(array.dtype.itemsize)


def spans(size: int, step: int) -> Iterator[slice]:
    """Cut ``range(size)`` into slices of at most ``step``."""
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def boxes(shape: Sequence[int], limit: int) -> Iterator[tuple[slice, ...]]:
    """Cut a C-contiguous shape into contiguous boxes of at most ``limit`` elements, in memory order."""
    axis = next(a for a in range(len(shape)) if math.prod(shape[a + 1 :]) <= limit)
    step = max(1, limit // max(1, math.prod(shape[axis + 1 :])))
    outer = itertools.product(*(range(extent) for extent in shape[:axis]))
    inner = tuple(slice(0, extent) for extent in shape[axis + 1 :])
    for index in outer:
        fixed = tuple(slice(i, i + 1) for i in index)
        for span in spans(shape[axis], step):
            yield (*fixed, span, *inner)


def integer_view(array: Array) -> Array:
    """The same bits as signed integers: times 0 or 1 selects elements, whatever NaN or infinity they hold."""
    return array.view(np.int32 if array.dtype.itemsize == 4 else np.int64)


@dataclass(frozen=True, slots=True)
class Tiling:
    """A tensor (..., channels) seen as rows of ``width`` elements, a whole number of channel vectors each."""

    channels: int
    size: int
    width: int
    step: int

    @staticmethod
    def of(x: Array, rows_per_piece: int | None = None) -> Tiling:
        """The tiling of x; ``rows_per_piece`` None: as many as make a cache-sized piece."""
        channels, size = int(x.shape[-1]), int(x.size)
        width = channels * max(1, min(TILE_ELEMENTS // channels, size // channels))
        return Tiling(channels, size, width, width * (rows_per_piece or max(1, chunk_elements(x) // width)))

    def tile(self, vector: Array, dtype: Any) -> Array:
        """Repeat a (channels,) vector over a row."""
        row = np.empty(self.width, dtype)
        row.reshape(-1, self.channels)[...] = vector
        return row

    def scratch(self, dtype: Any) -> Array:
        """Space for one piece."""
        return np.empty(min(self.step, self.size), dtype)

    def pieces(
        self, arrays: Sequence[Array], vectors: Sequence[Array] = (), scratch: Sequence[Array] = ()
    ) -> Iterator[tuple[Array, ...]]:
        """Yield matching 2-D pieces: of each array in turn, the rows of each vector, the same scratch every time."""
        whole = self.size // self.width * self.width
        lines = [flat(array) for array in arrays]
        for start in range(0, whole, self.step):
            stop = min(start + self.step, whole)
            shape = ((stop - start) // self.width, self.width)
            yield (
                *(line[start:stop].reshape(shape) for line in lines),
                *vectors,
                *(s[: stop - start].reshape(shape) for s in scratch),
            )
        if whole < self.size:
            rest = self.size - whole
            yield (
                *(line[whole:].reshape(1, rest) for line in lines),
                *(vector[:rest] for vector in vectors),
                *(s[:rest].reshape(1, rest) for s in scratch),
            )


@dataclass(slots=True)
class ChannelSum:
    """Sums pieces of a tiling per channel: short runs in working precision, folded into float64.

    Accurate to a few float32 roundings however many elements there are, at the speed of a plain sum.
    """

    tiling: Tiling
    dtype: Any
    total: Array = field(init=False)
    wide: Array = field(init=False)
    partial: Array = field(init=False)
    pending: int = 0

    def __post_init__(self) -> None:
        self.total = np.zeros(self.tiling.channels)
        self.wide = np.zeros(self.tiling.width, self.dtype)
        self.partial = np.empty(self.tiling.width, self.dtype)

    def add(self, piece: Array) -> None:
        """Add a piece (rows, width)."""
        wide, partial = self.wide[: piece.shape[1]], self.partial[: piece.shape[1]]
        np.add.reduce(piece, axis=0, out=partial)
        np.add(wide, partial, out=wide)
        self.pending += 1
        if self.pending == FOLD_EVERY:
            self.fold()

    def fold(self) -> None:
        """Move the working sums into ``total``."""
        self.total += np.add.reduce(self.wide.reshape(-1, self.tiling.channels), axis=0)
        self.wide[...] = 0
        self.pending = 0

    def result(self) -> Array:
        """The (channels,) float64 sums."""
        self.fold()
        return self.total


def channel_sums(x: Array) -> Array:
    """Sum x over every axis but the last, as float64."""
    tiling = Tiling.of(x, SUM_ROWS)
    total = ChannelSum(tiling, x.dtype)
    for (piece,) in tiling.pieces((x,)):
        total.add(piece)
    return total.result()


def add_channels(y: Array, vector: Array) -> None:
    """y += vector, per channel."""
    tiling = Tiling.of(y)
    for piece, row in tiling.pieces((y,), (tiling.tile(vector, y.dtype),)):
        np.add(piece, row, out=piece)
