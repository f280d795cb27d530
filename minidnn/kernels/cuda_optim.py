"""CUDA kernels: optimizers, clipping, and dynamic loss scaling. See ``cuda_launch`` for the form."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from minidnn.kernels.base import Array
from minidnn.kernels.cuda_blocks import SCRATCH_BYTES, THREADS, flat_blocks
from minidnn.kernels.cuda_launch import SINGLE, Launcher, Sequential, Work, access, float32, float64, int32, int64
from minidnn.scalars import Scalar, Scaling

CHECK_BLOCKS = 1024
SLICES = 48  # of one launch, as in cuda/optim.cu
GAP_BYTES = 128  # between two layers in a flat buffer, which stays zero


def sgd_update(on: Launcher, weight: Array, gradient: Array, scalars: Array, *, weight_decay: float) -> Work:
    arguments = [weight, gradient, scalars, int32(Scalar.LR), int32(Scalar.GRADIENT_SCALE), int64(int(weight.size))]
    return _update(on, "sgd_update", (weight,), gradient, [*arguments, float32(weight_decay)])


def sgd_momentum_update(
    on: Launcher, weight: Array, velocity: Array, gradient: Array, scalars: Array, *, momentum: float, nesterov: bool,
    weight_decay: float,
) -> Work:  # fmt: skip
    arguments = [weight, velocity, gradient, scalars, int32(Scalar.LR), int32(Scalar.GRADIENT_SCALE)]
    arguments += [int64(int(weight.size)), float32(momentum), int32(int(nesterov)), float32(weight_decay)]
    return _update(on, "sgd_momentum_update", (weight, velocity), gradient, arguments)


def adam_update(
    on: Launcher, weight: Array, first: Array, second: Array, gradient: Array, scalars: Array, *, beta1: float,
    beta2: float, eps: float, weight_decay: float,
) -> Work:  # fmt: skip
    where = (Scalar.LR, Scalar.GRADIENT_SCALE, Scalar.BIAS1, Scalar.BIAS2)
    constants = (beta1, beta2, 1.0 - beta1, 1.0 - beta2, eps, weight_decay)
    arguments = [
        weight,
        first,
        second,
        gradient,
        scalars,
        *map(int32, where),
        int64(int(weight.size)),
        *map(float32, constants),
    ]
    return _update(on, "adam_update", (weight, first, second), gradient, arguments)


def _update(on: Launcher, name: str, state: tuple[Array, ...], gradient: Array, arguments: list[object]) -> Work:
    """Weights and state are float32; the gradient has the type the source is compiled for."""
    by = access(*state, gradient)
    blocks = flat_blocks(int(state[0].size), by.width)
    return on.launch("optim", name, str(gradient.dtype), by, (blocks,), (THREADS,), [*arguments, int32(Scalar.FINITE)])


def scale_loss(on: Launcher, scalars: Array, scaling: Array) -> Work:
    where = map(int32, (Scalar.LOSS_WEIGHT, Scalar.GRADIENT_SCALE, Scaling.SCALE))
    return on.launch("optim", "scale_loss", "float32", SINGLE, (1,), (1,), [scalars, scaling, *where])


def check_finite(on: Launcher, scaling: Array, *gradients: Array) -> Work:
    """Neighbours in memory of one type are checked together, with what lies between them in a flat buffer: zeros."""
    return Sequential(*(_check_run(on, scaling, run) for run in runs(gradients)))


def _check_run(on: Launcher, scaling: Array, run: list[Array]) -> Work:
    first, size = run[0], _extent(run)
    by = access(first)
    blocks = min(-(-size // (by.width * THREADS)), CHECK_BLOCKS)
    arguments = [scaling, first, int64(size), int32(Scaling.FINITE)]
    return on.launch("optim", "check_finite", str(first.dtype), by, (max(1, blocks),), (THREADS,), arguments)


def _extent(run: list[Array]) -> int:
    """Elements from the first to the last of neighbours, gaps included."""
    first, last = run[0], run[-1]
    return (int(last.data.ptr) + int(last.nbytes) - int(first.data.ptr)) // int(first.dtype.itemsize)


def runs(arrays: Sequence[Array]) -> list[list[Array]]:
    """Arrays of one type that follow one another with gaps below ``GAP_BYTES``, in order of their addresses."""
    found: list[list[Array]] = []
    for array in sorted(arrays, key=lambda a: int(a.data.ptr)):
        last = found[-1][-1] if found else None
        if last is not None and last.dtype == array.dtype:
            gap = int(array.data.ptr) - int(last.data.ptr) - int(last.nbytes)
            if 0 <= gap < GAP_BYTES:
                found[-1].append(array)
                continue
        found.append([array])
    return found


def adapt_scale(on: Launcher, scaling: Array, scalars: Array, *, interval: int) -> Work:
    where = map(int32, (*Scaling, Scalar.FINITE, interval))
    return on.launch("optim", "adapt_scale", "float32", SINGLE, (1,), (1,), [scaling, scalars, *where])


def clip_scale(on: Launcher, scalars: Array, *gradients: Array, max_norm: float) -> Work:
    """Neighbours in memory are summed together, as in ``check_finite``: the flat buffers, which are the same under any plan."""
    found = runs(gradients)
    works, sums = list[Work](), 0
    most = min(CHECK_BLOCKS, SCRATCH_BYTES // 8 // max(1, len(found)))
    assert most, "more pieces than the scratch holds sums of"
    for run in found:
        by, size = access(run[0]), _extent(run)
        blocks = max(1, min(-(-size // (by.width * THREADS)), most))
        arguments = [ctypes.c_void_p(on.scratch + 8 * sums), run[0], int64(size)]
        works.append(on.launch("optim", "square_sums", str(run[0].dtype), by, (blocks,), (THREADS,), arguments))
        sums += blocks
    arguments = [scalars, ctypes.c_void_p(on.scratch), *map(int32, (sums, Scalar.GRADIENT_SCALE)), float64(max_norm)]
    works.append(on.launch("optim", "clip_scale", "float32", SINGLE, (1,), (THREADS,), arguments))
    return Sequential(*works)


class Slices(ctypes.Structure):
    """As in ``cuda/optim.cu``: passed to the kernel by value."""

    _fields_ = (
        *((name, ctypes.c_void_p * SLICES) for name in ("weight", "first", "second", "gradient", "narrow")),
        ("size", ctypes.c_longlong * SLICES),
        ("end", ctypes.c_int * SLICES),
    )


def update_all(
    on: Launcher, *operands: Array, kernel: str, count: int, narrow: bool, settings: Mapping[str, Any]
) -> Work:
    """As many slices a launch as fit its arguments."""
    *tensors, scalars = operands
    where = [Scalar.LR, Scalar.GRADIENT_SCALE, Scalar.FINITE]
    s, constants = settings, list[Any]()
    if kernel == "sgd_momentum_update":
        constants = [float32(s["momentum"]), int32(int(s["nesterov"])), float32(s["weight_decay"])]
    elif kernel == "sgd_update":
        constants = [float32(s["weight_decay"])]
    else:
        where += [Scalar.BIAS1, Scalar.BIAS2]
        rests = (s["beta1"], s["beta2"], 1.0 - s["beta1"], 1.0 - s["beta2"], s["eps"], s["weight_decay"])
        constants = [*map(float32, rests)]
    works = []
    for begin in range(0, count, SLICES):
        taken = [tensors[i::count] for i in range(begin, min(begin + SLICES, count))]
        by = access(*(array for slices in taken for array in slices if array.size))
        grid, table = _table(taken, narrow, by.width)
        arguments = [table, scalars, *map(int32, where), *constants]
        dtype = str(taken[0][-1].dtype)
        works.append(on.launch("optim", f"{kernel}_all", dtype, by, (grid,), (THREADS,), arguments))
    return Sequential(*works)


def _table(taken: list[list[Array]], narrow: bool, width: int) -> tuple[int, Slices]:
    """Blocks in all, and what the kernel is told of every slice."""
    table, end = Slices(), 0
    for i, (weight, *others) in enumerate(taken):
        gradient, rounded = others[-1], others[-2] if narrow else None
        state = others[: -2 if narrow else -1]
        end += flat_blocks(int(weight.size), width)
        table.weight[i], table.gradient[i] = int(weight.data.ptr), int(gradient.data.ptr)
        for name, array in zip(("first", "second"), state, strict=False):
            getattr(table, name)[i] = int(array.data.ptr)
        if rounded is not None:
            table.narrow[i] = int(rounded.data.ptr)
        table.size[i], table.end[i] = int(weight.size), end
    return end, table
