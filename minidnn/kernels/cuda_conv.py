"""CUDA kernels: convolution and matrix products, by cuDNN where it has an engine, else by our own ``cuda/gemm.cu``.

Which of the two is part of the recipe (the option ``engine``: cuDNN's number, or -1 for ours), and so is the workspace. Without
such an option a matrix product takes cuDNN's first engine that is content with the launcher's scratch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from minidnn.errors import UserError
from minidnn.kernels.base import Array, Pair
from minidnn.kernels.cuda_blocks import SCRATCH_BYTES, THREADS
from minidnn.kernels.cuda_folded import copies_bytes, run_folded
from minidnn.kernels.cuda_launch import SINGLE, Launcher, Sequential, Work, access_at, int32, int64, structure
from minidnn.kernels.cuda_parts import run_parts, sum_bytes
from minidnn.kernels.cuda_pointwise import bias_add
from minidnn.kernels.cuda_turned import filter_bytes, run_turned
from minidnn.kernels.problem import (
    BIAS,
    BLAS_ENGINE,
    FILTER,
    FOLDED,
    IMAGE,
    LEFT,
    OUTPUT,
    OWN,
    OWN_ENGINE,
    PART,
    PRODUCT,
    RIGHT,
    SPLIT,
    TURNED,
    Convolution,
    Problem,
    Product,
    linear_product,
    operand_shapes,
    own,
)

TILE = 64  # of our own product, as in gemm.cu


def conv2d_forward(
    on: Launcher, y: Array, x: Array, weight: Array, bias: Array | None = None, *, stride: Pair, padding: Pair,
    dilation: Pair, groups: int, images: int = 0, scratch: Array | None = None, **engine: int,
) -> Work:  # fmt: skip
    """``engine``: the options of the recipe; none: what cuDNN's heuristics choose under the scratch given."""
    problem = _problem("forward", x, y, weight, stride, padding, dilation)
    work = _convolve(on, problem, {IMAGE: x, FILTER: weight, OUTPUT: y}, scratch, engine)
    return work if bias is None else Sequential(work, bias_add(on, y, bias))


def conv2d_relu_forward(
    on: Launcher, y: Array, x: Array, weight: Array, bias: Array, *, stride: Pair, padding: Pair, dilation: Pair,
    groups: int, images: int = 0, scratch: Array | None = None, **engine: int,
) -> Work:  # fmt: skip
    """``engine`` as for ``conv2d_forward``; with the option ``split`` it is an engine of that, and a kernel of ours follows."""
    problem = _problem("forward_relu", x, y, weight, stride, padding, dilation)
    return _convolve(on, problem, {IMAGE: x, FILTER: weight, BIAS: bias, OUTPUT: y}, scratch, engine)


def conv2d_backward_data(
    on: Launcher, dx: Array, dy: Array, weight: Array, *, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    images: int = 0, scratch: Array | None = None, **engine: int,
) -> Work:  # fmt: skip
    """``engine`` as for ``conv2d_forward``."""
    problem = _problem("backward_data", dx, dy, weight, stride, padding, dilation)
    return _convolve(on, problem, {IMAGE: dx, FILTER: weight, OUTPUT: dy}, scratch, engine)


def conv2d_backward_weight(
    on: Launcher, d_weight: Array, x: Array, dy: Array, *, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    images: int = 0, accumulate: bool = False, scratch: Array | None = None, **engine: int,
) -> Work:  # fmt: skip
    """``engine`` as for ``conv2d_forward``. cuDNN cannot accumulate and no recipe asks it to: that is our own kernel's."""
    problem = _problem("backward_weight", x, dy, d_weight, stride, padding, dilation)
    operands = {IMAGE: x, FILTER: d_weight, OUTPUT: dy}
    if accumulate:
        return _own_convolution(on, problem, _addresses(operands), accumulate)
    return _convolve(on, problem, operands, scratch, engine)


