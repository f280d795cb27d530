"""Which executor runs a program: by its allocator, its device, and whether its steps are captured."""

from __future__ import annotations

from minidnn.device.base import Device
from minidnn.executor import Executor
from minidnn.parallel.communicator import Communicator
from minidnn.profiles import Profile
from minidnn.schedule.program import Program


def make_executor(
    program: Program, device: Device, gpu: Profile, precision: str, *, allocator: str, memory: int | None,
    communicator: Communicator | None, capture: str,
) -> Executor:  # fmt: skip
    """The executor of an allocator; with CUDA graphs where the device can capture, unless ``capture`` is off."""
    if allocator == "pool":
        from minidnn.pool_executor import PoolExecutor

        return PoolExecutor(program, device, gpu, precision, memory)
    if hasattr(device, "capture") and capture != "off":
        from minidnn.capture import CapturingExecutor

        return CapturingExecutor(program, device, gpu, precision, communicator=communicator)
    return Executor(program, device, gpu, precision, communicator=communicator)
