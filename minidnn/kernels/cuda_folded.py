"""Convolutions of an image's few channels by cuDNN, with the columns of the window folded into the channels.

cuDNN's kernels go through a window tap by tap, some 32 to 64 bytes of channels at a time. Of three channels in half precision
that is 6 bytes: nine tenths of their work is on nothing. In a copy of the image, which lies in the workspace, all that a row of
the window sees at an output's place stands side by side: S columns of C channels are S * C channels of a window with one column.
For ResNet's stem these are 21, with zeros 24, seven times, instead of 3 channels 49 times. The sums are the same, and zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from minidnn.errors import UserError
from minidnn.kernels.cuda_blocks import THREADS
from minidnn.kernels.cuda_launch import PACK_BYTES, SINGLE, Access, Launcher, Sequential, Work, int32, int64
from minidnn.kernels.problem import FILTER, FOLDED, IMAGE, Convolution, Problem, also, folded
from minidnn.schedule.recipe import Engine
from minidnn.spec import ITEM_BYTES, TensorSpec

MULTIPLES = (8, 32)  # of channels, for which there are fast kernels
MOST_CHANNELS = 16  # of an image: of more, a tap is enough work
MOST_CANDIDATES = 6  # engines for each multiple


def folded_engines(cudnn: Any, problem: Problem, limit: int | None) -> Iterator[Engine]:
    """How a ``Cudnn`` may compute a convolution folded, under a limit of workspace, the likeliest first.

    None for groups, for the gradient of an image, and where the channels are many or the columns few.
    """
    if not isinstance(problem, Convolution) or problem.direction == "backward_data":
        return
    channels, columns = problem.x[3], problem.weight[2]
    if problem.weight[3] != channels or channels > MOST_CHANNELS or columns == 1 or problem.dilation[1] != 1:
        return
    for wide in sorted({-(-channels * columns // multiple) * multiple for multiple in MULTIPLES}):
        copies = _copy_bytes(problem, wide)
        left = None if limit is None else limit - copies
        if left is not None and left < 0:
            continue
        for options in islice(cudnn.candidates(folded(problem, wide), left), MOST_CANDIDATES):
            named = also(options, FOLDED, wide)
            with contextlib.suppress(UserError):  # a knob that this frontend cannot name
                yield Engine("cudnn, folded", copies + cudnn.plan(problem, dict(named)).workspace_bytes, named)


def copies_bytes(problem: Problem, options: Mapping[str, int]) -> int:
    """Workspace that an engine takes besides cuDNN's own: that of the copies, 0 without."""
    if FOLDED not in options:
        return 0
    assert isinstance(problem, Convolution)
    return _copy_bytes(problem, options[FOLDED])


def run_folded(
    on: Launcher, problem: Convolution, plan: Any, wide: int, pointers: Mapping[int, int], workspace: int
) -> Work:
    """Bind the plan of one of ``folded_engines``, of so many channels, to addresses.

    The workspace holds the image, the filter, then what is cuDNN's.
    """
    at = dict(pointers)
    image_bytes, _ = _parts(problem, wide)
    at[IMAGE], at[FILTER] = workspace, workspace + image_bytes
    convolution = on.cudnn.run(plan, at, workspace + _copy_bytes(problem, wide))
    image = _fold(on, problem, wide, at[IMAGE], pointers[IMAGE])
    taps = problem.weight[2] * problem.weight[3]
    if problem.direction == "backward_weight":
        gradient = _resize(on, problem, taps, wide, pointers[FILTER], at[FILTER])
        return Sequential(image, convolution, gradient)
    return Sequential(image, _resize(on, problem, wide, taps, at[FILTER], pointers[FILTER]), convolution)


def _parts(problem: Convolution, wide: int) -> tuple[int, int]:
    """Bytes of the folded image and of the folded filter."""
    new = folded(problem, wide)
    return TensorSpec(new.x, new.dtype).footprint, TensorSpec(new.weight, new.dtype).footprint


def _copy_bytes(problem: Convolution, wide: int) -> int:
    return sum(_parts(problem, wide))


def _fold(on: Launcher, problem: Convolution, wide: int, target: int, source: int) -> Work:
    n, h, w, c = problem.x
    by = Access(PACK_BYTES // ITEM_BYTES[problem.dtype])
    numbers = (w * c, problem.y[2], problem.weight[2] * c, wide, problem.stride[1] * c, problem.padding[1] * c)
    arguments: list[Any] = [int64(target), int64(source), *map(int32, numbers)]
    return on.launch("fold", "fold_columns", problem.dtype, by, (n * h,), (THREADS,), arguments)


def _resize(on: Launcher, problem: Convolution, new: int, old: int, target: int, source: int) -> Work:
    """Bind the copy of a filter's rows of ``old`` elements as rows of ``new`` ones."""
    size = problem.weight[0] * problem.weight[1] * new
    arguments: list[Any] = [int64(target), int64(source), int64(size), int32(new), int32(old)]
    return on.launch("fold", "resize_rows", problem.dtype, SINGLE, (-(-size // THREADS),), (THREADS,), arguments)
