"""Memory of a CUDA device: the slab and the pinned slab, or pools in their place, copies between them, and what lies outside."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from minidnn.device.base import IN_USE, Array, Work
from minidnn.device.cuda_libraries import numpy_dtype
from minidnn.device.cuda_pool import CudaPinnedPool, CudaPool
from minidnn.device.cuda_streams import CudaStreams
from minidnn.errors import UserError
from minidnn.schedule.instruction import COMPUTE, HOST
from minidnn.spec import TensorSpec

OUTSIDE_MARGIN_BYTES = 256 << 20  # by which a slab is made smaller after memory outside it has run out


class CudaMemory(CudaStreams):
    """Slabs of the current GPU, ``name`` in messages, and its streams. Runs no kernel. Used by one thread, that which made it."""

    def __init__(self, cupy: Any, name: str) -> None:
        super().__init__(cupy)
        self.name = name
        self._slab_bytes = 0
        self._slab: Any = None
        self._pool: CudaPool | None = None
        self._pinned: Any = np.empty(0, np.uint8)

    def open(self, reserved_bytes: int, host_bytes: int) -> None:
        """Allocate both slabs. Raises UserError with the figures where the GPU or the host has less."""
        self._require_free()
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
        self._require_free()
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

    # -- looking -----------------------------------------------------------------------------------------------------
    @property
    def free_bytes(self) -> int:
        """The free memory of the GPU, as its driver counts it."""
        return int(self._runtime.memGetInfo()[0])

    @property
    def available_bytes(self) -> int:
        """What a slab may take: the free memory of the GPU without three per cent, for graphs and libraries."""
        return self.free_bytes * 97 // 100

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

    def _require_free(self) -> None:
        if self._slab is not None or self._pool is not None:
            raise UserError(IN_USE.format(self.name))

    def release(self) -> None:
        """Give both slabs, or the pool, back. Streams, handles, plans and loaded kernels stay for the next step."""
        self.synchronize()
        self._slab = self._pool = None
        self._slab_bytes = 0
        self._pinned = np.empty(0, np.uint8)


def _address(array: Array) -> int:
    if not array.nbytes:
        return 0
    assert array.flags.c_contiguous, "only contiguous arrays are copied"
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
