"""MPI communicator: NumPy arrays between processes, by ``mpi4py``. It cannot reach arrays on a GPU."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from minidnn.errors import UserError
from minidnn.parallel.communicator import PeerLost, Signs, missing
from minidnn.parallel.launch import Place


class Mpi:
    """One rank of MPI's world. Opening it is collective."""

    name = "MPI"

    def __init__(self, place: Place) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise UserError(missing("mpi4py, or an MPI library for it,", "mpi", error)) from error
        self._mpi: Any = MPI
        self._world: Any = MPI.COMM_WORLD.Dup()
        self.rank, self.size = int(self._world.Get_rank()), int(self._world.Get_size())
        if (self.rank, self.size) != (place.rank, place.size):
            raise UserError(
                f"{place.launcher or 'the environment'} says rank {place.rank} of {place.size}, MPI says rank {self.rank} of "
                f"{self.size}: mpi4py uses another MPI than the launcher; install both from one: pip install "
                "'minidnn-layup[mpi]'"
            )
        self.signs = Signs()
        self.threads = bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)
        self._posted: list[Any] = []

    def channel(self) -> MpiChannel:
        """A way of its own for signs of life. Collective."""
        return MpiChannel(self._mpi, self._world.Dup())

    def post(self, array: Any, peer: int) -> None:
        """Begin to send, without a copy."""
        self._posted.append(self._world.Isend(_bytes(array), peer))

    def recv(self, array: Any, peer: int) -> None:
        """Receive as many bytes as the array has, then wait for what was posted."""
        status = self._mpi.Status()
        try:
            self._world.Recv(_bytes(array), peer, status=status)
        except self._mpi.Exception as error:
            raise PeerLost(f"rank {self.rank} could not receive from rank {peer}: {error}") from error
        if (count := status.Get_count(self._mpi.BYTE)) != array.nbytes:
            raise PeerLost(f"rank {peer} sent {count} bytes where rank {self.rank} expects {array.nbytes}")
        self.settle()

    def settle(self) -> None:
        """Wait for what was posted."""
        self._mpi.Request.Waitall(self._posted)
        self._posted.clear()

    def send(self, array: Any, peer: int) -> None:
        """Send."""
        self._world.Send(_bytes(array), peer)

    def all_reduce(self, array: Any) -> None:
        """Sum in place, in the order the MPI library chooses; then everybody takes rank 0's bits."""
        self._world.Allreduce(self._mpi.IN_PLACE, array)
        self.broadcast(array)

    def reduce_scatter(self, array: Any) -> None:
        """Sum the own part, in the order the MPI library chooses. Takes scratch of one part outside the slab."""
        part = len(array) // self.size
        total = np.empty(part, array.dtype)
        self._world.Reduce_scatter_block(array, total)
        array[self.rank * part : (self.rank + 1) * part] = total

    def all_gather(self, array: Any) -> None:
        """Gather in place."""
        self._world.Allgather(self._mpi.IN_PLACE, array)

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Copy the root's array."""
        self._world.Bcast(_bytes(array), root)

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's object."""
        return list(self._world.allgather(value))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._world.Barrier()

    def abort(self, reason: str) -> None:
        """Say why, and end every process of the job."""
        print(f"error: rank {self.rank} failed: {reason}", file=sys.stderr, flush=True)
        self._mpi.COMM_WORLD.Abort(PeerLost.exit_code)
        os._exit(PeerLost.exit_code)


class MpiChannel:
    """Small messages between watchdogs; used by their threads alone."""

    def __init__(self, mpi: Any, world: Any) -> None:
        self._mpi, self._world = mpi, world
        self._sent: list[Any] = []

    def send(self, message: Any, peer: int) -> None:
        """Send without waiting."""
        self._sent = [request for request in self._sent if not request.Test()]
        self._sent.append(self._world.isend(message, peer))

    def poll(self) -> list[tuple[int, Any]]:
        """What has come in: sender and message."""
        found, status = [], self._mpi.Status()
        while self._world.iprobe(status=status):
            source = status.Get_source()
            found.append((source, self._world.recv(source=source)))
        return found


def _bytes(array: Any) -> Any:
    return array.reshape(-1).view(np.uint8)
