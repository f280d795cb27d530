"""As much of CuPy as the CUDA device uses, on the CPU: streams that run late and in an adversarial order, events, captures.

It models what a mistake would break: a stream waits only for what an event held *when the wait was enqueued*; a stream that
was not forked into a capture runs at once, which is an error here; memory given back is poisoned.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections import deque
from types import SimpleNamespace

import numpy as np

from minidnn.kernels import cuda_kernels, numpy_kernels


class FakeError(RuntimeError):
    """What CUDA answers with an error code."""


class FakeArray:
    """A device array: not a numpy.ndarray, and only its address is of use."""

    def __init__(self, shape, dtype, pointer):
        self.shape, self.dtype, self.data = tuple(shape), np.dtype(dtype), pointer
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.nbytes = self.size * self.dtype.itemsize
        self.flags = SimpleNamespace(c_contiguous=True)

    def host(self):
        """The bytes as a NumPy array, for kernels that stand in for CUDA's."""
        buffer = (ctypes.c_uint8 * self.nbytes).from_address(self.data.ptr)
        return np.frombuffer(buffer, self.dtype).reshape(self.shape)


class Memory:
    def __init__(self, cuda, size):
        self._cuda, self.size = cuda, size
        if cuda.used + size > cuda.total:
            raise FakeError("cudaErrorMemoryAllocation: out of memory")
        cuda.used += size
        cuda.most_used = max(cuda.most_used, cuda.used)
        self._raw = np.full(size + 512, 0xFF, np.uint8)
        self.ptr = -(-self._raw.ctypes.data // 512) * 512

    def __del__(self):
        if hasattr(self, "_raw"):
            self._cuda.used -= self.size


class Task:
    """Something in a stream's queue, done after all before it and after ``after``."""

    def __init__(self, run, after=None):
        self.run, self.after, self.done = run, after, False


class FakeCuda:
    """``FakeCuda(seed).module`` takes the place of the module cupy."""

    def __init__(self, seed=0, total=1 << 30, capability=(9, 0), driver=13000, count=1):
        self.random, self.used, self.most_used, self.total = random.Random(seed), 0, 0, total
        self.queues, self.recorded, self.created, self.clock = {}, {}, 0, 0.0
        self.capture, self.capturing, self.launched = None, set(), 0
        runtime = SimpleNamespace(
            getDeviceProperties=lambda index: {"name": b"Fake", "major": capability[0], "minor": capability[1]},
            driverGetVersion=lambda: driver, runtimeGetVersion=lambda: 13020, getDevice=lambda: 0,
            memset=lambda pointer, value, nbytes: ctypes.memset(pointer, value, nbytes),
            CUDARuntimeError=FakeError, eventDisableTiming=2, deviceSynchronize=lambda: None,
            memcpyHostToHost=0, memcpyHostToDevice=1,
            memcpyDeviceToHost=2, memcpyDeviceToDevice=3, getDeviceCount=self.devices(count, driver), memcpyAsync=self.copy,
            eventCreateWithFlags=self.create_event, eventDestroy=self.destroy_event, eventRecord=self.record,
            streamWaitEvent=self.wait_event, eventSynchronize=self.synchronize_event,
            streamSynchronize=self.synchronize_stream, memGetInfo=lambda: (self.total - self.used, self.total),
        )  # fmt: skip
        fake = self

        class Stream:
            def __init__(self, non_blocking):
                assert non_blocking, "a blocking stream would wait for the null stream"
                self.ptr = 1000 + len(fake.queues)
                fake.queues[self.ptr] = deque()

            def synchronize(self):
                fake.synchronize_stream(self.ptr)

            def begin_capture(self):
                assert not any(fake.queues.values()), "a capture begins with empty streams"
                fake.capture, fake.capturing = [], {self.ptr}

            def end_capture(self):
                tasks, fake.capture = fake.capture, None
                joined = {stream for stream, _ in tasks} <= {self.ptr} | fake.joined
                fake.capturing = set()
                if not joined:
                    raise FakeError("a forked stream was not joined")
                return SimpleNamespace(upload=lambda stream: None, launch=lambda stream: fake.replay(stream.ptr, tasks))

        class Event:
            def record(self, stream):
                fake.synchronize_stream(stream.ptr)
                self.time = fake.clock

            def synchronize(self):
                pass

        class DeviceMemory(Memory):
            def __init__(self, size):
                super().__init__(fake, size)

        self.joined = set()
        cuda = SimpleNamespace(
            runtime=runtime, Stream=Stream, Event=Event, Memory=DeviceMemory,
            PinnedMemory=lambda size: np.full(size, 0xFF, np.uint8), PinnedMemoryPointer=lambda memory, offset: memory[offset:],
            MemoryPointer=lambda memory, offset: SimpleNamespace(ptr=memory.ptr + offset, memory=memory),
            Device=lambda index: SimpleNamespace(use=lambda: None), driver=SimpleNamespace(launchKernel=None),
            get_elapsed_time=lambda a, b: (b.time - a.time) * 1e3,
        )  # fmt: skip
        self.module = SimpleNamespace(cuda=cuda, ndarray=FakeArray, RawModule=None, __version__="fake")

    @staticmethod
    def devices(count, driver):
        def get():
            if driver < 13000 or not count:
                raise FakeError(
                    "cudaErrorInsufficientDriver: too old" if count else "cudaErrorNoDevice: no CUDA device"
                )
            return count

        return get

    # -- enqueueing -------------------------------------------------------------------------------------------------
    def enqueue(self, stream, run, after=None):
        """Put a task at the end of a stream, or of the graph that is being captured."""
        if self.capture is not None:
            if stream not in self.capturing:
                raise FakeError("work on a stream that the capture does not hold would run now")
            self.capture.append((stream, run))
            return None
        task = Task(run, after)
        self.queues[stream].append(task)
        return task

    def copy(self, target, source, nbytes, kind, stream):
        self.enqueue(stream, lambda: ctypes.memmove(target, source, nbytes))

    def create_event(self, flags):
        assert flags == 2, "events that order streams have no timing"
        self.created += 1
        self.recorded[self.created] = None
        return self.created

    def destroy_event(self, event):
        del self.recorded[event]

    def record(self, event, stream):
        if self.capture is not None:
            if stream not in self.capturing:
                raise FakeError("an event of a stream outside the capture")
            self.recorded[event] = (self.capture, stream)
        else:
            self.recorded[event] = self.enqueue(stream, lambda: None)

    def wait_event(self, stream, event, flags):
        what = self.recorded[event]
        if isinstance(what, tuple) != (self.capture is not None) or (
            isinstance(what, tuple) and what[0] is not self.capture
        ):
            raise FakeError("a wait crosses the edge of a capture")
        if self.capture is None:
            self.enqueue(stream, lambda: None, after=what)
            return
        self.capturing.add(stream)
        if what[1] != stream:
            self.joined = self.joined | {what[1]}

    def replay(self, stream, tasks):
        self.launched += 1
        self.enqueue(stream, lambda: [run() for _, run in tasks])

    # -- running ----------------------------------------------------------------------------------------------------
    def run_one(self):
        ready = [q for q in self.queues.values() if q and (q[0].after is None or q[0].after.done)]
        assert ready, "the streams wait for one another"
        task = self.random.choice(ready).popleft()
        task.run()
        task.done = True
        self.clock += 1e-3

    def synchronize_event(self, event):
        task = self.recorded[event]
        if isinstance(task, tuple):
            raise FakeError("an event of a capture has no completion")
        while task is not None and not task.done:
            self.run_one()

    def synchronize_stream(self, stream):
        while self.queues[stream]:
            self.run_one()


def install(monkeypatch, seed=0, **how):
    """A fake CUDA in the place of CuPy, whose kernels are NumPy's, run when the streams please."""
    fake = FakeCuda(seed, **how)
    monkeypatch.setitem(sys.modules, "cupy", fake.module)

    def host(operand):
        return operand.host() if isinstance(operand, FakeArray) else operand

    def stand_in(name):
        kernel = getattr(numpy_kernels, name)

        def bind(on, *operands, **attrs):
            arguments = [host(operand) for operand in operands]
            extra = {key: host(value) for key, value in attrs.items()}
            return lambda: fake.enqueue(on.stream, lambda: kernel(*arguments, **extra))

        return bind

    for name in cuda_kernels.__all__:
        monkeypatch.setattr(cuda_kernels, name, stand_in(name))
    return fake
