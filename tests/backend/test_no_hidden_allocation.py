"""A kernel's own memory: at most 256 KiB, at two sizes four times apart. Buffers inside BLAS are its own affair."""

from __future__ import annotations

import functools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minidnn.kernels import numpy_kernels
from tests.backend.cases import Case, Maker
from tests.backend.test_convolution import Convolution

LIMIT = 256 << 10
SIZES = ((3, 48, 48, 32), (12, 48, 48, 32))  # 0.8 and 3.4 MiB a tensor


@functools.cache
def cases(shape: tuple[int, int, int, int]) -> dict[str, Case]:
    return {case.id: case for case in Maker(shape, "float32").all()}


def peak_bytes(call: Callable[[], None]) -> int:
    call()  # caches of the interpreter and of BLAS fill at the first call
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak - before


def test_measurement_sees_a_temporary() -> None:
    """Or the tests below would pass whatever a kernel does."""
    x = np.zeros(1 << 20, np.float32)
    assert peak_bytes(lambda: np.copyto(x, x + 1)) >= x.nbytes


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("name", sorted(Case.id for Case in Maker((1, 6, 6, 2), "float32").all()))
def test_kernel_stays_under_256_kib(name: str, shape: Any) -> None:
    case = cases(shape)[name]
    outputs, inputs = [np.array(out) for out in case.outputs], [np.array(x) for x in case.inputs]
    kernel = getattr(numpy_kernels, case.kernel)
    assert peak_bytes(lambda: kernel(*outputs, *inputs, **case.attrs)) <= LIMIT
    for position in case.overwrites:
        assert peak_bytes(lambda p=position: kernel(inputs[p], *inputs, **case.attrs)) <= LIMIT  # type: ignore[misc]


@pytest.mark.parametrize("batch", [4, 16])
@pytest.mark.parametrize(
    "convolution",
    [
        Convolution((4, 48, 48, 32), 32, (3, 3), (1, 1), (1, 1)),
        Convolution((4, 48, 48, 32), 32, (3, 3), (2, 2), (1, 1)),
        Convolution((4, 48, 48, 32), 32, (1, 1)),
        Convolution((4, 48, 48, 32), 32, (3, 3), (1, 1), (2, 2), (2, 2), 2),
        Convolution((4, 12, 12, 160), 320, (3, 3), (1, 1), (1, 1)),  # 1.8 MiB of weights
    ],
    ids=["3x3", "stride 2", "1x1", "dilated, grouped", "many weights"],
)
def test_convolution_takes_the_rest_from_its_scratch(convolution: Convolution, batch: int) -> None:
    convolution = convolution._replace(x=(batch, *convolution.x[1:]))
    x, weight, dy, bias = convolution.arrays(np.float32)
    for direction in ("forward", "backward_data", "backward_weight"):
        shapes = (convolution.x, convolution.y, convolution.weight)
        engine = numpy_kernels.select_engine(direction, *shapes, *convolution.attrs.values(), 4, None)
        attrs = {**convolution.attrs, **dict(engine.options), "scratch": np.empty(engine.workspace_bytes, np.uint8)}
        if direction == "forward":
            calls = [functools.partial(numpy_kernels.conv2d_forward, dy, x, weight, bias, **attrs)]
        elif direction == "backward_data":
            calls = [functools.partial(numpy_kernels.conv2d_backward_data, x, dy, weight, **attrs)]
        else:
            add = functools.partial(numpy_kernels.conv2d_backward_weight, weight, x, dy, **attrs)
            calls = [add, functools.partial(add, accumulate=True)]
        for call in calls:
            assert peak_bytes(call) <= LIMIT, direction
