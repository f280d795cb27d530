"""NumPy kernels: convolution as im2col and one BLAS product a tile, and the choice of its tile."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from minidnn.kernels.base import Array, Pair
from minidnn.kernels.numpy_chunks import add_channels, rows
from minidnn.kernels.numpy_columns import TILE_BYTES, Workspace, data_phases, forward_windows, phase_workspace
from minidnn.kernels.numpy_linear import add_product
from minidnn.schedule.recipe import Engine


def conv2d_forward(
    y: Array, x: Array, weight: Array, bias: Array | None = None, *, stride: Pair, padding: Pair, dilation: Pair,
    groups: int, images: int, scratch: Array | None = None,
) -> None:  # fmt: skip
    windows = forward_windows(x.shape, y.shape, weight.shape, stride, padding, dilation, groups)
    images, share = min(images, len(x)), len(weight) // groups
    workspace = windows.workspace(images, 0, 0, x.itemsize)
    matrix = weight.reshape(len(weight), -1)
    for tile in windows.tiles(len(x), images, 0, x.itemsize):
        n0, n1, p0, p1 = tile
        out = rows(y[n0:n1, p0:p1])
        for group, columns in enumerate(windows.matrices(x, tile, workspace, scratch)):
            span = slice(group * share, (group + 1) * share)
            np.matmul(columns, matrix[span].T, out=out[:, span])
        if bias is not None:
            add_channels(out, bias)


def conv2d_backward_data(
    dx: Array, dy: Array, weight: Array, *, stride: Pair, padding: Pair, dilation: Pair, groups: int, images: int,
    scratch: Array | None = None,
) -> None:  # fmt: skip
    channels, images = dx.shape[3], min(images, len(dx))
    share = channels // groups
    for phase in data_phases(dx.shape, dy.shape, weight.shape, stride, padding, dilation, groups):
        target = dx[:, phase.row :: stride[0], phase.col :: stride[1]]
        workspace, result_width = phase_workspace(phase, images, stride, channels, dx.itemsize)
        windows = phase.windows
        if windows is None:
            target[...] = 0
            continue
        taps = weight[:, phase.row_taps, phase.col_taps]
        matrices = list(_phase_weights(taps, groups, workspace, scratch))
        for tile in windows.tiles(len(dx), images, result_width, dx.itemsize):
            n0, n1, p0, p1 = tile
            if result_width:
                shape = (n1 - n0, p1 - p0, windows.cols.outputs, channels)
                result = workspace.part(scratch, "result", dx.dtype, shape)
            else:
                result = dx[n0:n1, p0:p1]
            out = rows(result)
            for group, columns in enumerate(windows.matrices(dy, tile, workspace, scratch)):
                np.matmul(columns, matrices[group], out=out[:, group * share : (group + 1) * share])
            if result_width:
                np.copyto(target[n0:n1, p0:p1], result)


def _phase_weights(taps: Array, groups: int, workspace: Workspace, scratch: Array | None) -> Iterator[Array]:
    """Yield each group's part of ``taps`` (K, R, S, C of a group) as a matrix (R * S * K of a group, C of a group)."""
    k, r, s, share = taps.shape
    if r * s == 1:  # a view that BLAS can read
        for group in range(groups):
            yield taps[group * (k // groups) : (group + 1) * (k // groups), 0, 0]
        return
    copy = workspace.part(scratch, "weights", taps.dtype, (groups, r, s, k // groups, share))
    np.copyto(copy, taps.reshape(groups, k // groups, r, s, share).transpose(0, 2, 3, 1, 4))
    yield from copy.reshape(groups, -1, share)


def conv2d_backward_weight(
    d_weight: Array, x: Array, dy: Array, *, stride: Pair, padding: Pair, dilation: Pair, groups: int, images: int,
    accumulate: bool = False, scratch: Array | None = None,
) -> None:  # fmt: skip
    windows = forward_windows(x.shape, dy.shape, d_weight.shape, stride, padding, dilation, groups)
    k, images = len(d_weight), min(images, len(x))
    share = k // groups
    workspace = windows.workspace(images, 0, 0, x.itemsize)
    target = d_weight.reshape(k, -1)
    for tile in windows.tiles(len(x), images, 0, x.itemsize):
        n0, n1, p0, p1 = tile
        gradient = rows(dy[n0:n1, p0:p1])
        for group, columns in enumerate(windows.matrices(x, tile, workspace, scratch)):
            span = slice(group * share, (group + 1) * share)
            if accumulate:
                add_product(target[span], gradient[:, span].T, columns)
            else:
                np.matmul(gradient[:, span].T, columns, out=target[span])
        accumulate = True


def select_engine(
    direction: str, x_shape: tuple[int, ...], y_shape: tuple[int, ...], weight_shape: tuple[int, ...], stride: Pair,
    padding: Pair, dilation: Pair, groups: int, itemsize: int, workspace_limit: int | None,
) -> Engine:  # fmt: skip
    """Choose how many images share a product. A pure function of its arguments: it looks neither at time nor at memory.

    Shapes are (N, H, W, C), (N, P, Q, K) and (K, R, S, C / groups); ``direction`` is "forward", "forward_relu",
    "backward_data" or "backward_weight". As many images as give about 2 MiB of columns, fewer under ``workspace_limit``
    bytes. One image is the least, in bands of rows when it alone has more columns than that; ``workspace_bytes`` says what
    it takes, even above the limit. Engine "direct" reads x or dy in place (1 x 1), "im2col" copies columns.
    """
    if direction not in ("forward", "forward_relu", "backward_data", "backward_weight"):
        raise ValueError(f"unknown convolution direction {direction!r}: forward, backward_data or backward_weight")
    geometry = (x_shape, y_shape, weight_shape, stride, padding, dilation, groups)
    if direction == "backward_data":
        phases = list(data_phases(*geometry))
        direct = all(phase.windows is None or phase.windows.identity for phase in phases)
    else:
        phases = []
        direct = forward_windows(*geometry).identity

    def workspaces(images: int) -> list[Workspace]:
        if direction == "backward_data":
            return [phase_workspace(phase, images, stride, x_shape[3], itemsize)[0] for phase in phases]
        return [forward_windows(*geometry).workspace(images, 0, 0, itemsize)]

    def workspace_bytes(images: int) -> int:
        return max(workspace.total for workspace in workspaces(images))

    an_image = max(max(workspace.columns, workspace.result) for workspace in workspaces(1))
    most = max(1, min(x_shape[0], TILE_BYTES // max(1, an_image)))
    fitting = (n for n in range(most, 0, -1) if workspace_limit is None or workspace_bytes(n) <= workspace_limit)
    images = next(fitting, 1)
    return Engine("direct" if direct else "im2col", workspace_bytes(images), (("images", images),))
