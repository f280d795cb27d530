"""Measure a step's memory independently of its prediction, and compare the two to the byte.

The rows run on a copy of the state, every buffer an allocation of its own (``minidnn.observe``). The live bytes during every
row must equal the predicted curve, and the same step in a slab of exactly the planned size must leave the same bits and touch
no byte behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidnn.device.emulated import EmulatedDevice
from minidnn.errors import VerificationError
from minidnn.executor import Executor
from minidnn.observe import Allocations, Bytes, Measurement, observe
from minidnn.schedule.instruction import DEVICE, HOST, Buffer
from minidnn.schedule.program import Schedule
from minidnn.schedule.simulate import live_curve
from minidnn.schedule.verify import verify
from minidnn.spec import BLOCK_BYTES
from minidnn.step_result import Measured

Fill = Callable[[str, Bytes, NDArray[Any], NDArray[Any]], None]
"""Fills the bytes of a pinned slot for a run of the named schedule on a batch ``x, y``."""


def measure_step(executor: Executor, fill: Fill, x: NDArray[Any], y: NDArray[Any]) -> Measured:
    """Measure every schedule of a step on copies of its state, with the batch ``x, y`` cut to each schedule's size.

    On a GPU, which takes part in the slab there is, every result on its way must have been read before.
    """
    peak = host_peak = 0
    seconds = 0.0
    for name, schedule in executor.program.schedules.items():
        take = np.arange(schedule.batch) % len(x)
        batch, labels = np.asarray(x)[take], np.asarray(y)[take]
        measurement, state = measure_schedule(executor, fill, name, batch, labels)
        if hasattr(executor.device, "fresh"):
            elapsed = _run_in_place(executor, fill, name, batch, labels, state)
        else:
            elapsed = _run_in_fresh_slab(executor, fill, name, batch, labels, state, timed=name == "train")
        seconds = max(seconds, elapsed)
        peak = max(peak, measurement.peak_bytes)
        host_peak = max(host_peak, measurement.host_peak_bytes)
    return Measured(peak, executor.program.reserved_bytes, host_peak, seconds)


def measure_schedule(
    executor: Executor, fill: Fill, name: str, x: NDArray[Any], y: NDArray[Any]
) -> tuple[Measurement, dict[Buffer, Bytes]]:
    """Measure one schedule, every buffer an allocation of its own, and compare. Runs nothing in a slab.

    Returns the measurement, and the state that the run left. Raises VerificationError where measured and predicted differ.
    """
    program, device = executor.program, executor.device
    schedule = program[name]
    device.synchronize()
    allocations = Allocations(device)
    state = _copy_state(executor, allocations)
    fill(name, state[program.persistent.slot], x, y)
    base, host_base = allocations.live[DEVICE], allocations.live[HOST]
    measurement = observe(schedule, state, allocations, device.kernels, executor.communicator)
    compare(schedule, measurement, base, host_base)
    problems = verify(
        schedule.rows,
        schedule.offsets,
        previous=program[schedule.previous].rows,
        extent=program.reserved_bytes,
        host_extent=program.host_bytes,
    )
    if problems:
        raise VerificationError(f"schedule {schedule.name!r}: {problems[0]} (and {len(problems) - 1} more)")
    return measurement, state


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


def _copy_state(executor: Executor, allocations: Allocations) -> dict[Buffer, Bytes]:
    """Every persistent buffer as an allocation of its own, with its present contents; pinned slots are left poisoned."""
    persistent = executor.program.persistent
    state = {}
    held = set(persistent.state_buffers)
    for buffer in (*persistent.buffers, *persistent.host_buffers):
        array = state[buffer] = allocations.allocate(buffer)
        if buffer in held:
            allocations.move(array[: buffer.nbytes], executor.device.get(executor.view(buffer.whole)))
    return state


def _run_in_fresh_slab(
    executor: Executor,
    fill: Fill,
    name: str,
    x: NDArray[Any],
    y: NDArray[Any],
    expected: Mapping[Buffer, Bytes],
    *,
    timed: bool,
) -> float:
    """Run a schedule once in a fresh slab: same bits as ``expected``, no byte touched behind the slab. Returns the virtual
    seconds of a second run that follows it, if ``timed``, else 0."""
    program = executor.program
    persistent = program.persistent
    device = EmulatedDevice(seed=1, kernels=executor.device.kernels)  # in another order than the step's own
    twin = executor.twin(device)
    for buffer in persistent.state_buffers:
        device.put(twin.view(buffer.whole), executor.device.get(executor.view(buffer.whole)))
    fill(name, twin.slot_bytes(persistent.slot), x, y)
    twin.slot_bytes(persistent.other_slot)[:] = twin.slot_bytes(persistent.slot)
    twin.run(name)
    device.synchronize()
    _require_same(name, [b for b in persistent.state_buffers if _differs(twin, b, expected)])
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
    executor: Executor, fill: Fill, name: str, x: NDArray[Any], y: NDArray[Any], expected: Mapping[Buffer, Bytes]
) -> float:
    """On a GPU: run a schedule once in the slab there is, compare its bits with ``expected``, and put the state back.

    Returns the seconds it took. The driver has given the slab exactly the bytes reserved, so a byte touched behind them
    would be an error of its own.
    """
    device, persistent = executor.device, executor.program.persistent
    before = {buffer: device.get(executor.view(buffer.whole)) for buffer in persistent.state_buffers}
    batch = executor.slot_bytes((persistent.slot, persistent.other_slot)[executor.slot()])
    batch[:] = 0xFF  # as in the copy: what lies between labels and pixels travels, too
    fill(name, batch, x, y)
    device.synchronize()
    start = device.seconds()
    executor.run(name)
    device.synchronize()
    seconds = device.seconds() - start
    differing = [buffer for buffer in before if _differs(executor, buffer, expected)]
    for buffer, contents in before.items():
        device.put(executor.view(buffer.whole), contents)
    _require_same(name, differing)
    return seconds


def _differs(executor: Executor, buffer: Buffer, expected: Mapping[Buffer, Bytes]) -> bool:
    """Whether a buffer in the slab holds other bits than the one in an allocation of its own."""
    wanted = expected[buffer][: buffer.nbytes]
    wanted = wanted if isinstance(wanted, np.ndarray) else executor.device.get(wanted)
    return not np.array_equal(executor.device.get(executor.view(buffer.whole)), wanted)


def _require_same(name: str, differing: list[Buffer]) -> None:
    if differing:
        raise VerificationError(
            f"schedule {name!r}: {differing[0].name!r} differs between the slab and one allocation a buffer"
        )
