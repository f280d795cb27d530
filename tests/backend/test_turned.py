"""Forward convolutions as data gradients: what is offered, and (in test_cuda_sources) that they are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minidnn.kernels.cuda_conv import bind_engine, extra_bytes
from minidnn.kernels.cuda_launch import Launcher
from minidnn.kernels.cuda_turned import MOST_CANDIDATES, turned_engines
from minidnn.kernels.problem import FILTER, IMAGE, OUTPUT, PART, TURNED, linear_product, turned
from tests.backend import cuda_on_cpu
from tests.backend.test_columns import compare_engines, expected, gpu_device, problem_of
from tests.backend.test_convolution import CONVOLUTIONS, Convolution
from tests.backend.test_kernels import close
from tests.backend.test_parts import IMAGE_BYTES, Cudnn

CASES = (
    Convolution((4, 7, 6, 4), 8, (3, 3), (1, 1), (1, 1)), Convolution((4, 5, 8, 4), 12, (2, 3)),
    Convolution((4, 9, 10, 4), 4, (5, 3), (1, 1), (3, 1), (2, 1)),
)  # fmt: skip
FILTER_BYTES = 8 * 3 * 3 * 4 * 4 + 384  # of the first case, rounded up to 512


def by_turning(machine: Any, case: Convolution, images: int | None) -> None:
    """Check a forward convolution that the stand-in computes as a data gradient, into poison between canaries."""
    cudnn = Cudnn()
    on = Launcher(machine.library, machine.library.launch, 0, 0, cudnn)
    x, weight, dy, _ = case.arrays(np.float32)
    problem = problem_of(case, "forward")
    room = (images or case.x[0]) * IMAGE_BYTES + extra_bytes(problem, {TURNED: 1})
    (engine,) = turned_engines(cudnn, problem, room)
    options = dict(engine.options)
    assert options.get(PART) == images and engine.workspace_bytes == room
    workspace = cuda_on_cpu.Array(np.full(engine.workspace_bytes, 0xFF, np.uint8))
    operands = {n: cuda_on_cpu.Array(a) for n, a in ((IMAGE, x), (FILTER, weight), (OUTPUT, dy))}
    operands[OUTPUT].host[...] = np.nan
    bind_engine(on, problem, options, {n: a.data.ptr for n, a in operands.items()}, workspace.data.ptr)()
    close(operands[OUTPUT].host, expected(case, "forward", x, weight, dy), np.float32, 4.0)
    for array in (*operands.values(), workspace):
        array.check()


def test_the_other_convolution_has_the_sizes_of_this_one() -> None:
    for case in CASES:
        problem = problem_of(case, "forward")
        other = turned(problem)
        assert other.x == problem.y and other.y == problem.x and other.weight[0] == problem.weight[3]
        sizes = zip(other.x[1:3], other.weight[1:3], other.padding, other.dilation, strict=True)
        assert other.y[1:3] == tuple(n + 2 * p - d * (k - 1) for n, k, p, d in sizes)


def test_engines_are_offered_for_all_images_or_for_a_part_of_them() -> None:
    problem = problem_of(CASES[0], "forward")
    for limit, images in ((None, None), (4 * IMAGE_BYTES, None), (4 * IMAGE_BYTES - 1, 2)):
        (engine,) = turned_engines(Cudnn(), problem, None if limit is None else limit + FILTER_BYTES)
        assert dict(engine.options).get(PART) == images
        assert engine.workspace_bytes == (images or 4) * IMAGE_BYTES + FILTER_BYTES
    assert not list(turned_engines(Cudnn(), problem, FILTER_BYTES - 1)), "there is no room for the filter"
    assert len(list(turned_engines(Cudnn(20), problem, None))) == MOST_CANDIDATES


def test_what_is_not_turned() -> None:
    def offered(case: Convolution, direction: str = "forward") -> int:
        return len(list(turned_engines(Cudnn(), problem_of(case, direction), None)))

    assert offered(CASES[0])
    assert not offered(CASES[0], "backward_data") and not offered(CASES[0], "backward_weight")
    assert not offered(next(case for case in CONVOLUTIONS.values() if case.groups > 1))
    assert not offered(CASES[0]._replace(stride=(2, 2)))
    assert not offered(CASES[0]._replace(kernel=(1, 1), padding=(0, 0))), "cuBLAS does that"
    assert not offered(CASES[0]._replace(padding=(3, 3))), "the other one would have a negative padding"
    assert not list(turned_engines(Cudnn(), linear_product("forward", 8, 7, 3, "float32"), None))


@pytest.mark.gpu
def test_on_a_gpu_turned_engines_agree_with_the_definition() -> None:
    wide = Convolution((16, 28, 28, 64), 96, (3, 3), (1, 1), (1, 1))
    with gpu_device("fp32") as device:
        for limit in (None, 16 << 20):
            count = compare_engines(
                device, "wide", wide, ("forward",), lambda p, _, limit=limit: turned_engines(device.cudnn, p, limit)
            )
            assert count, "cuDNN has engines for the gradient of an image"
        for case in CASES:
            compare_engines(device, str(case), case, ("forward",), lambda *at: turned_engines(device.cudnn, *at))
