"""The two pools with memory of a GPU behind them: what the model counts is what cudaMalloc and cudaHostAlloc are asked for.

The policy is ours (``minidnn.device.pool``), not CuPy's own pool, so that what is held can be predicted to the byte; CuPy only
hands out single allocations. Blocks are taken and given back in the order of one stream, and a block that is reused is reused
by that stream: nothing waits for anything else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minidnn.device.cuda_libraries import numpy_dtype
from minidnn.device.pool import PinnedPoolModel, PoolModel, PoolOutOfMemory
from minidnn.errors import UserError
from minidnn.spec import TensorSpec


class CudaPool(PoolModel):
    """A pool of device memory. Where the driver refuses, what is free as a whole is given back before it is asked again."""

    def __init__(self, cupy: Any, limit: int | None = None) -> None:
        super().__init__(limit)
        self._cupy = cupy

    def allocate(self, nbytes: int) -> Any:
        """One cudaMalloc. Raises PoolOutOfMemory with the figures."""
        refusals = (self._cupy.cuda.runtime.CUDARuntimeError, MemoryError)
        try:
            return self._cupy.cuda.Memory(nbytes)
        except refusals:
            self.free_all_blocks()
        try:
            return self._cupy.cuda.Memory(nbytes)
        except refusals:
            free = int(self._cupy.cuda.runtime.memGetInfo()[0])
            raise PoolOutOfMemory(nbytes, self.used_bytes, self.held_bytes, self.held_bytes + free) from None

    def array(self, block: int, offset: int, spec: TensorSpec) -> Any:
        """A view into a block."""
        memory, start = self.place(block)
        pointer = self._cupy.cuda.MemoryPointer(memory, start + offset)
        return self._cupy.ndarray(spec.shape, numpy_dtype(spec.dtype), pointer)


class CudaPinnedPool(PinnedPoolModel):
    """A pool of pinned host memory."""

    def __init__(self, cupy: Any) -> None:
        super().__init__()
        self._cupy = cupy

    def allocate(self, nbytes: int) -> Any:
        """Pin exactly these bytes. Raises UserError where the host has not got them."""
        cuda = self._cupy.cuda
        try:
            memory = cuda.PinnedMemory(nbytes)
        except (cuda.runtime.CUDARuntimeError, MemoryError):
            raise UserError(
                f"{nbytes} bytes of pinned host memory cannot be had beside {self.held_bytes}; use allocator='slab', which pins "
                "no power of two but what is needed"
            ) from None
        return np.frombuffer(cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes) if nbytes else np.empty(0, np.uint8)

    def array(self, block: int, offset: int, spec: TensorSpec) -> Any:
        """A view into a block."""
        part = self.place(block)[offset : offset + spec.nbytes]
        return part.view(numpy_dtype(spec.dtype)).reshape(spec.shape)
