"""Measure a step's memory independently of its prediction, and compare the two to the byte.

The rows run on a copy of the state, every buffer an allocation of its own that exists from the first row that touches it
until nothing refers to it any more. Its end is *observed*, by ``weakref.finalize`` on the array itself, so a reference that
anybody keeps, a kernel included, is seen; ALLOC and FREE rows are never looked at. The live bytes during every row must equal
the predicted curve, and the same step in a slab of exactly the planned size must leave the same bits and touch no byte behind it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minidnn.device.base import Device
from minidnn.device.cuda_libraries import numpy_dtype
from minidnn.device.emulated import EmulatedDevice
from minidnn.errors import VerificationError
from minidnn.executor import Executor
from minidnn.parallel.communicator import Communicator
from minidnn.parallel.rows import EXCHANGES, exchange_work
from minidnn.schedule.instruction import COMPUTE, DEVICE, HOST, Buffer, Instruction, Op, Value
from minidnn.schedule.program import Schedule
from minidnn.schedule.simulate import live_curve
from minidnn.schedule.verify import verify
from minidnn.spec import BLOCK_BYTES, TensorSpec, round_up
from minidnn.step_result import Measured

if TYPE_CHECKING:
    from minidnn.step import CompiledStep

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


class _Counter:
    """Bytes of live arrays by space; an array counts from ``allocate`` until it is garbage.

    On a GPU, device buffers are allocations of its driver (``fresh``), and it moves the bytes.
    """

    def __init__(self, device: Device | None = None) -> None:
        self.live = {DEVICE: 0, HOST: 0}
        self._gpu: Any = device if hasattr(device, "fresh") else None

    def allocate(self, buffer: Buffer) -> Bytes:
        nbytes = round_up(max(buffer.nbytes, 1))
        array: Any
        if self._gpu is not None and buffer.space == DEVICE:
            array, owner = self._gpu.fresh(nbytes)
        else:
            array = owner = np.full(nbytes, 0xFF, np.uint8)
        if buffer.space in self.live:
            self.live[buffer.space] += nbytes
            weakref.finalize(owner, self._drop, buffer.space, nbytes)
        return array  # type: ignore[no-any-return]

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


def run_measured(
    schedule: Schedule,
    persistent: Mapping[Buffer, Bytes],
    counter: _Counter,
    kernels: Any,
    communicator: Communicator | None = None,
) -> Measurement:
    """Run the rows of a schedule in list order, buffer by buffer, and record the live bytes during every row."""
    handles: dict[Buffer, _Handle] = {}
    queue: deque[tuple[int, Instruction, tuple[_Handle, ...]]] = deque()
    for index, row in enumerate(schedule.rows):
        values = _values(row)
        if row.op not in (Op.ALLOC, Op.FREE) and values:
            touched = {v.buffer for v in values if v.buffer not in persistent}
            queue.append((index, row, tuple(handles.setdefault(b, _Handle(b)) for b in touched)))
    handles.clear()
    samples = []
    while queue:
        index, row, touched_handles = queue.popleft()
        arrays = dict(persistent)
        for handle in touched_handles:
            if handle.array is None:
                handle.array = counter.allocate(handle.buffer)
            arrays[handle.buffer] = handle.array
        samples.append((index, counter.live[DEVICE], counter.live[HOST]))
        _execute(row, arrays, kernels, communicator, counter)
        # The last references of this row go here; a buffer that no later row shares dies now.
        del arrays, touched_handles
        handle = None  # type: ignore[assignment]
    samples.append((len(schedule.rows) - 1, counter.live[DEVICE], counter.live[HOST]))  # after the last row: no leak
    return Measurement(samples)


def _values(row: Instruction) -> tuple[Value, ...]:
    return (*row.writes, *row.reads) if row.workspace is None else (*row.writes, *row.reads, row.workspace)


def _view(arrays: Mapping[Buffer, Bytes], value: Value) -> NDArray[Any]:
    spec: TensorSpec = value.spec
    part = arrays[value.buffer][value.offset : value.offset + spec.nbytes]
    array: NDArray[Any] = part.view(numpy_dtype(spec.dtype)).reshape(spec.shape)
    return array


def _execute(
    row: Instruction,
    arrays: Mapping[Buffer, Bytes],
    kernels: Any,
    communicator: Communicator | None,
    counter: _Counter,
) -> None:
    operands = [_view(arrays, v) for v in (*row.writes, *row.reads)]
    if row.op is Op.HOLD:
        return
    if row.op in EXCHANGES:
        exchange_work(communicator, row, operands)()
        counter.synchronize()
        return
    if not row.kernel:
        counter.move(operands[0], operands[1])
        return
    scratch = {} if row.workspace is None else {"scratch": _view(arrays, row.workspace)}
    with np.errstate(all="ignore"):
        getattr(kernels, row.kernel)(*operands, **row.attrs, **scratch)


def compare(schedule: Schedule, measurement: Measurement, base_bytes: int, host_base_bytes: int) -> None:
    """Raise VerificationError at the first row during which measured and predicted live bytes differ."""
    device = live_curve(schedule.rows, base_bytes)
    host = live_curve(schedule.rows, host_base_bytes, space=HOST)
    for index, measured, measured_host in measurement.rows:
        for what, got, expected in (("device", measured, device[index]), ("host", measured_host, host[index])):
            if got != expected:
                row = schedule.rows[index]
                raise VerificationError(
                    f"schedule {schedule.name!r}, row {index} ({row.op.value} {row.target} {row.kernel}): measured {got} live "
                    f"{what} bytes, predicted {expected}"
                )
    if measurement.peak_bytes != schedule.profile.peak_bytes:
        raise VerificationError(
            f"schedule {schedule.name!r}: measured a peak of {measurement.peak_bytes} bytes, "
            f"predicted {schedule.profile.peak_bytes}"
        )


def measure_step(step: CompiledStep, x: NDArray[Any], y: NDArray[Any]) -> Measured:
    """Measure every schedule of a step on copies of its state, with the batch ``x, y`` cut to each schedule's size."""
    peak = host_peak = 0
    seconds = 0.0
    for name, schedule in step.program.schedules.items():
        take = np.arange(schedule.batch) % len(x)
        batch, labels = np.asarray(x)[take], np.asarray(y)[take]
        measurement, state = measure_schedule(step, name, batch, labels)
        elapsed = _run_in_slab(step, name, batch, labels, state, timed=name == "train")
        seconds = max(seconds, elapsed)
        peak = max(peak, measurement.peak_bytes)
        host_peak = max(host_peak, measurement.host_peak_bytes)
    return Measured(peak, step.program.reserved_bytes, host_peak, seconds)