def _problem(
    direction: str, x: Array, y: Array, weight: Array, stride: Pair, padding: Pair, dilation: Pair
) -> Convolution:
    return Convolution(direction, x.shape, y.shape, weight.shape, stride, padding, dilation, str(x.dtype))


def _addresses(arrays: Mapping[int, Array]) -> dict[int, int]:
    return {number: int(array.data.ptr) for number, array in arrays.items()}


def _convolve(
    on: Launcher, problem: Convolution, arrays: Mapping[int, Array], scratch: Array | None, engine: Mapping[str, int]
) -> Work:
    provided = 0 if scratch is None else int(scratch.nbytes)
    options = dict(engine) or dict((on.cudnn.select(problem, provided) if on.cudnn else own(problem)).options)
    return _bind(on, problem, arrays, options, provided, 0 if scratch is None else int(scratch.data.ptr))


def _bind(
    on: Launcher,
    problem: Problem,
    arrays: Mapping[int, Array],
    options: Mapping[str, int],
    provided: int,
    workspace: int,
) -> Work:
    """Bind an engine in the workspace that the recipe provides."""
    nbytes = workspace_bytes(on, problem, options)
    if nbytes > provided:
        raise UserError(
            f"engine {dict(options)} wants {nbytes} bytes of workspace where the recipe says {provided}; the "
            "recipe was made on another GPU or cuDNN, leave --recipe out to choose anew"
        )
    return bind_engine(on, problem, options, _addresses(arrays), workspace)


def workspace_bytes(on: Launcher, problem: Problem, options: Mapping[str, int]) -> int:
    """What an engine takes. Raises UserError for one of a library that is not here, or that this one does not have."""
    if options["engine"] == OWN_ENGINE:
        return 0
    if options["engine"] != BLAS_ENGINE:
        return extra_bytes(problem, options) + int(on.cudnn.plan(problem, options).workspace_bytes)
    if on.cudnn.blas is None:
        raise UserError("the recipe names cuBLAS, which is not installed here; leave --recipe out to choose anew")
    return int(on.cudnn.blas.workspace_bytes(problem, options))


def extra_bytes(problem: Problem, options: Mapping[str, int]) -> int:
    """Workspace that an engine takes besides cuDNN's own: of folded copies, a turned filter or a part's gradient; as a rule 0."""
    if isinstance(problem, Product):
        return 0
    if TURNED in options:
        return filter_bytes(problem)
    return sum_bytes(problem) if PART in options else copies_bytes(problem, options)


def bind_engine(
    on: Launcher, problem: Problem, options: Mapping[str, int], pointers: Mapping[int, int], workspace: int
) -> Work:
    """Bind an engine of cuDNN or cuBLAS, or our own convolution, to addresses."""
    if isinstance(problem, Convolution) and SPLIT in options:
        forward, rest = problem._replace(direction="forward"), {k: v for k, v in options.items() if k != SPLIT}
        at = {number: pointers[number] for number in operand_shapes(forward)}
        return Sequential(bind_engine(on, forward, rest, at, workspace), _bias_relu(on, problem, pointers))
    if options["engine"] == BLAS_ENGINE:
        work: Work = on.cudnn.blas.run(on, problem, options, pointers, workspace)
        return work
    if isinstance(problem, Convolution) and options["engine"] == OWN_ENGINE:
        return _own_convolution(on, problem, pointers)
    plan = on.cudnn.plan(problem, options)
    if isinstance(problem, Convolution):
        if FOLDED in options:
            return run_folded(on, problem, plan, options[FOLDED], pointers, workspace)
        if TURNED in options:
            return run_turned(on, problem, plan, options.get(PART), pointers, workspace)
        if PART in options:
            return run_parts(on, problem, plan, options[PART], pointers, workspace)
    bound: Work = on.cudnn.run(plan, pointers, workspace)
    return bound


