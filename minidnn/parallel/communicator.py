"""The communicator: how ranks exchange arrays and plain objects. Three implementations: in-process, MPI, NCCL.

Reductions are sums. Arrays are contiguous; those of one call have the same size and type on all ranks. All ranks make the same
calls in the same order. A row of a schedule is bound to one of these methods by ``minidnn.parallel.rows``.
"""

from __future__ import annotations

from typing import Any, Protocol

from minidnn.schedule.flats import cuts
from minidnn.schedule.ranks import share

__all__ = ["Communicator", "PeerLost", "cuts", "missing", "ring_all_reduce", "share"]


class PeerLost(RuntimeError):
    """Another rank failed or went away: this rank cannot go on. The message names it and its reason."""

    exit_code = 5


class Communicator(Protocol):
    """What a group of ranks offers each of them."""

    rank: int
    size: int
    name: str

    def post(self, array: Any, peer: int) -> None:
        """Begin to send: the first half of a ring step. The array must not change before ``recv`` or ``settle`` returns."""

    def recv(self, array: Any, peer: int) -> None:
        """Receive into an array, and end what was posted. Raises PeerLost where sizes differ or the peer is gone."""

    def settle(self) -> None:
        """End what was posted: the second half of a ring step in which nothing comes in."""

    def send(self, array: Any, peer: int) -> None:
        """Send; returns when the array may change."""

    def all_reduce(self, array: Any) -> None:
        """Replace the array by its sum over all ranks, the same bits everywhere."""

    def reduce_scatter(self, array: Any) -> None:
        """Replace this rank's part, of ``size`` equal ones, by its sum over all ranks. The other parts mean nothing then."""

    def all_gather(self, array: Any) -> None:
        """Replace each part, of ``size`` equal ones, by that of the rank with its number."""

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Replace the array by that of ``root``."""

    def exchange(self, value: Any) -> list[Any]:
        """Give a plain Python object, and get everybody's, by rank. For what is small and rare; never inside a step."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def abort(self, reason: str) -> None:
        """Tell all ranks that this one fails and why: whoever waits for it, or will, gets PeerLost or ends."""


def ring_all_reduce(communicator: Communicator, array: Any, incoming: Any) -> None:
    """Sum an array of any size over all ranks by 2 (ranks - 1) ring steps. Bit-identical on all ranks: the order is fixed.

    ``incoming`` is scratch for the largest part, at least ``ceil(size / ranks)`` elements. Sizes are not compared here.
    """
    rank, size = communicator.rank, communicator.size
    flat = array.reshape(-1)
    parts = [flat[share(flat.size, k, size)] for k in range(size)]
    for step in range(size - 1):
        communicator.post(parts[(rank - step - 1) % size], (rank + 1) % size)
        total = parts[(rank - step - 2) % size]
        communicator.recv(incoming[: total.size], (rank - 1) % size)
        total += incoming[: total.size]
    for step in range(size - 1):
        communicator.post(parts[(rank - step) % size], (rank + 1) % size)
        communicator.recv(parts[(rank - step - 1) % size], (rank - 1) % size)


def missing(library: str, extra: str, error: Exception) -> str:
    """The sentence for a library that is not there."""
    return f"{library} cannot be used ({error}); install it with: pip install 'minidnn-layup[{extra}]'"