def measure_schedule(
    step: CompiledStep, name: str, x: NDArray[Any], y: NDArray[Any]
) -> tuple[Measurement, dict[Buffer, Bytes]]:
    """Measure one schedule, every buffer an allocation of its own, and compare. Runs nothing in a slab.

    Returns the measurement, and the state that the run left. Raises VerificationError where measured and predicted differ.
    """
    executor, schedule = step.executor, step.program[name]
    executor.device.synchronize()
    counter = _Counter(executor.device)
    state = _copy_state(executor, counter)
    step.fill_slot(name, {b: a for b, a in state.items() if b.space == HOST}, x, y)
    base, host_base = counter.live[DEVICE], counter.live[HOST]
    measurement = run_measured(schedule, state, counter, executor.device.kernels, executor.communicator)
    compare(schedule, measurement, base, host_base)
    problems = verify(
        schedule.rows,
        schedule.offsets,
        previous=step.program[schedule.previous].rows,
        extent=step.program.reserved_bytes,
        host_extent=step.program.host_bytes,
    )
    if problems:
        raise VerificationError(f"schedule {schedule.name!r}: {problems[0]} (and {len(problems) - 1} more)")
    return measurement, state


def _copy_state(executor: Executor, counter: _Counter) -> dict[Buffer, Bytes]:
    """Every persistent buffer as an allocation of its own, with its present contents; pinned slots are left poisoned."""
    program = executor.program
    state = {}
    held = set(program.persistent.state_buffers)
    for buffer in (*program.persistent.buffers, *program.persistent.host_buffers):
        array = state[buffer] = counter.allocate(buffer)
        if buffer in held:
            whole = Value(buffer.name, buffer, 0, TensorSpec((buffer.nbytes,), "uint8"), -1)
            counter.move(array[: buffer.nbytes], executor.device.get(executor.view(whole)))
    return state


