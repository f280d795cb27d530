"""The communicator: how ranks exchange arrays and plain objects.

On NumPy arrays: threads of one process, MPI, gloo (under torchrun). On a GPU: NCCL, or through the host; both are opened over
one of the first three.

Reductions are sums. Arrays are contiguous; those of one call have the same size and type on all ranks. All ranks make the same
calls in the same order. A row of a schedule is bound to one of these methods by ``minidnn.parallel.rows``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from minidnn.schedule.ranks import share

__all__ = ["Bootstrapped", "Communicator", "PeerLost", "Signs", "missing", "share"]


class PeerLost(RuntimeError):
    """Another rank failed or went away: this rank cannot go on. The message names it and its reason."""

    exit_code = 5


class Signs:
    """What a watchdog's thread may look at while its rank works.

    Attributes:
        marks: how often the rank has got on; ``step``: the training step it began last, counted from 1; 0: none yet.
        checks: each raises PeerLost where a library has noticed a failure of its own accord.
        opened: NCCL's communicators by number of the GPU: those of one group are opened once.
    """

    def __init__(self) -> None:
        self.marks = self.step = 0
        self.checks: list[Callable[[], None]] = []
        self.opened: dict[int, Any] = {}

    def mark(self, step: int = 0) -> None:
        """The rank got on, with a training step where ``step`` is given."""
        self.marks += 1
        self.step = step or self.step


class Communicator(Protocol):
    """What a group of ranks offers each of them."""

    rank: int
    size: int
    name: str
    signs: Signs

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


class Bootstrapped:
    """The half of a communicator that another one does: plain objects, meeting, failing."""

    def __init__(self, bootstrap: Communicator) -> None:
        self.bootstrap = bootstrap
        self.rank, self.size, self.signs = bootstrap.rank, bootstrap.size, bootstrap.signs

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's object, over the bootstrap."""
        return self.bootstrap.exchange(value)

    def barrier(self) -> None:
        """Wait for all ranks, over the bootstrap. Does not wait for a stream."""
        self.bootstrap.barrier()

    def abort(self, reason: str) -> None:
        """Tell all ranks, over the bootstrap."""
        self.bootstrap.abort(reason)


def missing(library: str, extra: str, error: Exception) -> str:
    """The sentence for a library that is not there."""
    return f"{library} cannot be used ({error}); install it with: pip install 'minidnn-layup[{extra}]'"
