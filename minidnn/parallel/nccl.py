"""NCCL communicator: arrays on GPUs, one GPU a process, by ``cupy.cuda.nccl``. Everything is enqueued on one stream.

The unique id and plain objects travel over another communicator (MPI). Signatures: ``cupy.cuda.nccl`` of CuPy 14.
"""

from __future__ import annotations

from typing import Any

from minidnn.errors import UserError
from minidnn.parallel.communicator import Communicator, PeerLost, missing

_TYPES = {
    "uint8": "NCCL_UINT8", "int32": "NCCL_INT32", "int64": "NCCL_INT64", "float16": "NCCL_FLOAT16",
    "bfloat16": "NCCL_BFLOAT16", "float32": "NCCL_FLOAT32", "float64": "NCCL_FLOAT64",
}  # fmt: skip


class Nccl:
    """One rank. The process has chosen its GPU before. Opening it is collective.

    ``stream``: address of the stream on which all calls are enqueued: ``comm`` of the device. NCCL wants the sends and
    receives of a ring step in one group, so ``post`` opens a group that ``recv`` or ``settle`` closes.
    """

    name = "NCCL"

    def __init__(self, bootstrap: Communicator, stream: int) -> None:
        try:
            from cupy.cuda import nccl
        except ImportError as error:
            raise UserError(missing("NCCL, or CuPy with NCCL,", "cuda12", error)) from error
        self._nccl: Any = nccl
        self._bootstrap, self._stream = bootstrap, stream
        self.rank, self.size = bootstrap.rank, bootstrap.size
        made = bytes(nccl.get_unique_id()) if self.rank == 0 else None
        self._comm: Any = nccl.NcclCommunicator(self.size, bootstrap.exchange(made)[0], self.rank)
        self._grouped = False

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
        own = array.data.ptr + self.rank * part * array.itemsize
        self._comm.reduceScatter(array.data.ptr, own, part, self._type(array), self._nccl.NCCL_SUM, self._stream)

    def all_gather(self, array: Any) -> None:
        """Gather in place."""
        part = array.size // self.size
        own = array.data.ptr + self.rank * part * array.itemsize
        self._comm.allGather(own, array.data.ptr, part, self._type(array), self._stream)

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Copy the root's array."""
        self._comm.broadcast(array.data.ptr, array.data.ptr, array.size, self._type(array), root, self._stream)

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's object, over the bootstrap."""
        return self._bootstrap.exchange(value)

    def barrier(self) -> None:
        """Wait for all ranks, over the bootstrap. Does not wait for the stream."""
        self._bootstrap.barrier()

    def check(self) -> None:
        """Raise PeerLost if NCCL has noticed a failure of its own accord; a watchdog asks from time to time."""
        error = self._comm.check_async_error()
        if error:
            raise PeerLost(f"NCCL reports error {error} on rank {self.rank}")

    def abort(self, reason: str) -> None:
        """Abort NCCL's calls under way, and tell all ranks."""
        self._comm.abort()
        self._bootstrap.abort(reason)
