"""Our own CUDA kernels as they are bound: operands, grids, scratch and accesses without a GPU, their bits on one."""

import inspect
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import tests.backend.fake_cuda as fake_cuda
from minidnn.device.cuda import CudaDevice
from minidnn.errors import UserError
from minidnn.kernels import base, cuda_blocks, cuda_kernels, cuda_launch
from tests.backend.cuda_nets import usable_cupy

SOURCES = Path(cuda_launch.SOURCES)


def protocol():
    return {name: f for name, f in vars(base.Kernels).items() if inspect.isfunction(f) and name[0] != "_"}


def test_the_backend_has_exactly_the_kernels_of_the_protocol():
    assert sorted(cuda_kernels.__all__) == sorted(protocol())


@pytest.mark.parametrize("name", protocol())
def test_a_kernel_takes_the_operands_of_the_protocol_after_its_launcher(name):
    expected = [
        p.replace(annotation=p.empty) for p in list(inspect.signature(protocol()[name]).parameters.values())[1:]
    ]
    found = [
        p.replace(annotation=p.empty)
        for p in list(inspect.signature(getattr(cuda_kernels, name)).parameters.values())[1:]
    ]
    immediate = inspect.signature(getattr(cuda_kernels.Immediate(None, None), name)).parameters.values()
    assert [p.replace(annotation=p.empty) for p in immediate] == expected
    if name.startswith(
        ("conv2d", "linear")
    ):  # an engine is the backend's own: NumPy's images, cuDNN's number and knobs
        assert found.pop().kind is inspect.Parameter.VAR_KEYWORD
        found = [p for p in found if not (name.startswith("linear") and p.name == "scratch")]
        expected = [p.replace(default=0) if p.name == "images" else p for p in expected]
    assert found == expected


@pytest.mark.parametrize(
    ("rows", "channels", "values"),
    [(1, 1, 1), (7, 3, 2), (10**6, 64, 2), (10**8, 2048, 2), (50, 32768, 2), (10**9, 5, 1)],
)
def test_partial_sums_fit_the_scratch_and_cover_every_row(rows, channels, values):
    width = 4 if channels % 4 == 0 else 1
    columns, lanes, blocks = cuda_blocks.reduction_shape(rows, channels, values, width)
    assert columns * lanes == cuda_blocks.THREADS
    assert blocks >= 1 and blocks * channels * values * 4 <= cuda_blocks.SCRATCH_BYTES
    assert columns <= cuda_blocks.MOST_COLUMNS
    # rows_of_block in common.cuh, in Python: what each block visits, `lanes` rows at a time
    groups, rest = divmod(rows, lanes)
    visited = [
        (groups // blocks + (b < groups % blocks)) * lanes + rest * (groups % blocks == b) for b in range(blocks)
    ]
    assert sum(visited) == rows


def test_a_reduction_over_too_many_channels_is_refused():
    with pytest.raises(UserError, match="use at most 32768 channels"):
        cuda_blocks.reduction_shape(100, 40000, 2, 4)


def test_what_a_thread_handles_depends_on_the_shape_and_not_on_addresses():
    def array(address, dtype="float32"):
        return fake_cuda.FakeArray((8,), dtype, type("Pointer", (), {"ptr": address}))

    assert cuda_launch.access(array(512), array(1024), extents=(8, 12)) == (4, False)
    assert cuda_launch.access(array(512), array(1028), extents=(8, 12)) == (4, True)
    assert cuda_launch.access(array(512), array(1024), extents=(8, 6)) == (1, False)
    assert cuda_launch.access(array(512, "float16"), extents=(16,)) == (8, False)
    assert cuda_launch.access(array(512), array(520, "float16")) == (4, False)


def launches(name, *shapes, **attrs):
    """(kernel, grid, block, values of the arguments) of what a kernel of the backend launches, without any CUDA."""
    compiled, found = [], []

    class Library:
        def function(self, source, name, *rest):
            compiled.append(name)
            return len(compiled)

    def launch(function, *rest):
        found.append((compiled[function - 1], rest[:3], rest[3:6]))

    def array(shape, dtype="float32"):
        return fake_cuda.FakeArray(shape, dtype, type("Pointer", (), {"ptr": 512}))

    on = cuda_launch.Launcher(Library(), launch, 7, 4096, None)
    operands = [array(*shape) if isinstance(shape[0], tuple) else array(shape) for shape in shapes]
    work = getattr(cuda_kernels, name)(on, *operands, **attrs)
    works = work._works if isinstance(work, cuda_launch.Sequential) else (work,)
    work()
    arguments = [[getattr(a, "value", None) for a in one._arguments[1]] for one in works]
    return [(*launched, values) for launched, values in zip(found, arguments, strict=True)]


def test_the_mean_over_a_map_is_told_the_positions_and_channels_of_the_map():
    ((kernel, grid, block, values),) = launches("global_avg_pool_forward", (3, 20), (3, 5, 9, 20))
    assert kernel == "global_avg_pool_forward" and values[2:] == [45, 20]
    assert grid == (1, 3, 1) and block == (8, 32, 1)  # 20 channels are five packs


@pytest.mark.parametrize(("channels", "packs"), [(6, 6), (8, 2), (1024, 256)])
def test_pooling_has_a_thread_for_every_pack_of_its_result(channels, packs):
    small, large = (2, 5, 7, channels), (2, 10, 14, channels)
    beside = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0)}
    overlapping = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}
    for name, shapes, pool, (n, h, w, _) in (
        ("max_pool_forward", (small, (small, "uint8"), large), beside, small),
        ("max_pool_backward", (large, small, (small, "uint8")), overlapping, small),  # and two rows of two columns
        ("max_pool_backward", (large, small, (small, "uint8")), beside, small),  # a thread writes a whole window
    ):
        ((_, grid, block, _),) = launches(name, *shapes, **pool)
        assert grid[0] == n * h and grid[1] * block[0] >= w * packs > (grid[1] - 1) * block[0]
        assert block[0] % 32 == 0 and block[0] <= cuda_blocks.THREADS
    ((_, grid, block, _),) = launches("global_avg_pool_backward", large, (2, channels))
    assert grid[0] == 2 * 10 * 14 and grid[1] * block[0] >= packs


