"""What a step gives back: the loss of a run, and what ``verify`` measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from minidnn.executor import Executor


@dataclass(slots=True)
class Measured:
    """What ``verify`` measured; None until then."""

    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    host_bytes: int | None = None
    step_seconds: float | None = None


class StepResult:
    """The result of one ``run``. ``loss`` waits for the device only when it is read."""

    __slots__ = ("_event", "_executor", "_loss", "_view")

    def __init__(self, executor: Executor, event: Any, view: NDArray[Any]) -> None:
        """``view``: the loss in its pinned slot, which holds it when ``event`` has happened."""
        self._executor: Executor | None = executor
        self._event = event
        self._view = view
        self._loss = float("nan")

    def settle(self) -> None:
        """Read the loss before its pinned slot is used again."""
        if self._executor is not None:
            self._executor.device.wait(self._event)
            self._loss = float(self._view)
            self._executor = self._event = None

    @property
    def loss(self) -> float:
        """Mean loss over the samples of this batch."""
        self.settle()
        return self._loss
