"""NCCL communicator: arrays on GPUs, one GPU a process, by ``cupy.cuda.nccl``. Everything is enqueued on one stream.

The unique id and plain objects travel over another communicator (MPI, gloo). Signatures: ``cupy.cuda.nccl`` of CuPy 14.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from minidnn.errors import UserError
from minidnn.parallel.communicator import Bootstrapped, Communicator, PeerLost, missing

ABORT_SECONDS = 2.0  # that NCCL gets to give its calls up
_TYPES = {
    "uint8": "NCCL_UINT8", "int32": "NCCL_INT32", "int64": "NCCL_INT64", "float16": "NCCL_FLOAT16",
    "bfloat16": "NCCL_BFLOAT16", "float32": "NCCL_FLOAT32", "float64": "NCCL_FLOAT64",
}  # fmt: skip


class Nccl(Bootstrapped):
    """One rank. The process has chosen its GPU before. Opening it is collective; a second one of a group is a view of the first.

    ``stream``: address of the stream on which all calls are enqueued: ``comm`` of the device. NCCL wants the sends and
    receives of a ring step in one group, so ``post`` opens a group that ``recv`` or ``settle`` closes.
    Raises UserError on every rank where NCCL is missing on one.
    """

    name = "NCCL"

    def __init__(self, bootstrap: Communicator, stream: int) -> None:
        super().__init__(bootstrap)
        self._nccl, why = _import()
        reasons = [f"rank {rank}: {reason}" for rank, reason in enumerate(bootstrap.exchange(why)) if reason]
        if reasons:
            raise UserError(reasons[0])
        import cupy

        self._stream, self._grouped = stream, False
        opened, gpu = self.signs.opened, int(cupy.cuda.runtime.getDevice())
        fresh = bootstrap.exchange(gpu not in opened)
        if any(fresh):
            identity = bootstrap.exchange(self._nccl.get_unique_id() if self.rank == 0 else None)[0]
            opened[gpu] = self._nccl.NcclCommunicator(self.size, identity, self.rank)
        self._comm: Any = opened[gpu]
        self._own_gpu = cupy.cuda.Device(gpu)
        if any(fresh):
            self._connect(cupy)
            self.signs.checks.append(self.check)

    def _connect(self, cupy: Any) -> None:
        """Call each kind once: NCCL takes its memory at the first call, and a budget shall see it."""
        count = 128 * self.size
        memory, kind = cupy.cuda.Memory(2 * count * 4), np.dtype("float32")
        whole, other = (cupy.ndarray((count,), kind, cupy.cuda.MemoryPointer(memory, at)) for at in (0, count * 4))
        for collective in (self.all_reduce, self.reduce_scatter, self.all_gather, self.broadcast):
            collective(whole)
        self.post(whole, (self.rank + 1) % self.size)
        self.recv(other, (self.rank - 1) % self.size)
        cupy.cuda.runtime.streamSynchronize(self._stream)

    def _type(self, array: Any) -> Any:
        return getattr(self._nccl, _TYPES[str(array.dtype)])

    def post(self, array: Any, peer: int) -> None:
        """Open a group with a send in it."""
        self._nccl.groupStart()
        self._grouped = True
        self.send(array, peer)

    def recv(self, array: Any, peer: int) -> None:
        """Receive, and close the group that ``post`` opened."""
        self._comm.recv(array.data.ptr, array.size, self._type(array), peer, self._stream)
        self.settle()

    def settle(self) -> None:
        """Close the group that ``post`` opened."""
        if self._grouped:
            self._grouped = False
            self._nccl.groupEnd()

    def send(self, array: Any, peer: int) -> None:
        """Send. The array may change behind this call on the same stream."""
        self._comm.send(array.data.ptr, array.size, self._type(array), peer, self._stream)

    def all_reduce(self, array: Any) -> None:
        """Sum in place, in the order NCCL chooses; the same bits on all ranks."""
        at, sum_ = array.data.ptr, self._nccl.NCCL_SUM
        self._comm.allReduce(at, at, array.size, self._type(array), sum_, self._stream)

    def reduce_scatter(self, array: Any) -> None:
        """Sum the own part in place."""
        part = array.size // self.size
        own = array.data.ptr + self.rank * part * array.dtype.itemsize
        self._comm.reduceScatter(array.data.ptr, own, part, self._type(array), self._nccl.NCCL_SUM, self._stream)

    def all_gather(self, array: Any) -> None:
        """Gather in place."""
        part = array.size // self.size
        own = array.data.ptr + self.rank * part * array.dtype.itemsize
        self._comm.allGather(own, array.data.ptr, part, self._type(array), self._stream)

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Copy the root's array."""
        self._comm.broadcast(array.data.ptr, array.data.ptr, array.size, self._type(array), root, self._stream)

    def check(self) -> None:
        """Raise PeerLost if NCCL has noticed a failure of its own accord; a watchdog asks from time to time."""
        try:
            self._comm.check_async_error()
        except (RuntimeError, KeyError) as error:  # CuPy has no name for some of NCCL's codes
            raise PeerLost(f"NCCL reports on rank {self.rank}: {error}") from error

    def abort(self, reason: str) -> None:
        """Abort NCCL's calls under way, which can hang itself, and tell all ranks."""
        # A new thread has GPU 0, and NCCL would leave a context there when it sets that back.
        aborting = threading.Thread(target=lambda: (self._own_gpu.use(), self._comm.abort()), daemon=True)
        aborting.start()
        aborting.join(ABORT_SECONDS)
        super().abort(reason)


def _import() -> tuple[Any, str | None]:
    """NCCL's module, or the sentence for its absence. CuPy without NCCL has a module with nothing in it."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        return None, missing("NCCL, or CuPy with NCCL,", "cuda13", error)
    if getattr(nccl, "available", True):
        return nccl, None
    return None, missing("NCCL", "cuda13", ImportError("this CuPy was built without it, or its library is missing"))
