"""Predicted and measured memory are equal to the byte, and the measurement notices whatever is wrong.

The measurement observes when arrays die and never looks at FREE rows, so a schedule with one FREE row too late, a kernel that
keeps a reference, and a kernel that writes behind the slab must all be caught by ``verify``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import minidnn
import models
from minidnn.device.emulated import GUARD_BYTES, EmulatedDevice
from minidnn.errors import VerificationError
from minidnn.kernels import numpy_kernels
from minidnn.layers import Graph
from minidnn.measure import measure_schedule
from minidnn.schedule.instruction import COMPUTE, DEVICE, Instruction, Op
from minidnn.step import CompiledStep
from tests.step import nets

SMALLEST = {"lenet": 16, "lenet5": 28, "cifar_quick": 8, "alexnet": 63, "alexnet_2012": 67}
LIGHT = ("lenet", "lenet5", "cifar_quick", "resnet20", "resnet32")


def model(name: str) -> Graph:
    """A model with its original channel widths on the smallest sensible images."""
    blocks = (2, 2, 2, 2) if name == "resnet" else None
    size = SMALLEST.get(name, 8 if name.startswith("resnet") else 32)
    return models.build(name, batch=2, image_size=size, classes=10, blocks=blocks)


# -- every model ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", models.available())
def test_the_training_step_of_every_model_takes_the_predicted_bytes(name: str) -> None:
    step = minidnn.compile(model(name), optimizer=minidnn.SGD(lr=0.1))
    train = step.program["train"].profile
    measured, _ = measure_schedule(step.executor, step.fill_slot, "train", *nets.batch(step.graph))
    assert (measured.peak_bytes, measured.host_peak_bytes) == (train.peak_bytes, train.host_peak_bytes)
    step.close()


@pytest.mark.parametrize("plan", [minidnn.keep(), minidnn.naive()], ids=lambda plan: plan.policy)
@pytest.mark.parametrize("name", LIGHT)
def test_all_schedules_of_light_models_take_the_predicted_bytes(name: str, plan: minidnn.Plan) -> None:
    step = minidnn.compile(model(name), plan, nets.MOMENTUM, tail=1)
    before = nets.state(step)
    step.verify(*nets.batch(step.graph))
    assert step.measured.peak_bytes == step.profile.peak_bytes == step.program.peak_bytes
    assert step.measured.reserved_bytes == step.profile.reserved_bytes >= step.profile.peak_bytes
    assert step.measured.host_bytes == max(s.profile.host_peak_bytes for s in step.program.schedules.values())
    assert step.measured.step_seconds == pytest.approx(step.profile.step_seconds, rel=1e-9)
    assert nets.differing(before, nets.state(step)) == []
    step.close()


# -- mutations of the schedule ----------------------------------------------------------------------------------------
def later(rows: tuple[Instruction, ...], free: int) -> list[Instruction] | None:
    """Move a FREE row behind the next row that runs something; None if there is none."""
    after = next((i for i in range(free + 1, len(rows)) if rows[i].op not in (Op.ALLOC, Op.FREE)), None)
    return None if after is None else [*rows[:free], *rows[free + 1 : after + 1], rows[free], *rows[after + 1 :]]


def with_rows(step: CompiledStep, rows: list[Instruction]) -> CompiledStep:
    """The step with other training rows, all on one stream: they run in list order, and bits cannot tell them apart."""
    schedule = replace(step.program["train"], rows=tuple(row._replace(stream=COMPUTE, waits=()) for row in rows))
    return nets.rebuilt(step, replace(step.program, schedules={"train": schedule}), EmulatedDevice(seed=None))


@pytest.mark.parametrize("plan", [minidnn.keep(), minidnn.naive()], ids=lambda plan: plan.policy)
@pytest.mark.parametrize("net", [nets.residual, nets.dropout])
def test_every_free_row_that_is_dropped_or_one_row_late_fails(net: Callable[[], Graph], plan: minidnn.Plan) -> None:
    step = minidnn.compile(net(), plan)
    x, y = nets.batch(step.graph)
    rows = step.program["train"].rows
    with_rows(step, list(rows)).verify(x, y)
    frees = [i for i, row in enumerate(rows) if row.op is Op.FREE]
    delayed = [mutant for i in frees if (mutant := later(rows, i)) is not None]
    dropped = [[*rows[:i], *rows[i + 1 :]] for i in frees]
    assert len(dropped) >= 20 and (delayed or plan.policy == "naive")  # naive frees everything at the end
    for mutant in (*delayed, *dropped):
        with pytest.raises(
            VerificationError, match=r"schedule 'train', row \d+ .*measured \d+ live device bytes, predicted"
        ):
            with_rows(step, mutant).verify(x, y)


def test_a_wrong_prediction_of_the_peak_alone_fails() -> None:
    step = minidnn.compile(nets.chain())
    train = step.program["train"]
    profile = replace(train.profile, peak_bytes=train.profile.peak_bytes + 512)
    program = replace(step.program, schedules={"train": replace(train, profile=profile)})
    with pytest.raises(VerificationError, match=f"measured a peak of {train.profile.peak_bytes} bytes, predicted"):
        nets.rebuilt(step, program, EmulatedDevice()).verify(*nets.batch(step.graph))


# -- mutations of the kernels -----------------------------------------------------------------------------------------
class Kernels(ModuleType):
    """The NumPy kernels, with ``spy(name, operands)`` called after each."""

    def __init__(self, spy: Callable[[str, tuple[NDArray[Any], ...]], None]) -> None:
        super().__init__("kernels")
        self._spy = spy

    def __getattr__(self, name: str) -> Callable[..., None]:
        kernel, spy = getattr(numpy_kernels, name), self._spy

        def call(*operands: NDArray[Any], **attrs: Any) -> None:
            kernel(*operands, **attrs)
            spy(name, operands)

        return call


def whole(array: NDArray[Any]) -> NDArray[Any]:
    """The allocation that an array is a view of."""
    return array if array.base is None else whole(array.base)


def test_a_kernel_that_keeps_one_reference_fails_whichever_kernel_it_is() -> None:
    plain = minidnn.compile(nets.residual())
    x, y = nets.batch(plain.graph)
    rows = [row for row in plain.program["train"].rows if row.kernel]
    makers = {row.kernel for row in rows if any(not v.buffer.persistent for v in row.writes)}
    assert len(makers) >= 10
    for maker in sorted(makers):
        kept: list[NDArray[Any]] = []

        def keep(name: str, operands: tuple[NDArray[Any], ...], maker: str = maker, kept: Any = kept) -> None:
            if name == maker:
                kept[:] = [operands[0]]  # of its last call only

        step = nets.rebuilt(plain, plain.program, EmulatedDevice(kernels=Kernels(keep)))
        with pytest.raises(VerificationError, match="live device bytes, predicted"):
            step.verify(x, y)
        assert kept


def test_a_step_that_ends_badly_leaves_nothing_ignored_on_standard_error(root: Path) -> None:
    # destructors and finalizers run at odd times: here with work in flight, after a failure, and at exit
    script = """
