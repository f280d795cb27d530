"""The emulated device: NumPy kernels in one slab, behind streams that run late and in an adversarial order.

A product, not a mock: a learner sees overlap and races on a laptop, and CI proves ordering without a GPU. Queued work runs
only when the host waits, in an order drawn from ``seed`` among all orders that stream order and the waits allow. Fresh memory
is poisoned with 0xFF bytes, which are NaN in every floating-point type. A virtual clock, advanced by running the works, says
when a GPU of the given profile would have done them. It does not model the time of NumPy itself.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from minidnn.device.base import IN_USE, Array, Work
from minidnn.errors import UserError
from minidnn.kernels import numpy_kernels
from minidnn.schedule.instruction import DEVICE, STREAMS
from minidnn.spec import TensorSpec

GUARD_BYTES = 4096
"""Canary behind the slab: a write past the planned extent is seen by ``touched_bytes``."""

SCAN_BYTES = 1 << 20
"""The poison scan looks at so many bytes at a time."""


class EmulatedEvent:
    """Completion of a submitted work: ``end`` is its time on the virtual clock once ``done``."""

    __slots__ = ("done", "end")

    def __init__(self) -> None:
        self.done = False
        self.end = 0.0


class EmulatedDevice:
    """See the module. ``seed`` None runs works in submission order, an int in that adversarial order."""

    name = "emulated"

    def __init__(self, *, seed: int | None = 0, kernels: ModuleType = numpy_kernels) -> None:
        self.kernels = kernels
        self._random = None if seed is None else random.Random(seed)
        self._queues: dict[str, deque[tuple[Work | None, Sequence[EmulatedEvent], float, EmulatedEvent]]] = {
            stream: deque() for stream in STREAMS
        }
        self._clock = dict.fromkeys(STREAMS, 0.0)
        self._slabs: dict[str, np.ndarray[Any, np.dtype[np.uint8]]] = {}
        self._favourite = STREAMS[0]
        self._patience = 0

    def open(self, reserved_bytes: int, host_bytes: int) -> None:
        """Allocate both slabs, poisoned."""
        if self._slabs:
            raise UserError(IN_USE.format(self.name))
        self._slabs = {
            "device": np.full(reserved_bytes + GUARD_BYTES, 0xFF, np.uint8),
            "host": np.full(host_bytes, 0xFF, np.uint8),
        }

    def array(self, space: str, offset: int, spec: TensorSpec) -> Array:
        """A view of a slab."""
        return self._slabs[space][offset : offset + spec.nbytes].view(spec.dtype).reshape(spec.shape)

    def kernel(
        self, name: str, operands: Sequence[Array], scratch: Array | None, attrs: Mapping[str, Any], stream: str
    ) -> Work:
        """Bind a NumPy kernel."""
        extra = {} if scratch is None else {"scratch": scratch}
        return partial(getattr(self.kernels, name), *operands, **attrs, **extra)

    def copy(self, destination: Array, source: Array, stream: str) -> Work:
        """Bind a copy."""
        return partial(np.copyto, destination, source)

    def birth(self, array: Array, stream: str) -> Work | None:
        """Poison: whatever the kernel then fails to write stays NaN."""
        return partial(array.view(np.uint8).fill, 0xFF)

    def submit(
        self, stream: str, work: Work | None, waits: Sequence[EmulatedEvent], seconds: float, record: bool
    ) -> EmulatedEvent:
        """Queue a work; nothing runs yet."""
        event = EmulatedEvent()
        self._queues[stream].append((work, waits, seconds, event))
        return event

    def _next_stream(self) -> str:
        """Pick a stream whose head may run: the favourite for a while, then another, so that the rest run late."""
        ready = [s for s, queue in self._queues.items() if queue and all([e.done for e in queue[0][1]])]
        assert ready, "every stream waits for another: the schedule's waits form a cycle"
        if self._random is None or len(ready) == 1:
            return ready[0]
        if self._favourite not in ready or self._patience == 0:
            self._favourite = self._random.choice(ready)
            self._patience = self._random.choice((1, 2, 5, 20, 100))
        self._patience -= 1
        return self._favourite

    def _run_one(self) -> None:
        stream = self._next_stream()
        work, waits, seconds, event = self._queues[stream].popleft()
        if work is not None:
            try:
                work()
            except BaseException:
                self.discard()  # the rest of a step that failed must not run with the next one
                raise
        start = self._clock[stream]
        for wait in waits:
            start = max(start, wait.end)
        event.end = self._clock[stream] = start + seconds
        event.done = True

    def wait(self, event: EmulatedEvent) -> None:
        """Run works until that of ``event`` has run. Overflow is not an error here: a diverging loss is reported as such."""
        with np.errstate(all="ignore"):
            while not event.done:
                self._run_one()

    def synchronize(self) -> None:
        """Run everything."""
        with np.errstate(all="ignore"):
            while any(self._queues.values()):
                self._run_one()

    def put(self, array: Array, values: Any) -> None:
        """Write into the slab."""
        array[...] = values

    def get(self, array: Array) -> Any:
        """Copy out of the slab."""
        return np.array(array)

    def discard(self) -> None:
        """Forget queued works after a failure: none of them will run, and nobody waits for them."""
        for queue in self._queues.values():
            for *_, event in queue:
                event.done = True
            queue.clear()

    def seconds(self) -> float:
        """The virtual clock: the end of the last work so far."""
        return max(self._clock.values())

    def touched_bytes(self) -> int:
        """Highest byte of the slab, guard included, that no longer holds poison."""
        slab = self._slabs[DEVICE]
        # From behind, and in pieces: one comparison of the whole slab would take as much again.
        for end in range(slab.size, 0, -SCAN_BYTES):
            begin = max(end - SCAN_BYTES, 0)
            touched = np.flatnonzero(slab[begin:end] != 0xFF)
            if touched.size:
                return begin + int(touched[-1]) + 1
        return 0

    def outside_bytes(self) -> int:
        """Nothing of an emulated device lies outside its slab."""
        return 0

    def release(self) -> None:
        """Drop both slabs, and what is queued."""
        self.discard()
        self._slabs = {}

    def close(self) -> None:
        """The same: there is nothing else."""
        self.release()
