"""Convolutions by cuDNN a part of the batch at a time, so that an engine's workspace stays under a limit.

The fastest engines for true fp32 transform tiles of all images in their workspace, which for a layer of VGG-16 takes gigabytes.
That grows with the images, their speed hardly does. So a call goes over a part of the images, and the next one follows in the
same workspace (micro-batching: Oyama et al., "Accelerating Deep Learning Frameworks with Micro-Batches", 2018). The gradient of
a filter is the sum of the parts', added one after the other.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from minidnn.errors import UserError
from minidnn.kernels.cuda_blocks import THREADS, flat_blocks
from minidnn.kernels.cuda_launch import PACK_BYTES, Access, Launcher, Sequential, Work, int64
from minidnn.kernels.cudnn_graphs import ALIGNMENT
from minidnn.kernels.problem import FILTER, IMAGE, OUTPUT, PART, Convolution, Problem, also, part
from minidnn.schedule.recipe import Engine
from minidnn.spec import ITEM_BYTES, TensorSpec

MOST_CANDIDATES = 6  # engines whose workspace for all images is above the limit


def part_engines(cudnn: Any, problem: Problem, limit: int | None, whole: bool = False) -> Iterator[Engine]:
    """The engines of a ``Cudnn`` that a limit bars, each on as many images as it has workspace for, the likeliest first.

    ``whole``: among them also those that have room for all images, as they are.
    """
    if not isinstance(problem, Convolution) or (limit is None and not whole):
        return
    barred = 0
    for options in cudnn.candidates(problem, None):
        with contextlib.suppress(UserError):  # a knob that this frontend cannot name, or that a part does not take
            needed = cudnn.plan(problem, dict(options)).workspace_bytes
            if limit is None or needed <= limit:
                if whole:
                    yield Engine("cudnn", needed, options)
                continue
            barred += 1
            for images in _sizes(problem, limit / needed):
                named = also(options, PART, images)
                nbytes = cudnn.plan(problem, dict(named)).workspace_bytes + sum_bytes(problem)
                if nbytes <= limit:
                    yield Engine("cudnn, in parts", nbytes, named)
                    break
        if barred == MOST_CANDIDATES:
            return


def run_parts(
    on: Launcher, problem: Convolution, plan: Any, images: int, pointers: Mapping[int, int], workspace: int
) -> Work:
    """Bind the plan of one of ``part_engines``, for so many images, to addresses.

    The workspace holds the gradient of a part, then what is cuDNN's.
    """
    small, first = part(problem, images), workspace + sum_bytes(problem)
    works: list[Work] = []
    for number in range(problem.x[0] // images):
        at = dict(pointers)
        at[IMAGE] += number * TensorSpec(small.x, problem.dtype).nbytes
        at[OUTPUT] += number * TensorSpec(small.y, problem.dtype).nbytes
        sums = problem.direction == "backward_weight" and number > 0
        if sums:
            at[FILTER] = workspace
        works.append(on.cudnn.run(plan, at, first))
        if sums:
            works.append(_add(on, problem, pointers[FILTER], workspace))
    return Sequential(*works)


def _sizes(problem: Convolution, share: float) -> Iterator[int]:
    """Numbers of images, each half of the one before, from what ``share`` of the batch is on."""
    images = problem.x[0]
    while images % 2 == 0:
        images //= 2
        small = part(problem, images)
        aligned = all(TensorSpec(shape, problem.dtype).nbytes % ALIGNMENT == 0 for shape in (small.x, small.y))
        if images <= share * problem.x[0] and aligned:
            yield images


def sum_bytes(problem: Convolution) -> int:
    """Workspace that the gradient of a part takes, besides cuDNN's own; 0 where there is nothing to add."""
    return TensorSpec(problem.weight, problem.dtype).footprint if problem.direction == "backward_weight" else 0


def _add(on: Launcher, problem: Convolution, target: int, source: int) -> Work:
    """Bind the addition of a part's gradient to those before."""
    by, size = Access(PACK_BYTES // ITEM_BYTES[problem.dtype]), math.prod(problem.weight)
    arguments = [int64(target), int64(target), int64(source), int64(size)]
    blocks = (flat_blocks(size, by.width),)
    return on.launch("pointwise", "add_forward", problem.dtype, by, blocks, (THREADS,), arguments)
