"""Convolutions and products by cuBLAS: what is asked of it, on a stand-in that multiplies as cuBLAS would, and on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import tests.backend.reference as ref
from minidnn.device.cuda_libraries import numpy_dtype
from minidnn.kernels import cuda_columns
from minidnn.kernels.cublas import WORKSPACES, Cublas, CublasError
from minidnn.kernels.cuda_columns import BlasEngines
from minidnn.kernels.cuda_conv import bind_engine
from minidnn.kernels.problem import FILTER, IMAGE, LEFT, OUTPUT, PRODUCT, RIGHT, Convolution, linear_product
from minidnn.precision import precision as find_precision
from tests.backend.test_convolution import CONVOLUTIONS, DIRECTIONS

DENSE = {name: case for name, case in CONVOLUTIONS.items() if case.groups == 1}


def view(address: Any, shape: Any, order: Any = "C") -> Any:
    """The floats at an address."""
    size = int(np.prod(shape))
    buffer = (ctypes.c_float * size).from_address(getattr(address, "value", address))
    return np.frombuffer(buffer, np.float32).reshape(shape, order=order)


class FakeLibrary:
    """The calls of cuBLAS that are used, on host memory: matrices by columns, as it has them."""

    def __init__(self) -> None:
        self.provided: list[tuple[Any, int]] = []
        self.refuse = False

    def cublasCreate_v2(self, handle: Any) -> int:
        handle._obj.value = 7
        return 0

    def cublasSetStream_v2(self, handle: Any, stream: Any) -> int:
        return 0

    def cublasDestroy_v2(self, handle: Any) -> int:
        return 0

    def cublasSetWorkspace_v2(self, handle: Any, workspace: Any, nbytes: Any) -> int:
        self.provided.append((workspace.value, nbytes.value))
        return 0

    def cublasGemmEx(self, handle: Any, *arguments: Any) -> int:
        if self.refuse:
            return 15
        ta, tb, m, n, k, alpha, a, _, lda, b, _, ldb, beta, c, _, ldc, compute, _ = arguments
        m, n, k, lda, ldb, ldc = (value.value for value in (m, n, k, lda, ldb, ldc))
        assert compute.value == 68, "true fp32"
        assert lda >= (k if ta.value else m) and ldb >= (n if tb.value else k) and ldc >= m, "leading dimensions"
        left = view(a, (lda, m if ta.value else k), "F")[: k if ta.value else m]
        right = view(b, (ldb, k if tb.value else n), "F")[: n if tb.value else k]
        out = view(c, (ldc, n), "F")[:m]
        product = (left.T if ta.value else left) @ (right.T if tb.value else right)
        out[:] = alpha._obj.value * product + (beta._obj.value * out if beta._obj.value else 0)
        return 0


class FakeLauncher:
    """The two kernels of ``columns.cu``, in NumPy."""

    def launch(self, source: str, name: str, dtype: str, by: Any, grid: Any, block: Any, arguments: Any) -> Any:
        target, source_at, size, shape = arguments
        n, h, w, c, p, q, r, s, sh, sw, ph, pw, dh, dw = shape
        assert source == "columns" and c % by.width == 0 and grid[0] * block[0] >= size.value // by.width
        pixels, columns = ((n, h, w, c), (n, p, q, r, s, c))

        def each() -> Any:
            for u in range(p):
                for v in range(q):
                    for i in range(r):
                        for j in range(s):
                            y, x = u * sh - ph + i * dh, v * sw - pw + j * dw
                            yield (u, v, i, j), (y, x) if 0 <= y < h and 0 <= x < w else None

        def gather() -> None:
            out, image = view(target, columns), view(source_at, pixels)
            for (u, v, i, j), at in each():
                out[:, u, v, i, j] = 0 if at is None else image[:, at[0], at[1]]

        def scatter() -> None:
            out, taps = view(target, pixels), view(source_at, columns)
            out[:] = 0
            for (u, v, i, j), at in each():
                if at is not None:
                    out[:, at[0], at[1]] += taps[:, u, v, i, j]

        return {"gather_columns": gather, "scatter_columns": scatter}[name]


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary()


def problem_of(case: Any, direction: str, dtype: str = "float32") -> Convolution:
    return Convolution(direction, case.x, case.y, case.weight, case.stride, case.padding, case.dilation, dtype)


def expected(case: Any, direction: str, x: Any, weight: Any, dy: Any) -> Any:
    x, weight, dy = (a.astype(np.float64) for a in (x, weight, dy))
    results = ref.conv2d(x, weight, dy, np.zeros(case.channels), **case.attrs)
    return dict(zip(DIRECTIONS, results, strict=True))[direction]


@pytest.mark.parametrize("parts", ["one", "several"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", DENSE)
def test_a_convolution_is_a_product_over_columns(
    library: Any, monkeypatch: Any, name: str, direction: str, parts: str
) -> None:
    case = DENSE[name]
    if parts == "several":
        monkeypatch.setattr(cuda_columns, "COLUMN_BYTES", 1)
    x, weight, dy, _ = case.arrays(np.float32)
    problem, engines = problem_of(case, direction), BlasEngines(Cublas(library, 0, "fp32"))
    (large, small) = engines.engines(problem, None)
    assert large.workspace_bytes - small.workspace_bytes == WORKSPACES[0] - WORKSPACES[1]
    options = dict(small.options)
    assert small.workspace_bytes == engines.workspace_bytes(problem, options)
    workspace = np.full(small.workspace_bytes // 4 + 256, np.nan, np.float32)
    base = -(-workspace.ctypes.data // 512) * 512
    operands = {IMAGE: x, FILTER: weight, OUTPUT: dy}
    result = {"forward": OUTPUT, "backward_data": IMAGE, "backward_weight": FILTER}[direction]
    wanted = expected(case, direction, x, weight, dy)
    operands[result] = np.full_like(operands[result], np.nan)
    pointers = {number: array.ctypes.data for number, array in operands.items()}
    engines.run(FakeLauncher(), problem, options, pointers, base)()  # type: ignore[arg-type]
    np.testing.assert_allclose(operands[result], wanted, rtol=1e-4, atol=1e-4)
    assert {at for at, _ in library.provided} == {base}
    beyond = (workspace.ctypes.data + workspace.nbytes - base - small.workspace_bytes) // 4
    assert beyond <= 0 or np.isnan(workspace[-beyond:]).all(), "written beyond the workspace"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_linear_layer_is_a_product(library: Any, direction: str) -> None:
    random = np.random.default_rng(1)
    x, weight, dy = (random.standard_normal(s).astype(np.float32) for s in ((5, 7), (3, 7), (5, 3)))
    wanted = {"forward": x @ weight.T, "backward_data": dy @ weight, "backward_weight": dy.T @ x}[direction]
    a, b = {"forward": (x, weight), "backward_data": (dy, weight), "backward_weight": (dy, x)}[direction]
    engines, problem = BlasEngines(Cublas(library, 0, "fp32")), linear_product(direction, 5, 7, 3, "float32")
    out = np.full_like(wanted, np.nan)
    options = dict(next(engines.engines(problem, None)).options)
    pointers = {LEFT: a.ctypes.data, RIGHT: b.ctypes.data, PRODUCT: out.ctypes.data}
    engines.run(FakeLauncher(), problem, options, pointers, 0)()  # type: ignore[arg-type]
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)


def test_what_cublas_is_not_asked_for(library: Any, monkeypatch: Any) -> None:
    engines = BlasEngines(Cublas(library, 0, "fp32"))
    grouped = next(case for case in CONVOLUTIONS.values() if case.groups > 1)
    assert not list(engines.engines(problem_of(grouped, "forward"), None))
    plain = DENSE["3x3"]
    assert not list(engines.engines(problem_of(plain, "forward_relu"), None))
    assert not list(engines.engines(problem_of(plain, "forward"), WORKSPACES[1])), "above the limit"
    assert not list(engines.engines(problem_of(plain, "backward_data", "float16"), None)), "rounded tap by tap"
    assert list(engines.engines(problem_of(plain, "backward_weight", "float16"), None))
    monkeypatch.setattr(cuda_columns, "COLUMN_BYTES", 1)
    assert not list(engines.engines(problem_of(plain, "backward_weight", "float16"), None)), "rounded part by part"


def test_a_failing_call_says_which(library: Any) -> None:
    library.refuse = True
    blas = Cublas(library, 0, "fp32")
    with pytest.raises(CublasError, match="cublasGemmEx failed with status 15"):
        blas.multiply(linear_product("forward", 1, 1, 1, "float32"), 0, 0, 0, 0, 0)()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_on_a_gpu_every_engine_agrees_with_the_definition(precision: str) -> None:
    extra = {
        "large": DENSE["3x3"]._replace(x=(8, 28, 28, 64), channels=128),
        "large 1x1": DENSE["1x1"]._replace(x=(8, 28, 28, 256), channels=64),
        "large stride 2": DENSE["1x1 stride 2"]._replace(x=(8, 28, 28, 256), channels=512),
    }
    with gpu_device(precision) as device:
        assert device.cudnn.blas is not None, "CuPy's wheels bring cuBLAS"
        for name, case in {**DENSE, **extra}.items():
            compare_engines(device, name, case, DIRECTIONS, device.cudnn.blas.engines)


@contextlib.contextmanager
def gpu_device(precision: str) -> Iterator[Any]:
    """A CUDA device, closed at the end; skips where there is none."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed: pip install 'minidnn-layup[cuda13]'")
    if not cupy.cuda.is_available():
        pytest.skip("no usable CUDA device")
    from minidnn.device.cuda import CudaDevice

    device = CudaDevice(precision=precision)
    yield device
    device.close()