import minidnn
from tests.step import nets
steps = [minidnn.compile(nets.residual(), allocator=allocator) for allocator in ("slab", "pool")]
for step in steps:
    step.verify(*nets.batch(step.graph))
    step.run(*nets.batch(step.graph))
del step
steps.pop(0)
raise SystemExit(int(steps[0].run(*nets.batch(steps[0].graph)).loss > 0))
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "")


def test_a_byte_written_behind_the_slab_is_seen() -> None:
    plain = minidnn.compile(nets.chain())
    reserved = plain.program.reserved_bytes

    def trespasser(at: int) -> EmulatedDevice:
        def write(name: str, operands: tuple[NDArray[Any], ...]) -> None:
            slab = whole(operands[0])
            if name == "relu_forward" and slab.nbytes == reserved + GUARD_BYTES:
                slab.view(np.uint8)[at] = 0

        return EmulatedDevice(kernels=Kernels(write))

    x, y = nets.batch(plain.graph)
    for at in (reserved, reserved + GUARD_BYTES - 1):
        with pytest.raises(VerificationError, match=f"touched byte {at} of a slab of {reserved} bytes"):
            nets.rebuilt(plain, plain.program, trespasser(at)).verify(x, y)


def test_a_kernel_that_writes_into_a_neighbour_changes_bits_and_fails() -> None:
    plain = minidnn.compile(nets.chain())
    reserved = plain.program.reserved_bytes
    weights = next(b for b in plain.program.persistent.buffers if b.space == DEVICE and b.nbytes)

    def write(name: str, operands: tuple[NDArray[Any], ...]) -> None:
        slab = whole(operands[0])
        if name == "relu_forward" and slab.nbytes == reserved + GUARD_BYTES:
            slab.view(np.uint8)[plain.program.persistent_offsets[weights]] ^= 1

    step = nets.rebuilt(plain, plain.program, EmulatedDevice(kernels=Kernels(write)))
    with pytest.raises(
        VerificationError, match=f"{weights.name!r} differs between the slab and one allocation a buffer"
    ):
        step.verify(*nets.batch(plain.graph))