def test_a_matrix_product_of_our_own_is_told_its_extents_and_strides():
    ((kernel, grid, _, values),) = launches("linear_forward", (65, 10), (65, 30), (10, 30))
    assert kernel == "matrix_product" and grid == (2, 1, 1)
    assert values[3:] == [65, 10, 30, 30, 1, 1, 30, 0]  # y = x @ weight.T
    ((_, _, _, values),) = launches("linear_backward_data", (65, 30), (65, 10), (10, 30))
    assert values[3:] == [65, 30, 10, 10, 1, 30, 1, 0]  # dx = dy @ weight
    ((_, _, _, values),) = launches("linear_backward_weight", (10, 30), (65, 30), (65, 10), accumulate=True)
    assert values[3:] == [10, 30, 65, 1, 10, 30, 1, 1]  # d_weight += dy.T @ x


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(
    ("source", "flags"), [("pool", ("-DKIND=0", "-DWIDTH=4")), ("norm", ("-DKIND=2", "-DWIDTH=8", "-DNARROW"))]
)
def test_sources_compile(source, flags, tmp_path):
    code = tmp_path / "source.cu"
    code.write_text("".join((SOURCES / name).read_text(encoding="utf-8") for name in ("common.cuh", f"{source}.cu")))
    command = ["nvcc", "-ptx", "-arch=sm_80", "-std=c++17", *flags, "-o", str(tmp_path / "out.ptx"), str(code)]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0


# -- on a GPU ---------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_address_that_is_not_aligned_changes_no_bit(dtype):
    cupy = usable_cupy()
    rng = np.random.default_rng(0)
    opened = CudaDevice(refuse=("convolution", "matmul"))
    kernels, shape = opened.kernels, (5, 14, 18, 64)
    x, dy = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(2))
    vectors = [rng.standard_normal(64, np.float32) for _ in range(3)]

    def run(shift):
        def place(values):
            memory = cupy.empty(values.size + 8, values.dtype)
            view = memory[shift : shift + values.size].reshape(values.shape)
            view[...] = cupy.asarray(values)
            return view

        def space(*extents, of=dtype):
            return place(np.zeros(extents, of))

        px, pdy, (weight, bias, d_weight) = place(x), place(dy), map(place, vectors)
        mean, rstd, sums, y, dx = (
            space(64, of="float32"),
            space(64, of="float32"),
            space(64),
            space(*shape),
            space(*shape),
        )
        pooled, chosen, grown = space(5, 7, 9, 64), space(5, 7, 9, 64, of="uint8"), space(*shape)
        pool = {"kernel": (3, 2), "stride": (2, 2), "padding": (1, 0)}
        kernels.batch_norm_statistics(mean, rstd, px, eps=1e-5)
        kernels.batch_norm_apply(y, px, mean, rstd, weight, bias)
        kernels.batch_norm_backward_data(dx, pdy, px, mean, rstd, weight, d_weight, bias)
        kernels.channel_sum(sums, pdy)
        kernels.max_pool_forward(pooled, chosen, px, **pool)
        kernels.max_pool_backward(grown, pooled, chosen, **pool)
        return [cupy.asnumpy(a) for a in (mean, rstd, sums, y, dx, pooled, chosen, grown)]

    for aligned, moved in zip(run(0), run(1), strict=True):
        np.testing.assert_array_equal(moved, aligned)
        assert np.isfinite(aligned.astype(float)).all() and aligned.any()
    opened.close()
