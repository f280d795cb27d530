"""Convolutions by cuBLAS: a product on the tensors themselves where the window is one pixel, else over a column matrix.

The column matrix of some images at a time is made in the workspace ("im2col": Chellapilla, Puri and Simard 2006, "High
performance convolutional neural networks for document processing"). How many images is part of the engine's options, and
the order of all sums is fixed by them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from minidnn.kernels.cublas import Cublas
from minidnn.kernels.cuda_blocks import THREADS, flat_blocks
from minidnn.kernels.cuda_launch import Launcher, Sequential, Work, access_at, int64, structure
from minidnn.kernels.problem import FILTER, IMAGE, LEFT, OUTPUT, PRODUCT, RIGHT, Convolution, Problem, Product, also
from minidnn.schedule.recipe import Engine
from minidnn.spec import ITEM_BYTES, round_up

COLUMN_BYTES = 128 << 20  # of a column matrix: enough to keep a GPU busy with its product


class BlasEngines:
    """What cuBLAS may compute of the problems that cuDNN is asked for, and how."""

    def __init__(self, blas: Cublas) -> None:
        self._blas = blas

    def engines(self, problem: Problem, limit: int | None) -> Iterator[Engine]:
        """How cuBLAS may compute a problem under a limit of workspace, the one to be preferred first.

        None: groups, epilogues, and sums that would be rounded to 16 bits more than once.
        """
        if isinstance(problem, Product):
            yield from self._blas.engines(limit)
            return
        if problem.direction == "forward_relu" or problem.weight[3] != problem.x[3]:
            return
        images, columns = problem.x[0], 0
        if not pointwise(problem):
            images = _images(problem)
            columns = round_up(_column_bytes(problem, images))
            twice = (problem.direction == "backward_weight" and images < problem.x[0]) or _overlaps(problem)
            if problem.dtype != "float32" and twice:
                return
        for engine in self._blas.engines(None if limit is None else limit - columns):
            yield Engine(engine.name, columns + engine.workspace_bytes, also(engine.options, "chunk", images))

    def run(
        self, on: Launcher, problem: Problem, options: Mapping[str, int], pointers: Mapping[int, int], workspace: int
    ) -> Work:
        """Bind one of ``engines`` to addresses. The workspace of the product comes first, then the column matrix."""
        blas, nbytes = self._blas, options["workspace"]
        if isinstance(problem, Product):
            return blas.multiply(problem, pointers[PRODUCT], pointers[LEFT], pointers[RIGHT], workspace, nbytes)
        if pointwise(problem):
            return _product(blas, problem, pointers, pointers[IMAGE], workspace, nbytes)
        images, size, columns = options["chunk"], ITEM_BYTES[problem.dtype], workspace + nbytes
        works: list[Work] = []
        for first in range(0, problem.x[0], images):
            count = min(images, problem.x[0] - first)
            part = problem._replace(x=(count, *problem.x[1:]), y=(count, *problem.y[1:]))
            at = dict(pointers)
            at[IMAGE] += first * math.prod(problem.x[1:]) * size
            at[OUTPUT] += first * math.prod(problem.y[1:]) * size
            product = _product(blas, part, at, columns, workspace, nbytes, first > 0)
            if problem.direction == "backward_data":
                works += [product, _move(on, "scatter_columns", part, at[IMAGE], columns, math.prod(part.x))]
            else:
                gathered = _column_bytes(part, count) // size
                works += [_move(on, "gather_columns", part, columns, at[IMAGE], gathered), product]
        return Sequential(*works)

    def workspace_bytes(self, problem: Problem, options: Mapping[str, int]) -> int:
        """What ``run`` needs."""
        columns = 0
        if isinstance(problem, Convolution) and not pointwise(problem):
            columns = round_up(_column_bytes(problem, options["chunk"]))
        return columns + options["workspace"]

    def version(self) -> int:
        """10,000 x major + 100 x minor + patch."""
        return self._blas.version()

    def close(self) -> None:
        """Destroy the handle. Idempotent."""
        self._blas.close()


def pointwise(problem: Convolution) -> bool:
    """Whether every output pixel sees the one input pixel at its place, so that the input is its own column matrix."""
    return problem.weight[1:3] == problem.stride == (1, 1) and problem.padding == (0, 0)


def _overlaps(problem: Convolution) -> bool:
    """Whether the gradient of an input is a sum of several entries of the column matrix."""
    extents = zip(problem.weight[1:3], problem.stride, strict=True)
    return problem.direction == "backward_data" and any(k > s for k, s in extents)


def _column_bytes(problem: Convolution, images: int) -> int:
    return images * math.prod(problem.y[1:3]) * math.prod(problem.weight[1:]) * ITEM_BYTES[problem.dtype]


def _images(problem: Convolution) -> int:
    return max(1, min(problem.x[0], COLUMN_BYTES // _column_bytes(problem, 1)))


def _product(
    blas: Cublas, problem: Convolution, at: Mapping[int, int], columns: int, workspace: int, nbytes: int,
    accumulate: bool = False,
) -> Work:  # fmt: skip
    """The product of a direction; ``columns``: address of the column matrix, which is its result for ``backward_data``."""
    pixels, channels, taps = math.prod(problem.y[:3]), problem.y[3], math.prod(problem.weight[1:])
    if problem.direction == "forward":
        shape = Product(pixels, channels, taps, taps, 1, 1, taps, problem.dtype)
        return blas.multiply(shape, at[OUTPUT], columns, at[FILTER], workspace, nbytes)
    if problem.direction == "backward_data":
        shape = Product(pixels, taps, channels, channels, 1, taps, 1, problem.dtype)
        return blas.multiply(shape, columns, at[OUTPUT], at[FILTER], workspace, nbytes)
    shape = Product(channels, taps, pixels, 1, channels, taps, 1, problem.dtype)
    return blas.multiply(shape, at[FILTER], at[OUTPUT], columns, workspace, nbytes, accumulate)


def _move(on: Launcher, name: str, problem: Convolution, target: int, source: int, size: int) -> Work:
    """Bind a kernel of ``columns.cu`` that writes ``size`` elements, in packs that lie within a tap."""
    (n, h, w, c), (_, p, q, _), (_, r, s, _) = problem.x, problem.y, problem.weight
    shape = structure(n, h, w, c, p, q, r, s, *problem.stride, *problem.padding, *problem.dilation)
    by = access_at(problem.dtype, (target, source), c)
    assert size < 1 << 31, f"a column matrix of {size} elements is beyond 32-bit indices"
    arguments: list[Any] = [int64(target), int64(source), int64(size), shape]
    return on.launch("columns", name, problem.dtype, by, (flat_blocks(size, by.width),), (THREADS,), arguments)
