"""The device protocol: a slab, a pinned slab, four streams, events. Two implementations, one dispatch loop.

The executor binds every row of a schedule once to a ``Work`` (a kernel or a copy on fixed addresses) and then, step after
step, submits the works in row order. A device runs works of one stream in order; between streams only the events order them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from minidnn.spec import TensorSpec

Array = Any
"""numpy.ndarray or cupy.ndarray."""

Work = Callable[[], None]
"""Something to run on a stream, with its operands bound. On a GPU it enqueues; on the emulated device it computes."""

Event = Any
"""The completion of one submitted work."""

IN_USE = "{} holds the memory of another step; close that first, or give this one a device of its own"


class Device(Protocol):
    """What the executor needs of a device. Nothing here allocates after ``open``."""

    name: str
    kernels: Any

    def open(self, reserved_bytes: int, host_bytes: int) -> None:
        """Allocate the slab and the pinned slab: exactly these bytes. Raises UserError with the figures, and where a step
        has them that was not closed."""

    def array(self, space: str, offset: int, spec: TensorSpec) -> Array:
        """A view of the slab (``space`` "device") or the pinned slab ("host"). ``offset`` is aligned to the item size."""

    def kernel(
        self, name: str, operands: Sequence[Array], scratch: Array | None, attrs: Mapping[str, Any], stream: str
    ) -> Work:
        """Bind one kernel call on a stream: ``kernels.<name>(*operands, **attrs)``, with ``scratch=`` unless None."""

    def copy(self, destination: Array, source: Array, stream: str) -> Work:
        """Bind a copy of equally many bytes between any two spaces."""

    def birth(self, array: Array, stream: str) -> Work | None:
        """What to run on a stream when a buffer is born on these bytes: poison on the emulated device; None on a GPU."""

    def submit(self, stream: str, work: Work | None, waits: Sequence[Event], seconds: float, record: bool) -> Event:
        """Queue a work after ``waits`` and return its completion, meaningful only if ``record`` is asked.

        ``seconds`` is its predicted duration: the emulated clock advances by it.
        """

    def wait(self, event: Event) -> None:
        """Block the host until the work of ``event`` has run."""

    def synchronize(self) -> None:
        """Block the host until every stream is empty."""

    def seconds(self) -> float:
        """The device's clock after ``synchronize``: virtual on the emulated device, measured by events on a GPU."""

    def put(self, array: Array, values: Any) -> None:
        """Write host values into an array of the slab, outside any step. Blocks."""

    def get(self, array: Array) -> Any:
        """Return a host copy of an array of the slab, outside any step. Blocks."""

    def outside_bytes(self) -> int:
        """Device memory this process holds outside the slab: context, libraries, graphs; 0 on the emulated device."""

    def release(self) -> None:
        """Give both slabs back, and be ready for ``open``. What was loaded and planned stays. Idempotent."""

    def close(self) -> None:
        """Give everything back. Idempotent."""
