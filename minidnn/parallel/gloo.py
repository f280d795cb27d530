"""Gloo communicator: NumPy arrays between processes that ``torchrun`` has started, by ``torch.distributed``.

Where there is torchrun, there is PyTorch; nothing else of it is used. The ring steps give the bits they give over MPI.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import numpy as np

from minidnn.errors import UserError
from minidnn.parallel.communicator import PeerLost, Signs
from minidnn.parallel.launch import Place

_FOR_EVER = timedelta(days=30)  # who is lost is the watchdog's to say


class Gloo:
    """One rank of the group that torchrun describes in the environment. Opening it is collective."""

    name = "gloo"

    def __init__(self, place: Place) -> None:
        try:
            import torch
            from torch import distributed
        except ImportError as error:
            raise UserError(
                f"torchrun started {place.size} ranks, and PyTorch, by which they meet, cannot be used ({error}): pip install "
                "torch, or use mpiexec or srun"
            ) from error
        if not distributed.is_gloo_available():
            raise UserError("this PyTorch was built without gloo: use mpiexec or srun, or another PyTorch")
        self._torch: Any = torch
        self._distributed: Any = distributed
        self.rank, self.size, self._address = place.rank, place.size, place.address
        self.signs, self.threads = Signs(), True
        self._posted: list[tuple[Any, Any]] = []
        try:
            distributed.init_process_group("gloo", timeout=_FOR_EVER, rank=self.rank, world_size=self.size)
        except RuntimeError as error:
            raise UserError(
                f"rank {self.rank} of {self.size} could not meet the others at {place.address}: {error}"
            ) from error

    def channel(self) -> StoreChannel:
        """A way of its own for signs of life: another client of torchrun's store."""
        assert self._address is not None
        host, port = self._address
        return StoreChannel(self._distributed.TCPStore(host, port, None, False), self.rank, self.size)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._distributed, name)(*arguments)
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} lost another rank: {str(error).partition(chr(10))[0]}") from error

    def _tensor(self, array: Any) -> Any:
        return self._torch.from_numpy(array.reshape(-1))

    def _bytes(self, array: Any) -> Any:
        return self._torch.from_numpy(array.reshape(-1).view(np.uint8))

    def post(self, array: Any, peer: int) -> None:
        """Begin to send, without a copy."""
        tensor = self._bytes(array)
        self._posted.append((self._call("isend", tensor, peer), tensor))

    def recv(self, array: Any, peer: int) -> None:
        """Receive as many bytes as the array has, then wait for what was posted. Sizes that differ are not noticed."""
        self._call("recv", self._bytes(array), peer)
        self.settle()

    def settle(self) -> None:
        """Wait for what was posted."""
        for work, _ in self._posted:
            work.wait()
        self._posted.clear()

    def send(self, array: Any, peer: int) -> None:
        """Send."""
        self._call("send", self._bytes(array), peer)

    def all_reduce(self, array: Any) -> None:
        """Sum in place, in the order gloo chooses; then everybody takes rank 0's bits."""
        self._call("all_reduce", self._tensor(array))
        self.broadcast(array)

    def reduce_scatter(self, array: Any) -> None:
        """Sum every part at its owner."""
        for owner, part in enumerate(self._tensor(array).chunk(self.size)):
            self._call("reduce", part, owner)

    def all_gather(self, array: Any) -> None:
        """Gather in place."""
        parts = list(self._tensor(array).chunk(self.size))
        self._call("all_gather", parts, parts[self.rank].clone())

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Copy the root's array."""
        self._call("broadcast", self._bytes(array), root)

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's object."""
        found: list[Any] = [None] * self.size
        self._call("all_gather_object", found, value)
        return found

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._call("barrier")

    def abort(self, reason: str) -> None:
        """Say why, and end: torchrun then ends the others."""
        print(f"error: rank {self.rank} failed: {reason}", file=sys.stderr, flush=True)
        os._exit(PeerLost.exit_code)


class StoreChannel:
    """Small messages between watchdogs; used by their threads alone. A store that is gone is silence."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank = store, rank
        self._sent = [0] * size
        self._read = [0] * size

    def send(self, message: Any, peer: int) -> None:
        """Send without waiting."""
        try:
            self._store.set(f"sign/{self._rank}/{peer}/{self._sent[peer]}", json.dumps(message))
            self._sent[peer] += 1
        except RuntimeError:
            return

    def poll(self) -> list[tuple[int, Any]]:
        """What has come in: sender and message."""
        found: list[tuple[int, Any]] = []
        try:
            for source, number in enumerate(self._read):
                while self._store.check([key := f"sign/{source}/{self._rank}/{number}"]):
                    found.append((source, json.loads(self._store.get(key))))
                    self._store.delete_key(key)
                    number = self._read[source] = number + 1
        except RuntimeError:
            return found
        return found
