"""Which executor runs a program: by its allocator, its device, and whether its steps are captured."""

from __future__ import annotations

from minidnn.device.base import Device
from minidnn.executor import Executor
from minidnn.parallel.communicator import Communicator
from minidnn.profiles import Profile
from minidnn.schedule.instruction import Op
from minidnn.schedule.program import Program

ROW_SECONDS = 10e-6
"""What the host needs to submit a row: 7 us for a kernel of ours, up to 25 for one of cuDNN's (on the host of an H200)."""


def launch_bound(program: Program) -> bool:
    """Whether submitting the rows of a training step takes longer than it is predicted to compute."""
    rows = sum(row.op not in (Op.ALLOC, Op.FREE) for row in program["train"].rows)
    return rows * ROW_SECONDS > program.prediction.step_seconds


def make_executor(
    program: Program, device: Device, gpu: Profile, precision: str, allocator: str, memory: int | None,
    communicator: Communicator | None = None, capture: str = "auto",
) -> Executor:  # fmt: skip
    """The executor of an allocator; with CUDA graphs where ``capture`` and the communicator allow it.

    ``"auto"``: always on one rank; on several only where the host could not keep up, for beside NCCL's kernels the graph of a
    large net is slower than its rows are (ResNet-50 by ``ring_delayed`` on two H200: 18.1 ms against 16.0 alone).
    """
    if allocator == "pool":
        from minidnn.pool_executor import PoolExecutor

        return PoolExecutor(program, device, gpu, precision, memory)
    capturable = hasattr(device, "capture") and (communicator is None or communicator.capturable)
    if capturable and capture == "auto" and communicator is not None and communicator.size > 1:
        capture = communicator.exchange("on" if launch_bound(program) else "off")[0]  # on all ranks or on none
    if capturable and capture != "off":
        from minidnn.capture import CapturingExecutor

        return CapturingExecutor(program, device, gpu, precision, communicator=communicator)
    return Executor(program, device, gpu, precision, communicator=communicator)
