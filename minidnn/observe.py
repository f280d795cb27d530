"""Observe: run the rows of a schedule, every buffer an allocation of its own, and record the bytes alive meanwhile.

A buffer exists from the first row that touches it until nothing refers to its array any more. That end is *observed*, by
``weakref.finalize`` on the array itself, so a reference that anybody keeps, a kernel included, is seen; ALLOC and FREE rows
are never looked at. What was predicted is not known here.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minidnn.device.base import Device
from minidnn.device.cuda_libraries import numpy_dtype
from minidnn.parallel.communicator import Communicator
from minidnn.parallel.rows import EXCHANGES, exchange_work
from minidnn.schedule.instruction import COMPUTE, DEVICE, HOST, Buffer, Instruction, Op, Value
from minidnn.schedule.program import Schedule
from minidnn.spec import round_up

Bytes = NDArray[np.uint8]


class Measurement(NamedTuple):
    """Live bytes by space while each row that runs something ran, and at the end: ``(row index, device bytes, host bytes)``."""

    rows: list[tuple[int, int, int]]

    @property
    def peak_bytes(self) -> int:
        """Largest live device bytes."""
        return max(device for _, device, _ in self.rows)

    @property
    def host_peak_bytes(self) -> int:
        """Largest live pinned bytes."""
        return max(host for _, _, host in self.rows)


class Allocations:
    """Arrays of their own, and the bytes of those alive by space: an array counts from ``allocate`` until it is garbage.

    On a GPU, device buffers are allocations of its driver (``fresh``), and it moves the bytes.
    """

    def __init__(self, device: Device) -> None:
        self.live = {DEVICE: 0, HOST: 0}
        self._gpu: Any = device if hasattr(device, "fresh") else None

    def allocate(self, buffer: Buffer) -> Bytes:
        """Poisoned bytes for a buffer."""
        nbytes = round_up(max(buffer.nbytes, 1))
        array: Bytes
        if self._gpu is not None and buffer.space == DEVICE:
            array, owner = self._gpu.fresh(nbytes)
        else:
            array = owner = np.full(nbytes, 0xFF, np.uint8)
        if buffer.space in self.live:
            self.live[buffer.space] += nbytes
            weakref.finalize(owner, self._drop, buffer.space, nbytes)
        return array

    def move(self, target: Any, source: Any) -> None:
        """Copy bytes, wherever they are."""
        if self._gpu is None:
            np.copyto(target, source)
        else:
            self._gpu.copy(target, source, COMPUTE)()
            self._gpu.synchronize()

    def synchronize(self) -> None:
        """Wait for what was enqueued on a GPU."""
        if self._gpu is not None:
            self._gpu.synchronize()

    def _drop(self, space: str, nbytes: int) -> None:
        self.live[space] -= nbytes


class _Handle:
    """The only lasting reference to a buffer's array: rows still to run share it, nobody else has it."""

    __slots__ = ("array", "buffer")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.array: Bytes | None = None


class _Due(NamedTuple):
    """A row that is still to run, and the handles of what it touches."""

    number: int
    row: Instruction
    handles: tuple[_Handle, ...]


def observe(
    schedule: Schedule,
    persistent: Mapping[Buffer, Bytes],
    allocations: Allocations,
    kernels: Any,
    communicator: Communicator | None,
) -> Measurement:
    """Run the rows of a schedule in list order, buffer by buffer, and record the live bytes during every row."""
    handles: dict[Buffer, _Handle] = {}
    queue: deque[_Due] = deque()
    for index, row in enumerate(schedule.rows):
        values = _values(row)
        if row.op not in (Op.ALLOC, Op.FREE) and values:
            touched = {v.buffer for v in values if v.buffer not in persistent}
            queue.append(_Due(index, row, tuple(handles.setdefault(b, _Handle(b)) for b in touched)))
    handles.clear()
    samples = []
    while queue:  # the last references of a row go with its call: a buffer that no later row shares dies there
        samples.append(_run(queue.popleft(), persistent, allocations, kernels, communicator))
    live = allocations.live
    samples.append((len(schedule.rows) - 1, live[DEVICE], live[HOST]))  # after the last row: no leak
    return Measurement(samples)


def _values(row: Instruction) -> tuple[Value, ...]:
    return (*row.writes, *row.reads) if row.workspace is None else (*row.writes, *row.reads, row.workspace)


def _run(
    due: _Due,
    persistent: Mapping[Buffer, Bytes],
    allocations: Allocations,
    kernels: Any,
    communicator: Communicator | None,
) -> tuple[int, int, int]:
    """Run one row, and return its index with the bytes alive meanwhile."""
    arrays = dict(persistent)
    for handle in due.handles:
        if handle.array is None:
            handle.array = allocations.allocate(handle.buffer)
        arrays[handle.buffer] = handle.array
    sample = due.number, allocations.live[DEVICE], allocations.live[HOST]
    row = due.row
    operands = [_view(arrays, v) for v in (*row.writes, *row.reads)]
    if row.op is Op.HOLD:
        return sample
    if row.op in EXCHANGES:
        exchange_work(communicator, row, operands)()
        allocations.synchronize()
    elif row.kernel:
        scratch = {} if row.workspace is None else {"scratch": _view(arrays, row.workspace)}
        with np.errstate(all="ignore"):
            getattr(kernels, row.kernel)(*operands, **row.attrs, **scratch)
    else:
        allocations.move(operands[0], operands[1])
    return sample


def _view(arrays: Mapping[Buffer, Bytes], value: Value) -> NDArray[Any]:
    part = arrays[value.buffer][value.offset : value.offset + value.spec.nbytes]
    array: NDArray[Any] = part.view(numpy_dtype(value.spec.dtype)).reshape(value.spec.shape)
    return array