def compare_engines(device: Any, name: str, case: Any, directions: Sequence[str], engines: Any) -> int:
    """Run every one of ``engines(problem, None)`` twice into poison, against float64. Returns how many there were."""
    cupy, precision = device._cupy, device.cudnn.restrictions.split()[0]
    dtype = find_precision(precision).compute
    bound = {"fp32": 1e-5, "tf32": 1e-3}.get(precision, 1e-2)
    x, weight, dy = (cupy.asarray(a).astype(numpy_dtype(dtype)) for a in case.arrays(np.float32)[:3])
    count = 0
    for direction in directions:
        problem = problem_of(case, direction, dtype)
        result = {"forward": OUTPUT, "backward_data": IMAGE, "backward_weight": FILTER}[direction]
        wanted = gpu_expected(cupy, case, direction, x, weight, dy)
        for engine in engines(problem, None):
            operands = {IMAGE: x, FILTER: weight, OUTPUT: dy}
            out, runs = cupy.empty_like(operands[result]), []
            pointers = {n: a.data.ptr for n, a in operands.items()} | {result: out.data.ptr}
            space = cupy.full(engine.workspace_bytes, 255, np.uint8)
            run = bind_engine(device._launcher, problem, dict(engine.options), pointers, space.data.ptr)
            for _ in range(2):
                out.fill(np.nan)
                cupy.cuda.Device().synchronize()
                run()
                device.synchronize()
                runs.append(cupy.asnumpy(out.astype(np.float32)))
            np.testing.assert_array_equal(*runs, err_msg="a second run has other bits")
            scale = np.linalg.norm(wanted) or 1.0  # nothing but taps outside of the image
            error = np.linalg.norm(runs[0].astype(np.float64) - wanted) / scale
            assert error < bound, (name, direction, engine, error)
            count += 1
    return count


def gpu_expected(cupy: Any, case: Any, direction: str, *arrays: Any) -> Any:
    """The definition in float64: on the host for small shapes, by PyTorch where there is one for others."""
    x, weight, dy = (cupy.asnumpy(a.astype(np.float32)).astype(np.float64) for a in arrays)
    if x.size < 10_000:
        return expected(case, direction, x, weight, dy)
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    images, filters, grads = (torch.from_numpy(a.transpose(0, 3, 1, 2).copy()) for a in (x, weight, dy))
    how = {"stride": case.stride, "padding": case.padding, "dilation": case.dilation}
    if direction == "forward":
        out = torch.nn.functional.conv2d(images, filters, **how)
    elif direction == "backward_data":
        out = torch.nn.grad.conv2d_input(images.shape, filters, grads, **how)
    else:
        out = torch.nn.grad.conv2d_weight(images, filters.shape, grads, **how)
    return out.numpy().transpose(0, 2, 3, 1)
