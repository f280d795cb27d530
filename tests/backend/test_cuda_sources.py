"""Every kernel of our own CUDA sources, run on the CPU: bound by the code that binds it on a GPU, against its definition.

In packs of four (float32), in packs of eight (float16) and one by one; into poison between canaries; in several orders of
blocks and threads, on which no bit may depend, nor on addresses.
"""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tests.backend.reference as ref
from minidnn.kernels import cuda_blocks, cuda_columns, cuda_kernels, cuda_launch, cuda_optim
from minidnn.kernels.cublas import Cublas
from minidnn.kernels.problem import FILTER, IMAGE, OUTPUT
from tests.backend import cuda_on_cpu, test_columns, test_convolution, test_folded, test_parts, test_turned
from tests.backend.cases import Case, Maker
from tests.backend.cuda_cases import EXTRA, HalfMaker, halved, made
from tests.backend.test_convolution import CONVOLUTIONS, DIRECTIONS, Convolution
from tests.backend.test_kernels import IDS, close, poison, same_bits

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None,
    reason="the CUDA sources are compiled for the CPU by g++ on Linux",
)

ODD, EVEN = (3, 7, 13, 5), (2, 8, 10, 16)  # one by one and in packs
STRIPS = (2, 16, 20, 264)  # several blocks along the rows, several strips of channels of which one is cut
SINGLES = (2, 31, 40, 7)  # several blocks of one channel a thread
PACKED = Convolution((2, 7, 6, 8), 5, (3, 3), (2, 1), (1, 1))  # its taps hold whole packs
REDUCTIONS = (
    "batch_norm_statistics", "batch_norm_statistics_running", "batch_norm_backward_weight",
    "channel_sum", "channel_sum-accumulate", "batch_norm_relu_backward_weight", "batch_norm_add_relu_backward_weight",
    "batch_norm_add_relu_backward_weight_sum", "relu_bias_backward", "subsample_backward_weight",
)  # fmt: skip
LARGE = (
    *REDUCTIONS, "batch_norm_relu", "batch_norm_add_relu", "batch_norm_relu_backward_data", "batch_norm_backward_data",
    "max_pool_inference-disjoint", "max_pool_backward-disjoint", "avg_pool_backward-overlapping",
    "global_avg_pool_forward", "global_avg_pool_backward", "clip_scale",
)  # fmt: skip
CONVERSIONS = ("float16 to float32", "float32 to float16")


