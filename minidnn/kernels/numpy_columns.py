"""im2col: which elements of a source each output position reads, and copying them side by side for one BLAS product.

One geometry serves all three convolution directions. Along an axis, output ``p`` reads the source at
``start + p * step + t * tap_step`` for every tap ``t``; outside the source lie zeros. The data gradient splits into
``stride`` x ``stride`` phases: rows of x that are equal modulo the stride are read by the same taps, so each phase is
itself such a correlation, with step 1, of dy with a part of the weights, and no product with an inserted zero is ever
computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from minidnn.kernels.base import Array, Pair
from minidnn.kernels.numpy_chunks import rows
from minidnn.spec import round_up

TILE_BYTES = 2 << 20  # columns of one product: measured, more falls out of the cache and less starves BLAS
ALIGN = 64

Tile = tuple[int, int, int, int]
"""First and last + 1 image, first and last + 1 output row."""


class Axis(NamedTuple):
    """How the outputs of one axis read their source."""

    extent: int  # of the source
    outputs: int
    step: int
    start: int
    taps: int
    tap_step: int

    def reach(self, first: int, last: int) -> tuple[int, int]:
        """Source interval, in part outside the source, that the outputs first .. last - 1 read."""
        start = self.start + first * self.step
        return start, start + (last - 1 - first) * self.step + (self.taps - 1) * self.tap_step + 1

    @property
    def inside(self) -> bool:
        """Whether no output reads outside the source."""
        low, high = self.reach(0, self.outputs)
        return low >= 0 and high <= self.extent

    @property
    def identity(self) -> bool:
        """Whether output p reads source p alone."""
        return self == Axis(self.extent, self.extent, 1, 0, 1, self.tap_step)


class Workspace(NamedTuple):
    """Bytes that a convolution direction slices from its scratch, in this order."""

    padded: int = 0
    columns: int = 0
    result: int = 0
    weights: int = 0

    @property
    def total(self) -> int:
        """All parts, each aligned."""
        return sum(round_up(part, ALIGN) for part in self)

    def part(self, scratch: Array | None, name: str, dtype: Any, shape: tuple[int, ...]) -> Array:
        """The part as an array of ``shape``, a prefix of it when the last tile is smaller."""
        assert scratch is not None and scratch.nbytes >= self.total, f"convolution needs {self.total} bytes of scratch"
        offset = sum(round_up(part, ALIGN) for part in self[: self._fields.index(name)])
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        assert nbytes <= getattr(self, name), f"{name}: {nbytes} bytes wanted, {getattr(self, name)} planned"
        return scratch[offset : offset + nbytes].view(dtype).reshape(shape)


class Windows(NamedTuple):
    """The windows of a correlation over a source (N, H, W, channels), split into groups of channels."""

    rows: Axis
    cols: Axis
    channels: int
    groups: int

    @property
    def identity(self) -> bool:
        """Whether the source is its own column matrix: a 1 x 1 convolution without stride or padding."""
        return self.rows.identity and self.cols.identity

    @property
    def width(self) -> int:
        """Columns of a group: elements that one output reads."""
        return self.rows.taps * self.cols.taps * (self.channels // self.groups)

    def tile_shape(self, images: int, result_width: int, itemsize: int) -> Pair:
        """(images, output rows) of a tile: whole images, or rows of a single one too large for the cache."""
        row_bytes = self.cols.outputs * max(0 if self.identity else self.width, result_width) * itemsize
        if images > 1 or row_bytes * self.rows.outputs <= TILE_BYTES:
            return images, self.rows.outputs
        return 1, max(1, TILE_BYTES // row_bytes)

    def workspace(self, images: int, result_width: int, weights: int, itemsize: int) -> Workspace:
        """The scratch of a tile of ``images`` images; ``weights`` elements of reordered weights."""
        n, p = self.tile_shape(images, result_width, itemsize)
        positions = n * p * self.cols.outputs
        low, high = self.rows.reach(0, p)
        left, right = self.cols.reach(0, self.cols.outputs)
        padded = 0 if self.rows.inside and self.cols.inside else n * (high - low) * (right - left) * self.channels
        columns = 0 if self.identity else positions * self.width
        return Workspace(*(part * itemsize for part in (padded, columns, positions * result_width, weights)))

    def tiles(self, batch: int, images: int, result_width: int, itemsize: int) -> Iterator[Tile]:
        """Cut the output into tiles, images outermost. Without any scratch there is nothing to cut for."""
        if self.identity and not result_width:
            yield 0, batch, 0, self.rows.outputs
            return
        step, height = self.tile_shape(images, result_width, itemsize)
        for n in range(0, batch, step):
            for p in range(0, self.rows.outputs, height):
                yield n, min(n + step, batch), p, min(p + height, self.rows.outputs)

    def matrices(self, source: Array, tile: Tile, workspace: Workspace, scratch: Array | None) -> Iterator[Array]:
        """Yield each group's column matrix of a tile: (positions, taps * taps * channels of the group)."""
        n0, n1, p0, p1 = tile
        share = self.channels // self.groups
        if self.identity:
            matrix = rows(source[n0:n1, p0:p1])
            for group in range(self.groups):
                yield matrix[:, group * share : (group + 1) * share]
            return
        low, high = self.rows.reach(p0, p1)
        left, right = self.cols.reach(0, self.cols.outputs)
        base, offset = source, n0 * source.strides[0] + low * source.strides[1] + left * source.strides[2]
        if workspace.padded:
            padded = (n1 - n0, high - low, right - left, self.channels)
            base, offset = workspace.part(scratch, "padded", source.dtype, padded), 0
            _copy_padded(base, source[n0:n1], low, left)
        image, row, col, item = base.strides
        window = (self.rows.taps, self.cols.taps, share)
        columns = workspace.part(scratch, "columns", source.dtype, (n1 - n0, p1 - p0, self.cols.outputs, *window))
        step = (image, row * self.rows.step, col * self.cols.step)
        inner = (row * self.rows.tap_step, col * self.cols.tap_step, item)
        for group in range(self.groups):
            at = offset + group * share * item
            np.copyto(columns, np.ndarray(columns.shape, source.dtype, base, at, (*step, *inner)))
            yield columns.reshape(-1, self.width)


