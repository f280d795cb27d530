"""In-process communicator: N ranks as threads of one process, for tests and lessons. Threads share the interpreter lock:
it shows what happens, not how fast."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np

from minidnn.errors import UserError
from minidnn.parallel.communicator import PeerLost, Signs

T = TypeVar("T")
_POLL_SECONDS = 0.05


class _Group:
    """What the ranks of one group share."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.queues = {(a, b): SimpleQueue[Any]() for a in range(size) for b in range(size)}
        self.board: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)
        self.lock = threading.Lock()
        self.failure: str | None = None

    def fail(self, reason: str) -> None:
        """Record the first failure, and wake all who wait."""
        with self.lock:
            self.failure = self.failure or reason
        self.barrier.abort()


class InProcess:
    """One rank of a group of threads. ``ring_steps``, ``sent_bytes`` and ``collectives`` count what it did."""

    name = "in-process"

    def __init__(self, group: _Group, rank: int) -> None:
        self._group, self.rank, self.size = group, rank, group.size
        self.signs = Signs()
        self.ring_steps = self.sent_bytes = self.collectives = 0

    @staticmethod
    def group(size: int, timeout: float = 30.0) -> list[InProcess]:
        """The ranks of a new group. Whoever waits longer than ``timeout`` seconds gets PeerLost."""
        if size < 1:
            raise UserError(f"a group of {size} ranks: give at least 1")
        shared = _Group(size, timeout)
        return [InProcess(shared, rank) for rank in range(size)]

    # -- point to point ---------------------------------------------------------------------------------------------
    def post(self, array: Any, peer: int) -> None:
        """Send a copy: nothing is left to be ended."""
        self.ring_steps += 1
        self.send(array, peer)

    def send(self, array: Any, peer: int) -> None:
        """Send a copy."""
        self._check()
        self.sent_bytes += array.nbytes
        self._group.queues[self.rank, peer].put(np.array(array))

    def recv(self, array: Any, peer: int) -> None:
        """Receive, checking size and type."""
        queue, waited = self._group.queues[peer, self.rank], 0.0
        while True:
            self._check()
            try:
                sent = queue.get(timeout=_POLL_SECONDS)
                break
            except Empty:
                waited += _POLL_SECONDS
                if waited > self._group.timeout:
                    self._lost(f"rank {peer} sent nothing to rank {self.rank} for {self._group.timeout:g} s")
        if sent.shape != array.shape or sent.dtype != array.dtype:
            self._lost(
                f"rank {peer} sent {sent.dtype}{list(sent.shape)} where rank {self.rank} expects "
                f"{array.dtype}{list(array.shape)}"
            )
        array[...] = sent

    def settle(self) -> None:
        """Nothing was left open."""

    # -- collectives ------------------------------------------------------------------------------------------------
    def all_reduce(self, array: Any) -> None:
        """Sum in the order of the ranks."""
        array[...] = self._sum(array, slice(None))

    def reduce_scatter(self, array: Any) -> None:
        """Sum the own part in the order of the ranks."""
        own = self._own(array)
        array[own] = self._sum(array, own)

    def _sum(self, array: Any, part: slice) -> Any:
        arrays = self._gather(np.array(array))
        total = arrays[0][part].copy()
        for other in arrays[1:]:
            total += other[part]
        return total

    def all_gather(self, array: Any) -> None:
        """Copy every rank's part."""
        parts = self._gather(np.array(array[self._own(array)]))
        array[...] = np.concatenate(parts)

    def _own(self, array: Any) -> slice:
        part = len(array) // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Copy the root's array."""
        array[...] = self._gather(np.array(array))[root]

    def _gather(self, array: Any) -> list[Any]:
        self.collectives += 1
        arrays = self.exchange(array)
        kinds = {(a.shape, str(a.dtype)) for a in arrays}
        if len(kinds) > 1:
            self._lost(f"the ranks brought arrays of different kinds to one collective: {sorted(kinds)}")
        return arrays

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's object, each rank a copy of its own."""
        group = self._group
        group.board[self.rank] = value
        self.barrier()
        values = [copy.deepcopy(other) for other in group.board]
        self.barrier()
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._check()
        try:
            self._group.barrier.wait(self._group.timeout)
        except threading.BrokenBarrierError:
            self._lost(f"rank {self.rank} waited in vain for the others")

    # -- failure ----------------------------------------------------------------------------------------------------
    def abort(self, reason: str) -> None:
        """Record the failure of this rank."""
        self._group.fail(f"rank {self.rank} failed: {reason}")

    def _lost(self, reason: str) -> None:
        self._group.fail(reason)
        self._check()

    def _check(self) -> None:
        if self._group.failure is not None:
            raise PeerLost(self._group.failure)


def run_ranks(size: int, work: Callable[[InProcess], T], timeout: float = 30.0) -> list[T]:
    """Call ``work`` with every rank of a new group, each in a thread, and return the results by rank.

    What the first failing rank raised is raised here; the other ranks then get PeerLost.
    """
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def target(communicator: InProcess) -> None:
        try:
            results[communicator.rank] = work(communicator)
        except BaseException as error:
            errors.append(error)
            communicator.abort(f"{type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=target, args=(c,), name=f"rank {c.rank}") for c in InProcess.group(size, timeout)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, PeerLost)), errors[0])
    return results