def _bias_relu(on: Launcher, problem: Convolution, at: Mapping[int, int]) -> Work:
    """Bind what follows a split convolution, on its result."""
    rows, channels = math.prod(problem.y[:3]), problem.y[3]
    by = access_at(problem.dtype, (at[OUTPUT], at[BIAS]), channels)
    arguments = [int64(at[OUTPUT]), int64(at[BIAS]), int64(rows), int32(channels)]
    return on.walk("pointwise", "bias_relu", rows, channels, problem.dtype, arguments, by)


def _own_convolution(on: Launcher, problem: Convolution, at: Mapping[int, int], accumulate: bool = False) -> Work:
    (n, h, w, c), (_, p, q, k), (_, r, s, share) = problem.x, problem.y, problem.weight
    groups = c // share
    shape = structure(n, h, w, c, p, q, k, r, s, *problem.stride, *problem.padding, *problem.dilation, groups)
    x, weight, y = (int64(at[number]) for number in (IMAGE, FILTER, OUTPUT))
    arguments: list[Any]
    if problem.direction == "forward":
        rows, columns, arguments = n * p * q, k // groups, [y, x, weight, shape]
    elif problem.direction == "backward_data":
        rows, columns, arguments = n * h * w, share, [x, y, weight, shape]
    else:
        rows, columns, arguments = k // groups, r * s * share, [weight, x, y, shape, int32(int(accumulate))]
    grid = (-(-rows // TILE), -(-columns // TILE), groups)
    return on.launch("gemm", f"conv2d_{problem.direction}", problem.dtype, SINGLE, grid, (THREADS,), arguments)


def linear_forward(
    on: Launcher, y: Array, x: Array, weight: Array, bias: Array | None = None, *, scratch: Array | None = None,
    **engine: int,
) -> Work:  # fmt: skip
    """``engine``: the options of the recipe; none: the first of cuDNN's that the launcher's scratch is enough for."""
    problem = linear_product("forward", x.shape[0], x.shape[1], weight.shape[0], str(x.dtype))
    work = _multiply(on, y, x, weight, problem, scratch, engine)
    return work if bias is None else Sequential(work, bias_add(on, y, bias))


def linear_backward_data(
    on: Launcher, dx: Array, dy: Array, weight: Array, *, scratch: Array | None = None, **engine: int
) -> Work:
    problem = linear_product("backward_data", dx.shape[0], dx.shape[1], weight.shape[0], str(dx.dtype))
    return _multiply(on, dx, dy, weight, problem, scratch, engine)


def linear_backward_weight(
    on: Launcher, d_weight: Array, x: Array, dy: Array, *, accumulate: bool = False, scratch: Array | None = None,
    **engine: int,
) -> Work:  # fmt: skip
    """cuDNN cannot accumulate and no recipe asks it to: that is our own kernel's."""
    problem = linear_product("backward_weight", x.shape[0], x.shape[1], dy.shape[1], str(x.dtype))
    return _multiply(on, d_weight, dy, x, problem, scratch, dict(OWN.options) if accumulate else engine, accumulate)


def _multiply(
    on: Launcher, c: Array, a: Array, b: Array, problem: Product, scratch: Array | None, engine: Mapping[str, int],
    accumulate: bool = False,
) -> Work:  # fmt: skip
    provided, workspace = (0, 0) if scratch is None else (int(scratch.nbytes), int(scratch.data.ptr))
    options = dict(engine)
    if not options:
        provided, workspace = SCRATCH_BYTES, on.scratch
        options = dict(on.cudnn.select(problem, provided).options if on.cudnn else OWN.options)
    if options["engine"] != OWN_ENGINE:
        return _bind(on, problem, {LEFT: a, RIGHT: b, PRODUCT: c}, options, provided, workspace)
    p = problem
    arguments = [c, a, b, int64(p.rows), int32(p.columns), int64(p.depth)]
    arguments += [*map(int64, (p.a_row, p.a_depth, p.b_depth, p.b_column)), int32(int(accumulate))]
    grid = (-(-p.rows // TILE), -(-p.columns // TILE))
    return on.launch("gemm", "matrix_product", p.dtype, SINGLE, grid, (THREADS,), arguments)
