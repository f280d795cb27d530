"""Convolutions with columns folded into channels: what is offered, and (in test_cuda_sources) that they are the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minidnn.kernels.cuda_folded import MOST_CANDIDATES, copies_bytes, folded_engines, run_folded
from minidnn.kernels.cuda_launch import Launcher
from minidnn.kernels.problem import FILTER, FOLDED, IMAGE, OUTPUT, asked, linear_product, result_of
from tests.backend import cuda_on_cpu
from tests.backend.test_columns import compare_engines, expected, gpu_device, problem_of, view
from tests.backend.test_convolution import CONVOLUTIONS, Convolution
from tests.backend.test_kernels import close

FEW = (
    Convolution((2, 7, 6, 3), 5, (3, 3), (2, 1), (1, 1)), Convolution((2, 5, 8, 5), 2, (2, 3), (1, 2)),
    Convolution((1, 9, 11, 3), 4, (5, 7), (2, 3), (3, 4), (2, 1)),
)  # fmt: skip
SIDES = ("forward", "backward_weight")
INNER_BYTES = 512  # workspace of the stand-in's engine


class Cudnn:
    """A stand-in that convolves on host memory, with as many engines as one likes."""

    def __init__(self, engines: int = 1, nbytes: int = INNER_BYTES) -> None:
        self.engines, self.nbytes, self.limits = engines, nbytes, list[Any]()

    def candidates(self, problem: Any, limit: int | None) -> Any:
        self.limits.append(limit)
        return ((("engine", number), ("knob_TILE", 2)) for number in range(self.engines))

    def plan(self, problem: Any, options: Any) -> Any:
        return SimpleNamespace(problem=asked(problem, options)[0], workspace_bytes=self.nbytes)

    def run(self, plan: Any, pointers: Any, workspace: int) -> Any:
        problem = plan.problem
        case = Convolution(
            problem.x, problem.y[3], problem.weight[1:3], problem.stride, problem.padding, problem.dilation
        )

        def call() -> None:
            view(workspace, plan.workspace_bytes // 4)[:] = np.nan  # the engine's own
            operands = {IMAGE: problem.x, FILTER: problem.weight, OUTPUT: problem.y}
            arrays = {number: view(pointers[number], shape) for number, shape in operands.items()}
            arrays[result_of(problem)][...] = expected(case, problem.direction, *arrays.values())

        return call


def by_folding(machine: Any, case: Convolution, direction: str) -> None:
    """Check a convolution on folded copies, computed by the stand-in, into poison between canaries."""
    cudnn = Cudnn()
    on = Launcher(machine.library, machine.library.launch, 0, 0, cudnn)
    x, weight, dy, _ = case.arrays(np.float32)
    problem = problem_of(case, direction)
    found = list(folded_engines(cudnn, problem, None))
    assert found
    for engine in found:
        options = dict(engine.options)
        assert engine.workspace_bytes == copies_bytes(problem, options) + INNER_BYTES
        workspace = cuda_on_cpu.Array(np.full(engine.workspace_bytes, 0xFF, np.uint8))
        result = result_of(problem)
        operands = {n: cuda_on_cpu.Array(a) for n, a in ((IMAGE, x), (FILTER, weight), (OUTPUT, dy))}
        operands[result].host[...] = np.nan
        pointers = {number: array.data.ptr for number, array in operands.items()}
        run_folded(on, problem, cudnn.plan(problem, options), options[FOLDED], pointers, workspace.data.ptr)()
        close(operands[result].host, expected(case, direction, x, weight, dy), np.float32, 4.0)
        for array in (*operands.values(), workspace):
            array.check()


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("float16", 2)])
def test_three_columns_of_three_channels_are_offered_as_sixteen_and_as_thirty_two(dtype: str, itemsize: int) -> None:
    problem = problem_of(FEW[0], "forward", dtype)
    engines = list(folded_engines(Cudnn(20), problem, None))
    assert [dict(engine.options)[FOLDED] for engine in engines] == [16] * MOST_CANDIDATES + [32] * MOST_CANDIDATES
    places, taps = 2 * 7 * 6, 5 * 3  # one for each output in a row, but for every line of the image
    for engine in engines:
        wide = dict(engine.options)[FOLDED]
        copies = sum(-(-count * wide * itemsize // 512) * 512 for count in (places, taps))
        assert engine.workspace_bytes == copies + INNER_BYTES


def test_the_limit_counts_the_copies() -> None:
    problem = problem_of(FEW[0], "forward")
    cudnn = Cudnn()
    (engine,) = (e for e in folded_engines(cudnn, problem, None) if dict(e.options)[FOLDED] == 16)
    copies = copies_bytes(problem, dict(engine.options))
    cudnn.limits.clear()
    assert len(list(folded_engines(cudnn, problem, copies + 100))) == 1, "thirty-two channels are above it"
    assert cudnn.limits == [100], "what is left for cuDNN"
    assert not list(folded_engines(cudnn, problem, copies - 1))


def test_what_is_not_folded() -> None:
    def offered(case: Convolution, direction: str = "forward") -> int:
        return len(list(folded_engines(Cudnn(), problem_of(case, direction), None)))

    assert offered(FEW[0]) and not offered(FEW[0], "backward_data")
    assert not offered(next(case for case in CONVOLUTIONS.values() if case.groups > 1))
    assert not offered(FEW[0]._replace(x=(2, 7, 6, 64))), "a tap is enough work"
    assert not offered(FEW[0]._replace(kernel=(3, 1))), "nothing to fold"
    assert not offered(FEW[0]._replace(dilation=(1, 2))), "its columns do not lie side by side"
    assert offered(FEW[0]._replace(dilation=(2, 1)))
    assert not list(folded_engines(Cudnn(), linear_product("forward", 5, 7, 3, "float32"), None))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_on_a_gpu_folded_engines_agree_with_the_definition(precision: str) -> None:
    stem = Convolution((8, 64, 64, 3), 64, (7, 7), (2, 2), (3, 3))
    with gpu_device(precision) as device:
        for case in (*FEW, stem):
            count = compare_engines(device, str(case), case, SIDES, lambda *at: folded_engines(device.cudnn, *at))
        assert count, "cuDNN has engines for twenty-four or thirty-two channels"