def _run_in_slab(
    step: CompiledStep, name: str, x: NDArray[Any], y: NDArray[Any], expected: Mapping[Buffer, Bytes], *, timed: bool
) -> float:
    """Run a schedule once in a fresh slab: same bits as ``expected``, no byte touched behind the slab. Returns the virtual
    seconds of a second run that follows it, if ``timed``, else 0."""
    executor = step.executor
    program = executor.program
    if hasattr(executor.device, "fresh"):
        return _run_in_place(step, name, x, y, expected)
    device = EmulatedDevice(seed=step.seed + 1, kernels=executor.device.kernels)
    twin = Executor(program, device, step.gpu, step.precision.name, communicator=executor.communicator)
    for buffer in program.persistent.state_buffers:
        whole = Value(buffer.name, buffer, 0, TensorSpec((buffer.nbytes,), "uint8"), -1)
        device.put(twin.view(whole), executor.device.get(executor.view(whole)))
    slots = {buffer: twin.slot_bytes(buffer) for buffer in program.persistent.host_buffers}
    step.fill_slot(name, slots, x, y)
    slots[program.persistent.other_slot][:] = slots[program.persistent.slot]
    twin.run(name)
    device.synchronize()
    for buffer in program.persistent.state_buffers:
        whole = Value(buffer.name, buffer, 0, TensorSpec((buffer.nbytes,), "uint8"), -1)
        if not np.array_equal(twin.view(whole), expected[buffer][: buffer.nbytes]):
            raise VerificationError(
                f"schedule {name!r}: {buffer.name!r} differs between the slab and one allocation a buffer"
            )
    touched = device.touched_bytes()
    if touched > program.reserved_bytes:
        raise VerificationError(
            f"schedule {name!r} touched byte {touched - 1} of a slab of {program.reserved_bytes} bytes (block of {BLOCK_BYTES})"
        )
    first = device.seconds()
    if timed:  # with the other slot: what counts is the clock
        twin.run(name)
        device.synchronize()
    seconds = device.seconds() - first
    device.close()
    return seconds


def _run_in_place(
    step: CompiledStep, name: str, x: NDArray[Any], y: NDArray[Any], expected: Mapping[Buffer, Bytes]
) -> float:
    """On a GPU: run a schedule once in the slab there is, compare its bits with ``expected``, and put the state back.

    Returns the seconds it took. The driver has given the slab exactly the bytes reserved, so a byte touched behind them
    would be an error of its own.
    """
    executor, device = step.executor, step.executor.device
    persistent = executor.program.persistent
    whole = {
        b: executor.view(Value(b.name, b, 0, TensorSpec((b.nbytes,), "uint8"), -1)) for b in persistent.state_buffers
    }
    step.settle()
    before = {buffer: device.get(view) for buffer, view in whole.items()}
    slot = (persistent.slot, persistent.other_slot)[executor.slot()]
    batch = executor.slot_bytes(slot)
    batch[:] = 0xFF  # as in the copy: what lies between labels and pixels travels, too
    step.fill_slot(name, {persistent.slot: batch}, x, y)
    device.synchronize()
    start = device.seconds()
    executor.run(name)
    device.synchronize()
    seconds = device.seconds() - start
    differing = []
    for buffer, view in whole.items():
        target = expected[buffer][: buffer.nbytes]
        wanted = target if isinstance(target, np.ndarray) else device.get(target)
        if not np.array_equal(device.get(view), wanted):
            differing.append(buffer.name)
        device.put(view, before[buffer])
    if differing:
        raise VerificationError(
            f"schedule {name!r}: {differing[0]!r} differs between the slab and one allocation a buffer"
        )
    return seconds
