"""CUDA streams, events and graphs of a device: what is enqueued where, after what, and how a step is captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minidnn.device.base import Work
from minidnn.schedule.instruction import COMPUTE, STREAMS


class CudaEvent:
    """Completion of a submitted work. Returns its CUDA event to the device's pool when nobody can wait for it any more.

    ``epoch``: 0, or the number of the capture in which it was recorded; outside of that it stands for nothing.
    """

    __slots__ = ("_free", "epoch", "pointer")

    def __init__(self, pointer: int, free: list[int], epoch: int) -> None:
        self.pointer = pointer
        self.epoch = epoch
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
        self._epoch = self._captures = 0
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
        """Enqueue a work. Waits for events of another epoch are left out: a capture begins and ends with all streams empty."""
        pointer = self._pointers[stream]
        for event in waits:
            if event.epoch == self._epoch:
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
        event = CudaEvent(self._free_events.pop(), self._free_events, self._epoch)
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
    def capture(self, submit: Callable[[], object]) -> Any:
        """Record everything that ``submit`` submits as one CUDA graph, for ``launch``. Nothing of it runs.

        Run it once before: cuDNN and the driver load modules at the first run of a kernel, which a capture forbids. The
        streams fork from ``compute`` and join it again, so a launch is one unit of work on ``compute``.
        """
        self.synchronize()
        compute, others = self._pointers[COMPUTE], [p for s, p in self._pointers.items() if s != COMPUTE]
        self._captures += 1
        self._streams[COMPUTE].begin_capture()
        self._epoch = self._captures
        try:
            fork = self._record(compute)
            for pointer in others:
                self._runtime.streamWaitEvent(pointer, fork.pointer, 0)
            submit()
            for pointer in others:
                self._runtime.streamWaitEvent(compute, self._record(pointer).pointer, 0)
        finally:
            self._epoch = 0
            try:
                graph = self._streams[COMPUTE].end_capture()
            except RuntimeError as error:
                self._require_room(error, "a graph was made")
                raise
        try:
            graph.upload(self._streams[COMPUTE])
        except RuntimeError as error:
            self._require_room(error, "a graph was made")
            raise
        return graph

    def launch(self, graph: Any, *, alone: bool = True) -> CudaEvent:
        """Replay a captured graph after all that was submitted before it. Returns its end.

        ``alone``: also before all that will be submitted; else only before what comes on ``compute``.
        """
        compute, others = self._pointers[COMPUTE], [p for s, p in self._pointers.items() if s != COMPUTE]
        for pointer in others:
            self._runtime.streamWaitEvent(compute, self._record(pointer).pointer, 0)
        graph.launch(self._streams[COMPUTE])
        end = self._record(compute)
        if alone:
            self.follow(end)
        return end

    def follow(self, event: CudaEvent) -> None:
        """Let every stream wait for an event."""
        for pointer in self._pointers.values():
            self._runtime.streamWaitEvent(pointer, event.pointer, 0)

    def follow_all(self) -> None:
        """Let every stream wait for all that was submitted to any."""
        for event in [self._record(pointer) for pointer in self._pointers.values()]:
            self.follow(event)

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
