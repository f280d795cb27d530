"""The CUDA device: one slab by one cudaMalloc, one pinned slab, four streams that do not wait for the null stream, events.

CuPy and the cuDNN frontend are imported when a device is made, never before. In a step nothing is allocated and no array is
made: every row was bound to addresses once, and dispatching it is a few driver calls.

Bytes outside the slab, which ``outside_bytes`` counts: the context, cuDNN and its plans, compiled kernels, captured graphs,
and 256 KiB of scratch for reductions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from minidnn.device.base import Array, Work
from minidnn.device.cuda_libraries import (
    import_cupy,
    numpy_dtype,
    open_cudnn,
    parse_device,
    require_gpu,
)
from minidnn.device.cuda_pool import CudaPinnedPool, CudaPool
from minidnn.device.cuda_streams import CudaStreams
from minidnn.errors import UserError
from minidnn.kernels import cuda_kernels
from minidnn.kernels.cublas import open_cublas
from minidnn.kernels.cuda_columns import BlasEngines
from minidnn.kernels.cuda_launch import SCRATCH_BYTES, WITHOUT_SCRATCH, Launcher, Library
from minidnn.kernels.cudnn_tune import EngineCache, Tuner, cache_folder
from minidnn.kernels.problem import Problem, own
from minidnn.schedule.instruction import COMM, COMPUTE, HOST
from minidnn.schedule.recipe import Engine
from minidnn.spec import TensorSpec

OUTSIDE_MARGIN_BYTES = 256 << 20  # by which a slab is made smaller after memory outside it has run out


class CudaDevice(CudaStreams):
    """See the module. Used by one thread, that which made it.

    ``precision``: "fp32" keeps tensor cores out of convolutions and products. ``refuse``: "convolution" or "matmul", to compute
    them by our own kernels as if cuDNN had refused. Raises UserError where there is no GPU or no CuPy.
    """

    def __init__(
        self, index: int = 0, *, precision: str = "fp32", deterministic: bool = True, refuse: Sequence[str] = ()
    ) -> None:
        cupy = import_cupy()
        runtime = cupy.cuda.runtime
        self.name = f"cuda:{index}"
        require_gpu(runtime, index, precision)
        cupy.cuda.Device(index).use()
        super().__init__(cupy)
        self._closed = False
        self._slab_bytes = 0
        self._slab: Any = None
        self._pool: CudaPool | None = None
        self._pinned: Any = np.empty(0, np.uint8)
        self._scratch = cupy.cuda.Memory(SCRATCH_BYTES)
        runtime.deviceSynchronize()
        compute, refused, launch = self._pointers[COMPUTE], frozenset(refuse), cupy.cuda.driver.launchKernel
        needed = not refused >= {"convolution", "matmul"}
        self.cudnn = open_cudnn(compute, precision, deterministic, refused) if needed else None
        self._tuner: Tuner | None = None
        if (
            self.cudnn is not None
            and (blas := open_cublas(runtime.runtimeGetVersion(), compute, precision)) is not None
        ):
            self.cudnn.blas = BlasEngines(blas)
        library = Library(cupy)
        self._launcher = Launcher(library, launch, compute, int(self._scratch.ptr), self.cudnn)
        self._comm_launcher = Launcher(library, launch, self._pointers[COMM], 0, None)
        self.kernels: Any = cuda_kernels.Immediate(self._launcher, cupy.cuda.runtime.deviceSynchronize)

    # -- memory -----------------------------------------------------------------------------------------------------
    def open(self, reserved_bytes: int, host_bytes: int) -> None:
        """Allocate both slabs. Raises UserError with the figures where the GPU or the host has less."""
        assert self._slab is None, "the device is open already"
        failure = self._cupy.cuda.runtime.CUDARuntimeError
        try:
            self._slab = self._cupy.cuda.Memory(reserved_bytes)
        except (failure, MemoryError):
            free, total = self._runtime.memGetInfo()
            raise UserError(
                f"the slab of {reserved_bytes} bytes does not fit on {self.name}, which has {free} of {total} bytes free; "
                "give a smaller --memory or --batch-size, or end what else runs there"
            ) from None
        try:
            memory = self._cupy.cuda.PinnedMemory(host_bytes)
        except (failure, MemoryError):
            self._slab = None
            raise UserError(
                f"{host_bytes} bytes of pinned host memory cannot be had; give a smaller --host-memory"
            ) from None
        self._slab_bytes = reserved_bytes
        if host_bytes:
            self._pinned = np.frombuffer(self._cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, host_bytes)

    def array(self, space: str, offset: int, spec: TensorSpec) -> Array:
        """A view of a slab: cupy.ndarray on the device, numpy.ndarray in pinned memory."""
        if space == HOST:
            return self._pinned[offset : offset + spec.nbytes].view(numpy_dtype(spec.dtype)).reshape(spec.shape)
        assert offset + spec.nbytes <= self._slab_bytes, (
            f"{spec} at {offset} lies outside the slab of {self._slab_bytes} bytes"
        )
        return self._cupy.ndarray(
            spec.shape, numpy_dtype(spec.dtype), self._cupy.cuda.MemoryPointer(self._slab, offset)
        )

    def pools(self, limit: int | None) -> tuple[CudaPool, CudaPinnedPool]:
        """Pools in place of both slabs: give them back before the device is closed."""
        assert self._slab is None and self._pool is None, "the device is open already"
        self._pool = CudaPool(self._cupy, limit)
        return self._pool, CudaPinnedPool(self._cupy)

    def fresh(self, nbytes: int) -> tuple[Array, object]:
        """Bytes of their own, 255 each, outside the slab, and what lives as long as any view of them. For measurements."""
        counted = type("Counted", (self._cupy.cuda.Memory,), {})  # weak references to it can be made
        memory = counted(nbytes)
        array = self._cupy.ndarray((nbytes,), np.dtype(np.uint8), self._cupy.cuda.MemoryPointer(memory, 0))
        self._runtime.memset(memory.ptr, 0xFF, nbytes)
        self._runtime.deviceSynchronize()
        return array, memory

    @property
    def free_bytes(self) -> int:
        """The free memory of the GPU, as its driver counts it."""
        return int(self._runtime.memGetInfo()[0])

    @property
    def available_bytes(self) -> int:
        """What a slab may take: the free memory of the GPU without three per cent, for graphs and libraries."""
        return self.free_bytes * 97 // 100

    def birth(self, array: Array, stream: str) -> Work | None:
        """Nothing: fresh memory holds what was there."""
        return None

    def put(self, array: Array, values: Any) -> None:
        """Write host values into the slab, and wait."""
        host = np.ascontiguousarray(np.broadcast_to(np.asarray(values), array.shape), dtype=array.dtype)
        self.copy(array, host, COMPUTE)()
        self._runtime.streamSynchronize(self._pointers[COMPUTE])

    def get(self, array: Array) -> Any:
        """A host copy of an array of the slab."""
        host = np.empty(array.shape, array.dtype)
        self.copy(host, array, COMPUTE)()
        self._runtime.streamSynchronize(self._pointers[COMPUTE])
        return host

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

    def copy(self, destination: Array, source: Array, stream: str) -> Work:
        """Bind a copy between slabs, or to and from an ordinary array, which must outlive it."""
        assert destination.nbytes == source.nbytes, f"copy of {source.nbytes} bytes into {destination.nbytes}"
        runtime = self._runtime
        kind = {
            (True, True): runtime.memcpyHostToHost,
            (False, True): runtime.memcpyHostToDevice,
            (True, False): runtime.memcpyDeviceToHost,
            (False, False): runtime.memcpyDeviceToDevice,
        }[isinstance(destination, np.ndarray), isinstance(source, np.ndarray)]
        return partial(
            runtime.memcpyAsync, _address(destination), _address(source), source.nbytes, kind, self._pointers[stream]
        )

    def select_engine(self, problem: Problem, workspace_limit: int | None) -> Engine:
        """How a convolution direction or a product is computed. Does not look at the memory there is.

        ``workspace_limit`` 0: cuDNN is not asked, which takes seconds. The answer is to be counted, not run: whatever engine
        it would be, it has no workspace, as our own.
        """
        return (
            own(problem) if self.cudnn is None or workspace_limit == 0 else self.cudnn.select(problem, workspace_limit)
        )

    def tune_engine(self, problem: Problem, workspace_limit: int | None) -> Engine:
        """The fastest engine of a convolution direction or a product, measured in memory of its own: call it before ``open``."""
        assert self._slab is None, "engines are measured before the slab is allocated"
        if self.cudnn is None:
            return own(problem)
        if self._tuner is None:
            versions = self.versions()
            what = " ".join(versions.get(name, "none") for name in ("gpu", "cudnn", "cudnn_frontend", "cublas"))
            self._tuner = Tuner(self._cupy, self._launcher, self._streams[COMPUTE], EngineCache(cache_folder(), what))
        return self._tuner.fastest(problem, workspace_limit, numpy_dtype(problem.dtype))

    # -- looking ----------------------------------------------------------------------------------------------------
    def _require_room(self, error: RuntimeError, when: str) -> None:
        """Raise UserError with the figures if an error says that memory outside the slab has run out; else do nothing."""
        if not any(words in str(error).lower() for words in ("out of memory", "out_of_memory", "alloc_failed")):
            return
        raise UserError(
            f"{self.name} ran out of memory outside the slab when {when}: the slab takes {self._slab_bytes} bytes, "
            f"{self.outside_bytes()} lie outside it (context, cuDNN, kernels, graphs, other processes) and {self.free_bytes} "
            f"are free; give a --memory below {max(0, self._slab_bytes - OUTSIDE_MARGIN_BYTES)}, or --capture off"
        ) from error

    def outside_bytes(self) -> int:
        """Memory in use on this GPU outside the slab or the pool. What other processes hold there counts, too."""
        free, total = self._runtime.memGetInfo()
        return int(total - free) - self._slab_bytes - (0 if self._pool is None else self._pool.held_bytes)

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
        self.synchronize()
        if self.cudnn is not None:
            self.cudnn.close()
        self._give_back()
        self._slab = self._scratch = self._pool = None
        self._slab_bytes = 0
        self._pinned = np.empty(0, np.uint8)


def open_device(name: str, precision: str, deterministic: bool) -> CudaDevice:
    """The device of ``"cuda:0"`` for a precision. Raises UserError, a sentence with the remedy, where it cannot be had."""
    index = parse_device(name)
    if precision == "fp64":
        raise UserError(
            "precision fp64 is for gradient checks on the emulated device; on a GPU use fp32, tf32, bf16 or fp16"
        )
    return CudaDevice(index, precision=precision, deterministic=deterministic)


def _address(array: Array) -> int:
    if not array.nbytes:
        return 0
    assert array.flags.c_contiguous, "only contiguous arrays are copied"
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
