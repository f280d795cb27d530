"""Convolutions on parts of a batch: what is offered, and (in test_cuda_sources) that they are the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minidnn.errors import UserError
from minidnn.kernels.cuda_conv import bind_engine, extra_bytes
from minidnn.kernels.cuda_launch import Launcher
from minidnn.kernels.cuda_parts import MOST_CANDIDATES, part_engines
from minidnn.kernels.problem import FILTER, IMAGE, OUTPUT, PART, asked, linear_product, result_of
from tests.backend import cuda_on_cpu, test_folded
from tests.backend.test_columns import compare_engines, expected, gpu_device, problem_of
from tests.backend.test_convolution import Convolution
from tests.backend.test_kernels import close

CASES = (Convolution((8, 7, 6, 4), 8, (3, 3), (2, 1), (1, 1)), Convolution((4, 5, 8, 4), 4, (2, 3), (1, 2)))
SIDES = ("forward", "backward_data", "backward_weight")
IMAGE_BYTES = 512  # workspace of the stand-in's engines for an image
FILTER_BYTES = 8 * 3 * 3 * 4 * 4 + 384  # of the first case's gradient, rounded up to 512


class Cudnn(test_folded.Cudnn):
    """The stand-in that convolves on host memory, with engines that take as much workspace for every image."""

    def __init__(self, engines: int = 1, refuses: tuple[int, ...] = ()) -> None:
        super().__init__(engines)
        self.refuses = refuses

    def candidates(self, problem: Any, limit: int | None) -> Any:
        assert limit is None
        return ((("engine", number), ("knob_TILE", 2)) for number in range(self.engines))

    def plan(self, problem: Any, options: Any) -> Any:
        small, _ = asked(problem, options)
        if options["engine"] in self.refuses and PART in options:
            raise UserError("not for so few images")
        return SimpleNamespace(problem=small, workspace_bytes=IMAGE_BYTES * small.x[0])


def by_parts(machine: Any, case: Convolution, direction: str) -> None:
    """Check a convolution of two images at a time, computed by the stand-in, into poison between canaries."""
    cudnn = Cudnn()
    on = Launcher(machine.library, machine.library.launch, 0, 0, cudnn)
    x, weight, dy, _ = case.arrays(np.float32)
    problem = problem_of(case, direction)
    room = 2 * IMAGE_BYTES + extra_bytes(problem, {PART: 2})
    (engine,) = part_engines(cudnn, problem, room)
    options = dict(engine.options)
    assert options[PART] == 2 and engine.workspace_bytes == room
    workspace = cuda_on_cpu.Array(np.full(engine.workspace_bytes, 0xFF, np.uint8))
    operands = {n: cuda_on_cpu.Array(a) for n, a in ((IMAGE, x), (FILTER, weight), (OUTPUT, dy))}
    result = result_of(problem)
    operands[result].host[...] = np.nan
    bind_engine(on, problem, options, {n: a.data.ptr for n, a in operands.items()}, workspace.data.ptr)()
    close(operands[result].host, expected(case, direction, x, weight, dy), np.float32, 4.0)
    for array in (*operands.values(), workspace):
        array.check()


@pytest.mark.parametrize(
    ("direction", "limit", "images"),
    [
        ("forward", 8 * IMAGE_BYTES, None),  # there is room for all of them
        ("forward", 8 * IMAGE_BYTES - 1, 4),
        ("backward_data", 3 * IMAGE_BYTES, 2),
        ("forward", IMAGE_BYTES, 1),
        ("forward", IMAGE_BYTES - 1, None),
        ("backward_weight", 4 * IMAGE_BYTES + FILTER_BYTES, 4),
        ("backward_weight", 4 * IMAGE_BYTES + FILTER_BYTES - 1, 2),
    ],
)
def test_the_most_images_that_there_is_workspace_for(direction: str, limit: int, images: int | None) -> None:
    found = list(part_engines(Cudnn(), problem_of(CASES[0], direction), limit))
    assert [dict(engine.options)[PART] for engine in found] == ([] if images is None else [images])
    for engine in found:
        own = FILTER_BYTES if direction == "backward_weight" else 0
        assert engine.workspace_bytes == images * IMAGE_BYTES + own <= limit


def test_what_does_not_go_by_parts() -> None:
    problem, limit = problem_of(CASES[0], "forward"), 4 * IMAGE_BYTES
    assert list(part_engines(Cudnn(), problem, limit)) and not list(part_engines(Cudnn(), problem, None))
    assert not list(part_engines(Cudnn(), linear_product("forward", 8, 7, 3, "float32"), limit))
    assert not list(part_engines(Cudnn(), problem_of(CASES[0]._replace(x=(7, 7, 6, 4)), "forward"), limit)), "seven"
    odd = problem_of(Convolution((8, 3, 3, 3), 4, (3, 3)), "forward")
    assert [dict(e.options)[PART] for e in part_engines(Cudnn(), odd, limit)] == [4]
    assert not list(part_engines(Cudnn(), odd, 2 * IMAGE_BYTES)), "the third image would begin between 16 bytes"


def test_engines_with_room_for_all_images_come_as_they_are_where_they_are_asked_for() -> None:
    problem = problem_of(CASES[0], "forward")
    for limit, images in ((None, None), (8 * IMAGE_BYTES, None), (8 * IMAGE_BYTES - 1, 4)):
        (engine,) = part_engines(Cudnn(), problem, limit, whole=True)
        assert dict(engine.options).get(PART) == images and engine.workspace_bytes == (images or 8) * IMAGE_BYTES


def test_some_engines_are_tried_and_those_that_refuse_a_part_are_left_out() -> None:
    problem, limit = problem_of(CASES[0], "forward"), 4 * IMAGE_BYTES
    found = list(part_engines(Cudnn(20, refuses=(1, 2)), problem, limit))
    assert [dict(engine.options)["engine"] for engine in found] == [0, *range(3, MOST_CANDIDATES)]


@pytest.mark.gpu
def test_on_a_gpu_engines_on_parts_agree_with_the_definition() -> None:
    wide = Convolution((16, 28, 28, 64), 64, (3, 3), (1, 1), (1, 1))
    with gpu_device("fp32") as device:
        count = compare_engines(device, "wide", wide, SIDES, lambda p, _: part_engines(device.cudnn, p, 16 << 20))
    assert count, "cuDNN has engines that take more than a MiB an image"
