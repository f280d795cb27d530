"""Staged communicator: arrays on a GPU, through host memory, over a communicator of NumPy arrays.

NCCL refuses two ranks on one GPU. This way several can share it, as threads or as processes: for tests and lessons. The
host waits in every call, so nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidnn.device.base import Device, Work
from minidnn.parallel.communicator import Bootstrapped, Communicator
from minidnn.schedule.instruction import COMM


class Staged(Bootstrapped):
    """One rank over ``bootstrap``. The copies run on stream ``comm`` of the device, behind what was submitted there before."""

    def __init__(self, bootstrap: Communicator, device: Device) -> None:
        super().__init__(bootstrap)
        self._device = device
        self.name = f"{bootstrap.name} through the host"

    def _run(self, work: Work) -> None:
        self._device.wait(self._device.submit(COMM, work, (), 0.0, True))

    def _host(self, array: Any) -> NDArray[Any]:
        host = np.empty(array.shape, array.dtype)
        self._run(self._device.copy(host, array, COMM))
        return host

    def _through(self, array: Any, change: Callable[[NDArray[Any]], None]) -> None:
        """Sums of 16-bit numbers are made in 32 bits: MPI and gloo do not know all of them."""
        host = self._host(array)
        wide = host.astype(np.float32) if host.dtype.itemsize == 2 else host
        change(wide)
        host = np.asarray(wide, host.dtype)  # by name: a copy knows no more of its source than the address
        self._run(self._device.copy(array, host, COMM))

    def post(self, array: Any, peer: int) -> None:
        """Begin to send a copy."""
        self.bootstrap.post(self._host(array), peer)

    def recv(self, array: Any, peer: int) -> None:
        """Receive, and end what was posted."""
        host = np.empty(array.shape, array.dtype)
        self.bootstrap.recv(host, peer)
        self._run(self._device.copy(array, host, COMM))

    def settle(self) -> None:
        """End what was posted."""
        self.bootstrap.settle()

    def send(self, array: Any, peer: int) -> None:
        """Send a copy."""
        self.bootstrap.send(self._host(array), peer)

    def all_reduce(self, array: Any) -> None:
        """Sum in the order of the other communicator."""
        self._through(array, self.bootstrap.all_reduce)

    def reduce_scatter(self, array: Any) -> None:
        """Sum the own part."""
        self._through(array, self.bootstrap.reduce_scatter)

    def all_gather(self, array: Any) -> None:
        """Gather all parts."""
        self._through(array, self.bootstrap.all_gather)

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Copy the root's array."""
        self._through(array, lambda host: self.bootstrap.broadcast(host, root))