class Bound:
    """A case on arrays of its own, bound; ``over``: the first output is that input."""

    def __init__(self, on: Any, case: Case, over: int | None = None, shift: int = 0) -> None:
        self.case, self.over = case, over
        self.inputs = [cuda_on_cpu.Array(x, shift, 0x70 + i % 5) for i, x in enumerate(case.inputs)]
        self.outputs = [cuda_on_cpu.Array(out, shift, 0x75 + i % 5) for i, out in enumerate(case.outputs)]
        if over is not None:
            self.outputs[0] = self.inputs[over]
        self.work = getattr(cuda_kernels, case.kernel)(on, *self.outputs, *self.inputs, **case.attrs)

    def run(self, library: Any, seed: int = 0) -> list[Any]:
        for array, values in zip(self.outputs, self.case.outputs, strict=True):
            array.host[...] = values if self.case.updates else poison(values)
        for array, values in zip(self.inputs, self.case.inputs, strict=True):
            array.host[...] = values
        library.seed = seed
        self.work()
        for array in (*self.outputs, *self.inputs):
            array.check()
        for i, (array, values) in enumerate(zip(self.inputs, self.case.inputs, strict=True)):
            assert i == self.over or array.host.tobytes() == values.tobytes(), "an input was written"
        return [array.host.copy() for array in self.outputs]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Everything that is run here, bound, and compiled at once."""
    on, library, scratch = cuda_on_cpu.launcher(tmp_path_factory.mktemp("sources"))
    bound = {}
    for label, shape in (("odd", ODD), ("even", EVEN), ("singles", SINGLES), ("strips", STRIPS)):
        names = None if shape in (ODD, EVEN) else LARGE
        for name, case in made(Maker(shape, "float32")).items():
            if names is None or name in names:
                bound[label, name] = [Bound(on, case), *(Bound(on, case, over) for over in case.overwrites)]
                if label == "even":
                    bound[label, name].append(Bound(on, case, shift=4))
    for name, case in made(HalfMaker(EVEN, "float32")).items():
        narrow = halved(case)
        if narrow is not None:
            bound["half", name] = [Bound(on, narrow)]
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):  # ties, and what is nearer to one of two
        singles = halves.astype(np.float32)[::7] * np.float32([[1], [1 + 2**-11], [1 + 3 * 2**-12]])
    for name, x in (("float32 to float16", singles), ("float16 to float32", halves)):
        target = name.split(" ")[-1]
        case = Case("convert", (np.zeros(x.shape, target),), (x,), {}, lambda x=x, t=target: (x.astype(t),))
        bound["half", name] = [Bound(on, case)]
    # What the convolutions below bind, so that it is compiled with the rest:
    for source, widths in (("gemm", (1,)), ("columns", (1, 4))):
        for kernel in cuda_on_cpu.kernels(source):
            for width in widths:
                library.function(source, kernel, "float32", cuda_launch.Access(width))
    for kernel, width in (("fold_columns", 4), ("resize_rows", 1)):
        library.function("fold", kernel, "float32", cuda_launch.Access(width))
    for width in (1, 4):
        library.function("pointwise", "bias_add", "float32", cuda_launch.Access(width))
    library.compile()
    return SimpleNamespace(on=on, library=library, scratch=scratch, bound=bound)


def check(machine: Any, label: str, name: str, factor: float) -> None:
    """Right, and the same bits in other orders, in place and at other addresses."""
    first, *others = machine.bound[label, name]
    machine.scratch.host[...] = 0xFF  # NaN: what no block wrote is not read
    found = first.run(machine.library)
    for actual, wanted in zip(found, first.case.expected(), strict=True):
        if actual.dtype == np.float16:
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-3 * float(np.abs(wanted).max()))
        else:
            close(actual, wanted, np.float32, factor)
    runs = [first.run(machine.library, seed) for seed in (1, 2)] + [other.run(machine.library) for other in others]
    for again in runs:
        for one, two in zip(found, again, strict=True):
            same_bits(two, one)
    machine.scratch.check()


@pytest.mark.parametrize("label", ["odd", "even", "half"])
@pytest.mark.parametrize("name", [*IDS, *sorted(EXTRA)])
def test_kernel_computes_its_definition_in_every_order(machine: Any, label: str, name: str) -> None:
    if (label, name) in machine.bound:
        check(machine, label, name, 2.0)
    else:
        assert label == "half" and halved(made(HalfMaker(EVEN, "float32"))[name]) is None, "left out"


@pytest.mark.parametrize("label", ["singles", "strips"])
@pytest.mark.parametrize("name", LARGE)
def test_many_blocks_make_one_result(machine: Any, label: str, name: str) -> None:
    check(machine, label, name, 10.0)


def test_reductions_have_several_blocks() -> None:
    for shape, width in ((SINGLES, 1), (STRIPS, 4)):
        rows = int(np.prod(shape[:3]))
        assert cuda_blocks.reduction_shape(rows, shape[3], 2, width)[2] > 1, "a single block proves nothing"


@pytest.mark.parametrize("name", CONVERSIONS)
def test_types_of_16_bits_are_rounded_as_numpy_rounds(machine: Any, name: str) -> None:
    (bound,) = machine.bound["half", name]
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(bound.run(machine.library)[0], bound.case.expected()[0])


OWN = (*DIRECTIONS, "forward_relu", "bias", "accumulate")


def convolve(machine: Any, convolution: Convolution, direction: str) -> None:
    """Check a convolution by our own products."""
    backend = SimpleNamespace(
        kernels=cuda_kernels.Immediate(machine.on, lambda: None),
        to_device=lambda a: a if isinstance(a, cuda_on_cpu.Array) else cuda_on_cpu.Array(a),
        to_host=lambda a: a.host,
    )
    arrays = convolution.arrays(np.float32)
    x, weight, dy, bias = (a.astype(float) for a in arrays)
    y, dx, d_weight = ref.conv2d(x, weight, dy, bias, **convolution.attrs)
    wanted = {
        "forward": y - bias, "bias": y, "forward_relu": np.maximum(y, 0), "backward_data": dx,
        "backward_weight": d_weight, "accumulate": weight + d_weight,
    }[direction]  # fmt: skip
    how: Any = {"bias": {"bias": True}, "accumulate": {"accumulate": arrays[1]}}.get(direction, {})
    which = {"bias": "forward", "accumulate": "backward_weight"}.get(direction, direction)
    close(test_convolution.run(backend, convolution, which, arrays, **how), wanted, np.float32, 4.0)


def by_columns(machine: Any, case: Convolution, direction: str) -> None:
    """Check a convolution by a column matrix, multiplied by a stand-in for cuBLAS."""
    engines = cuda_columns.BlasEngines(Cublas(test_columns.FakeLibrary(), 0, "fp32"))
    x, weight, dy, _ = case.arrays(np.float32)
    problem = test_columns.problem_of(case, direction)
    options = dict(list(engines.engines(problem, None))[-1].options)
    workspace = cuda_on_cpu.Array(np.full(engines.workspace_bytes(problem, options), 0xFF, np.uint8))
    result = {"forward": OUTPUT, "backward_data": IMAGE, "backward_weight": FILTER}[direction]
    operands = {n: cuda_on_cpu.Array(a) for n, a in ((IMAGE, x), (FILTER, weight), (OUTPUT, dy))}
    operands[result].host[...] = np.nan
    pointers = {number: array.data.ptr for number, array in operands.items()}
    engines.run(machine.on, problem, options, pointers, workspace.data.ptr)()
    close(operands[result].host, test_columns.expected(case, direction, x, weight, dy), np.float32, 4.0)
    for array in (*operands.values(), workspace):
        array.check()


@pytest.mark.parametrize("direction", OWN)
def test_own_convolution_computes_its_definition(machine: Any, direction: str) -> None:
    for convolution in CONVOLUTIONS.values():
        convolve(machine, convolution, direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_column_matrix_holds_what_each_output_sees(machine: Any, direction: str) -> None:
    for case in (PACKED, *test_columns.DENSE.values()):
        by_columns(machine, case, direction)


@pytest.mark.parametrize("direction", test_folded.SIDES)
def test_columns_folded_into_channels_are_the_same_convolution(machine: Any, direction: str) -> None:
    for case in test_folded.FEW:
        test_folded.by_folding(machine, case, direction)


@pytest.mark.parametrize("direction", test_parts.SIDES)
def test_parts_of_a_batch_are_the_same_convolution(machine: Any, direction: str) -> None:
    for case in test_parts.CASES:
        test_parts.by_parts(machine, case, direction)


def test_a_turned_filter_makes_the_same_convolution_of_the_other_direction(machine: Any) -> None:
    for case in test_turned.CASES:
        for images in (None, 2):
            test_turned.by_turning(machine, case, images)


def test_the_mean_of_large_values_keeps_its_digits(machine: Any) -> None:
    x = (np.random.default_rng(0).standard_normal((1, 100, 100, 16), np.float32) + 1000).astype(np.float32)
    mean, rstd = (cuda_on_cpu.Array(np.empty(16, np.float32)) for _ in range(2))
    cuda_kernels.batch_norm_statistics(machine.on, mean, rstd, cuda_on_cpu.Array(x), eps=0.0)()
    exact = x.astype(np.float64).reshape(-1, 16)
    np.testing.assert_allclose(mean.host, exact.mean(0), rtol=2e-7)
    np.testing.assert_allclose(rstd.host, 1 / exact.std(0), rtol=5e-6)


def test_the_norm_of_neighbours_in_a_flat_buffer_is_that_of_each_alone(machine: Any) -> None:
    """The gradients of a step: layers of any size with gaps of zeros between them, which a launch or two sum."""
    random, sizes = np.random.default_rng(0), (4096, 5, 1, 333, 2048)
    alone = [random.standard_normal(size, np.float32) for size in sizes]
    flat, parts, at = cuda_on_cpu.Array(np.zeros(8192, np.float32)), [], 0
    for values in alone:
        flat.host[at : at + values.size] = values
        where = SimpleNamespace(ptr=flat.data.ptr + 4 * at)
        parts.append(
            SimpleNamespace(data=where, shape=values.shape, dtype=values.dtype, size=values.size, nbytes=values.nbytes)
        )
        at += -(-values.size // 32) * 32
    scalars = cuda_on_cpu.Array(np.full(8, 2, np.float32))
    cuda_kernels.clip_scale(machine.on, scalars, *reversed(parts), max_norm=1.0)()
    norm = 2 * float(np.sqrt(sum(np.square(values.astype(np.float64)).sum() for values in alone)))
    np.testing.assert_allclose(scalars.host, [2, 2, 2 / (norm + 1e-6), 2, 2, 2, 2, 2], rtol=1e-7)
    assert len(cuda_optim.runs(parts)) == 1


def test_a_gradient_passes_where_the_stored_output_is_positive(machine: Any) -> None:
    """A quarter of the least float16 is positive as a float and stored as nothing: forward and backward agree on it."""
    x = np.full((1, 1, 4, 16), 2.0**-24, np.float16)
    zero, one, quarter = (cuda_on_cpu.Array(np.full(16, value, np.float32)) for value in (0, 1, 0.25))
    image, dy, y, dx = (cuda_on_cpu.Array(values) for values in (x, np.ones_like(x), poison(x), poison(x)))
    sums = [cuda_on_cpu.Array(np.full(16, np.nan, np.float32)) for _ in range(2)]
    affine = (image, zero, one, quarter, zero)
    cuda_kernels.batch_norm_relu(machine.on, y, *affine)()
    cuda_kernels.batch_norm_relu_backward_weight(machine.on, *sums, dy, *affine)()
    cuda_kernels.batch_norm_relu_backward_data(machine.on, dx, dy, *affine, zero, zero)()
    for result in (y, dx, *sums):
        assert not result.host.any()


def test_no_kernel_of_the_sources_is_left_out(machine: Any) -> None:
    machine.library.launched.clear()
    for first, *_ in machine.bound.values():
        first.work()
    for direction in OWN:
        convolve(machine, CONVOLUTIONS["3x3"], direction)
    for direction in DIRECTIONS:
        by_columns(machine, PACKED, direction)
    for direction in test_folded.SIDES:
        test_folded.by_folding(machine, test_folded.FEW[0], direction)
    test_turned.by_turning(machine, test_turned.CASES[0], None)
    names = [path.stem for path in cuda_launch.SOURCES.glob("*.cu")]
    assert {(name, kernel) for name in names for kernel in cuda_on_cpu.kernels(name)} == machine.library.launched
