"""cuBLAS through ctypes: matrix products of strided operands, on one handle, in workspace that the caller provides.

In true fp32 cuDNN has no engine for a matrix product (its only one computes in TF32, whatever is asked), and its convolutions
reach a third of what a product does. CuPy has cuBLAS, too, but always on CuPy's current stream, which a step does not have.
With no atomics and a workspace of fixed size the same product has the same bits on the same GPU.

Signatures and constants: cuBLAS library, ``cublas_api.h`` and ``library_types.h``.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from minidnn.kernels.problem import BLAS_ENGINE, Product
from minidnn.schedule.recipe import Engine

Work = Callable[[], None]

WORKSPACES = (32 << 20, 64 << 10)  # what a split sum may need on Hopper; hardly anything
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
_SINGLE, _TF32 = 68, 77  # CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32
_DEFAULT_ALGORITHM = -1


class CublasError(RuntimeError):
    """A call of cuBLAS failed."""


class Cublas:
    """A handle on one stream of the current device. Used by one thread. ``precision`` "tf32" lets fp32 use tensor cores."""

    def __init__(self, library: Any, stream: int, precision: str) -> None:
        self._library = library
        self._compute = _TF32 if precision == "tf32" else _SINGLE
        handle = ctypes.c_void_p()
        self._do("cublasCreate_v2", ctypes.byref(handle))
        self.handle = handle
        self._do("cublasSetStream_v2", handle, ctypes.c_void_p(stream))

    def _do(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CublasError(f"{name} failed with status {status}")

    def engines(self, limit: int | None) -> Iterator[Engine]:
        """How a product may be computed under a limit of workspace, the one to be preferred first."""
        for nbytes in WORKSPACES:
            if limit is None or nbytes <= limit:
                yield Engine("cublas", nbytes, (("engine", BLAS_ENGINE), ("workspace", nbytes)))

    def multiply(
        self, problem: Product, c: int, a: int, b: int, workspace: int, nbytes: int, accumulate: bool = False
    ) -> Work:
        """Bind c = a @ b, or c += a @ b, to addresses."""
        return Multiply(self._library, self.handle, self._compute, problem, (c, a, b, workspace), nbytes, accumulate)

    def version(self) -> int:
        """10,000 x major + 100 x minor + patch."""
        found = ctypes.c_int()
        self._do("cublasGetVersion_v2", self.handle, ctypes.byref(found))
        return found.value

    def close(self) -> None:
        """Destroy the handle. Idempotent."""
        if self.handle:
            self._do("cublasDestroy_v2", self.handle)
            self.handle = ctypes.c_void_p()


class Multiply:
    """One product on fixed addresses. cuBLAS stores by columns: it is asked for the transposed product, of swapped operands."""

    __slots__ = ("_arguments", "_call", "_provide", "_workspace")

    def __init__(
        self, library: Any, handle: Any, compute: int, problem: Product, addresses: tuple[int, int, int, int], nbytes: int,
        accumulate: bool,
    ) -> None:  # fmt: skip
        p, kind = problem, _TYPES[problem.dtype]
        c, a, b, workspace = map(ctypes.c_void_p, addresses)
        self._provide, self._call = library.cublasSetWorkspace_v2, library.cublasGemmEx
        self._workspace = (handle, workspace, ctypes.c_size_t(nbytes))
        one, start = ctypes.c_float(1), ctypes.c_float(1 if accumulate else 0)
        left = _stored(p.b_column, p.b_depth, p.columns, p.depth)
        right = _stored(p.a_depth, p.a_row, p.depth, p.rows)
        self._arguments = (
            handle, ctypes.c_int(left[0]), ctypes.c_int(right[0]), ctypes.c_int(p.columns), ctypes.c_int(p.rows),
            ctypes.c_int(p.depth), ctypes.byref(one), b, ctypes.c_int(kind), ctypes.c_int(left[1]), a, ctypes.c_int(kind),
            ctypes.c_int(right[1]), ctypes.byref(start), c, ctypes.c_int(kind), ctypes.c_int(p.columns),
            ctypes.c_int(compute), ctypes.c_int(_DEFAULT_ALGORITHM),
        )  # fmt: skip

    def __call__(self) -> None:
        status = self._provide(*self._workspace) or self._call(*self._arguments)
        if status:
            raise CublasError(f"cublasGemmEx failed with status {status}")


def _stored(along: int, across: int, rows: int, columns: int) -> tuple[int, int]:
    """(transposed, leading dimension) of a matrix by its strides along a column and from one column to the next."""
    if along == 1:
        return 0, max(across, rows)
    assert across == 1, "one of a matrix's strides is one element"
    return 1, max(along, columns)


def open_cublas(cuda_version: int, stream: int, precision: str) -> Cublas | None:
    """cuBLAS of a CUDA version (1000 x major + 10 x minor) on a stream; None where it is not installed."""
    major = cuda_version // 1000
    names = [f"libcublas.so.{major}", f"cublas64_{major}.dll"]
    with contextlib.suppress(ImportError, RuntimeError):  # else the loader finds the libraries of the system
        names.insert(0, importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("cublas").abs_path)
    for name in names:
        with contextlib.suppress(OSError, TypeError):
            return Cublas(ctypes.CDLL(name), stream, precision)
    return None
