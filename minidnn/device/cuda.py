"""The CUDA device: one slab by one cudaMalloc, one pinned slab, four streams that do not wait for the null stream, events.

CuPy and the cuDNN frontend are imported when a device is made, never before. In a step nothing is allocated and no array is
made: every row was bound to addresses once, and dispatching it is a few driver calls.

Bytes outside the slab, which ``outside_bytes`` counts: the context, cuDNN and its plans, compiled kernels, captured graphs,
and 256 KiB of scratch for reductions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minidnn.device.base import Array, Work
from minidnn.device.cuda_libraries import import_cupy, numpy_dtype, open_cudnn, parse_device, require_gpu
from minidnn.device.cuda_memory import CudaMemory
from minidnn.errors import UserError
from minidnn.kernels import cuda_kernels
from minidnn.kernels.cublas import open_cublas
from minidnn.kernels.cuda_blocks import SCRATCH_BYTES
from minidnn.kernels.cuda_columns import BlasEngines
from minidnn.kernels.cuda_launch import WITHOUT_SCRATCH, Launcher, Library
from minidnn.kernels.cudnn_tune import Tuner
from minidnn.kernels.engine_cache import EngineCache, cache_folder
from minidnn.kernels.problem import Problem, own
from minidnn.schedule.instruction import COMM, COMPUTE
from minidnn.schedule.recipe import Engine


class CudaDevice(CudaMemory):
    """See the module. Used by one thread, that which made it.

    ``precision``: "fp32" keeps tensor cores out of convolutions and products. ``refuse``: "convolution" or "matmul", to compute
    them by our own kernels as if cuDNN had refused. Raises UserError where there is no GPU or no CuPy.
    """

    def __init__(
        self, index: int = 0, *, precision: str = "fp32", deterministic: bool = True, refuse: Sequence[str] = ()
    ) -> None:
        cupy = import_cupy()
        runtime = cupy.cuda.runtime
        require_gpu(runtime, index, precision)
        cupy.cuda.Device(index).use()
        super().__init__(cupy, f"cuda:{index}")
        self._closed = False
        self._scratch = cupy.cuda.Memory(SCRATCH_BYTES)
        runtime.deviceSynchronize()
        compute, refused, launch = self._pointers[COMPUTE], frozenset(refuse), cupy.cuda.driver.launchKernel
        needed = not refused >= {"convolution", "matmul"}
        self.cudnn = open_cudnn(compute, precision, deterministic, refused) if needed else None
        self._tuner: Tuner | None = None
        blas = None if self.cudnn is None else open_cublas(runtime.runtimeGetVersion(), compute, precision)
        if self.cudnn is not None and blas is not None:
            self.cudnn.blas = BlasEngines(blas)
        library = Library(cupy)
        self._launcher = Launcher(library, launch, compute, int(self._scratch.ptr), self.cudnn)
        self._comm_launcher = Launcher(library, launch, self._pointers[COMM], 0, None)
        self.kernels: Any = cuda_kernels.Immediate(self._launcher, cupy.cuda.runtime.deviceSynchronize)

    # -- binding ----------------------------------------------------------------------------------------------------
    def kernel(
        self, name: str, operands: Sequence[Array], scratch: Array | None, attrs: Mapping[str, Any], stream: str
    ) -> Work:
        """Bind a kernel: compiled, planned, its arguments packed. Those on ``compute`` share its scratch; ``comm`` has none."""
        beside = stream == COMM and scratch is None and name in WITHOUT_SCRATCH
        assert stream == COMPUTE or beside, f"kernel {name} cannot run on stream {stream}"
        extra = {} if scratch is None else {"scratch": scratch}
        launcher = self._comm_launcher if beside else self._launcher
        work: Work = getattr(cuda_kernels, name)(launcher, *operands, **attrs, **extra)
        return work

    def select_engine(self, problem: Problem, workspace_limit: int | None) -> Engine:
        """How a convolution direction or a product is computed. Does not look at the memory there is.

        ``workspace_limit`` 0: cuDNN is not asked, which takes seconds. The answer is to be counted, not run: whatever engine
        it would be, it has no workspace, as our own.
        """
        return (
            own(problem) if self.cudnn is None or workspace_limit == 0 else self.cudnn.select(problem, workspace_limit)
        )

    def tune_engine(self, problem: Problem, workspace_limit: int | None, room: int | None = None) -> Engine:
        """The fastest engine of a convolution direction or a product, measured in memory of its own, of ``room`` bytes if that is
        bounded: call it before ``open``."""
        assert self._slab is None, "engines are measured before the slab is allocated"
        if self.cudnn is None:
            return own(problem)
        if self._tuner is None:
            versions = self.versions()
            what = " ".join(versions.get(name, "none") for name in ("gpu", "cudnn", "cudnn_frontend", "cublas"))
            self._tuner = Tuner(self._cupy, self._launcher, self._streams[COMPUTE], EngineCache(cache_folder(), what))
        return self._tuner.fastest(problem, workspace_limit, numpy_dtype(problem.dtype), room)

    # -- looking ----------------------------------------------------------------------------------------------------
    def versions(self) -> dict[str, str]:
        """What computed: GPU, driver, CUDA, CuPy, cuDNN and its frontend."""
        properties = self._runtime.getDeviceProperties(self._runtime.getDevice())
        found = {
            "gpu": properties["name"].decode(),
            "driver_api": str(self._runtime.driverGetVersion()),
            "cuda_runtime": str(self._runtime.runtimeGetVersion()),
            "cupy": str(self._cupy.__version__),
        }
        return found | ({} if self.cudnn is None else self.cudnn.versions())

    def close(self) -> None:
        """Give both slabs, streams, events and cuDNN's handle back. Idempotent. Arrays and works of the device die with it."""
        if self._closed:
            return
        self._closed = True
        self.release()
        if self.cudnn is not None:
            self.cudnn.close()
        self._give_back()
        self._scratch = None


def open_device(name: str, precision: str, deterministic: bool) -> CudaDevice:
    """The device of ``"cuda:0"`` for a precision. Raises UserError, a sentence with the remedy, where it cannot be had."""
    index = parse_device(name)
    if precision == "fp64":
        raise UserError(
            "precision fp64 is for gradient checks on the emulated device; on a GPU use fp32, tf32, bf16 or fp16"
        )
    return CudaDevice(index, precision=precision, deterministic=deterministic)
