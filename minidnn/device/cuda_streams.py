"""CUDA streams, events and graphs of a device: what is enqueued where, after what, and how a step is captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from minidnn.device.base import Work
from minidnn.schedule.instruction import COMPUTE, STREAMS


class CudaEvent:
    """Completion of a submitted work. Returns its CUDA event to the device's pool when nobody can wait for it any more."""

    __slots__ = ("_free", "pointer")

    def __init__(self, pointer: int, free: list[int]) -> None:
        self.pointer = pointer
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.pointer)


class CudaStreams:
    """Streams that do not wait for the null stream, on the current GPU. Used by one thread, that which made them."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._streams = {stream: cupy.cuda.Stream(non_blocking=True) for stream in STREAMS}
        self._pointers = {stream: int(self._streams[stream].ptr) for stream in STREAMS}
        self._all_events: list[int] = []
        self._free_events: list[int] = []
        self._elapsed = 0.0
        self._mark = self._timed_event()

    def stream(self, name: str) -> int:
        """The address of a stream, for a library that enqueues there itself."""
        return self._pointers[name]

    def _require_room(self, error: RuntimeError, when: str) -> None:
        """Say more of an error that means that memory has run out. For subclasses, which know what holds it."""

    # -- running ----------------------------------------------------------------------------------------------------
    def submit(
        self, stream: str, work: Work | None, waits: Sequence[CudaEvent], seconds: float, record: bool
    ) -> CudaEvent | None:
        """Enqueue a work behind what the events stand for. Returns its own, if it is to be recorded."""
        pointer = self._pointers[stream]
        for event in waits:
            self._runtime.streamWaitEvent(pointer, event.pointer, 0)
        if work is not None:
            try:
                work()
            except RuntimeError as error:
                self._require_room(error, "a kernel was loaded")
                raise
        return self._record(pointer) if record else None

    def _record(self, stream: int) -> CudaEvent:
        """Record an event. None is created once every event of two runs exists."""
        if not self._free_events:
            pointer = int(self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming))
            self._all_events.append(pointer)
            self._free_events.append(pointer)
        event = CudaEvent(self._free_events.pop(), self._free_events)
        self._runtime.eventRecord(event.pointer, stream)
        return event

    def wait(self, event: CudaEvent) -> None:
        """Block the host until the work of ``event`` has run."""
        self._runtime.eventSynchronize(event.pointer)

    def synchronize(self) -> None:
        """Block the host until every stream is empty. Errors of kernels appear here at the latest."""
        for pointer in self._pointers.values():
            self._runtime.streamSynchronize(pointer)

    # -- graphs -----------------------------------------------------------------------------------------------------
    def capture(self, submit: Callable[[], object]) -> Work:
        """Record what ``submit`` enqueues on ``compute``, and on no other stream, as a CUDA graph. Returns what replays it there.

        Nothing of it runs. Run it once before: cuDNN and the driver load modules at the first run of a kernel, which a
        capture forbids.
        """
        self.synchronize()
        stream = self._streams[COMPUTE]
        stream.begin_capture()
        try:
            submit()
        finally:
            try:
                graph = stream.end_capture()
            except RuntimeError as error:
                self._require_room(error, "a graph was made")
                raise
        try:
            graph.upload(stream)
        except RuntimeError as error:
            self._require_room(error, "a graph was made")
            raise
        return partial(graph.launch, stream)

    # -- the clock --------------------------------------------------------------------------------------------------
    def _timed_event(self) -> Any:
        event = self._cupy.cuda.Event()
        event.record(self._streams[COMPUTE])
        return event

    def seconds(self) -> float:
        """Seconds of the GPU's clock since the device was made, after ``synchronize``. Only differences mean anything."""
        before, self._mark = self._mark, self._timed_event()
        self._mark.synchronize()
        # In short pieces, because CUDA counts in single precision.
        self._elapsed += self._cupy.cuda.get_elapsed_time(before, self._mark) / 1e3
        return self._elapsed

    def _give_back(self) -> None:
        """Destroy events and streams, after ``synchronize``."""
        for pointer in self._all_events:
            self._runtime.eventDestroy(pointer)
        self._all_events.clear()
        self._free_events.clear()
        self._streams.clear()
        self._pointers.clear()