def _copy_padded(padded: Array, images: Array, low: int, left: int) -> None:
    """Copy the part of ``images`` that starts at row ``low``, column ``left``, with zeros where that is outside."""
    _, height, width, _ = padded.shape
    top, bottom = min(max(0, -low), height), max(0, min(height, images.shape[1] - low))
    first, last = min(max(0, -left), width), max(0, min(width, images.shape[2] - left))
    padded[:, :top] = 0
    padded[:, bottom:] = 0
    padded[:, top:bottom, :first] = 0
    padded[:, top:bottom, last:] = 0
    if top < bottom and first < last:
        np.copyto(padded[:, top:bottom, first:last], images[:, low + top : low + bottom, left + first : left + last])


def forward_windows(
    x_shape: tuple[int, ...], y_shape: tuple[int, ...], weight_shape: tuple[int, ...], stride: Pair, padding: Pair,
    dilation: Pair, groups: int,
) -> Windows:  # fmt: skip
    """The windows that forward and the weight gradient read from x."""
    rows, cols = (
        Axis(x_shape[1 + a], y_shape[1 + a], stride[a], -padding[a], weight_shape[1 + a], dilation[a]) for a in (0, 1)
    )
    return Windows(rows, cols, x_shape[3], groups)


class Phase(NamedTuple):
    """Rows ``row + i * stride`` and columns ``col + j * stride`` of x, the windows of dy they read, through which taps.

    ``windows`` is None where no window of y reads x.
    """

    row: int
    col: int
    windows: Windows | None
    row_taps: slice
    col_taps: slice


def _phase(
    offset: int, extent: int, outputs: int, stride: int, padding: int, dilation: int, taps: int
) -> tuple[Axis, slice] | None:
    """One axis: x at offset + i * stride meets tap r at p = i + (offset + padding - r * dilation) / stride."""
    valid = [r for r in range(taps) if (offset + padding - r * dilation) % stride == 0]
    if not valid:
        return None
    step = stride // math.gcd(stride, dilation)  # between valid taps; the last one reads the lowest p
    start = (offset + padding - valid[-1] * dilation) // stride
    positions = -(-(extent - offset) // stride)
    stop = valid[0] - step
    return (
        Axis(outputs, positions, 1, start, len(valid), step * dilation // stride),
        slice(valid[-1], None if stop < 0 else stop, -step),
    )


def data_phases(
    x_shape: tuple[int, ...], y_shape: tuple[int, ...], weight_shape: tuple[int, ...], stride: Pair, padding: Pair,
    dilation: Pair, groups: int,
) -> Iterator[Phase]:  # fmt: skip
    """The phases of the data gradient; together they cover x once."""
    for row in range(min(stride[0], x_shape[1])):
        for col in range(min(stride[1], x_shape[2])):
            rows, cols = (
                _phase(at, x_shape[1 + a], y_shape[1 + a], stride[a], padding[a], dilation[a], weight_shape[1 + a])
                for a, at in ((0, row), (1, col))
            )
            if rows is None or cols is None:
                yield Phase(row, col, None, slice(0), slice(0))
            else:
                yield Phase(row, col, Windows(rows[0], cols[0], y_shape[3], groups), rows[1], cols[1])


def phase_workspace(phase: Phase, images: int, stride: Pair, channels: int, itemsize: int) -> tuple[Workspace, int]:
    """The scratch of a phase, and the channels of its result matrix: none when the product goes straight into dx."""
    windows = phase.windows
    if windows is None:
        return Workspace(), 0
    result_width = 0 if stride == (1, 1) else channels
    several = windows.rows.taps * windows.cols.taps > 1
    weights = windows.channels * windows.rows.taps * windows.cols.taps * (channels // windows.groups) if several else 0
    return windows.workspace(images, result_width, weights, itemsize), result_width
