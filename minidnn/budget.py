"""Budgets: read what the user asked for, and refuse before anything runs what does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from minidnn.errors import DoesNotFit, UserError
from minidnn.schedule.program import Program
from minidnn.schedule.text import human_bytes

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int, *, what: str = "memory", whole: Callable[[], int] | None = None) -> int:
    """Bytes of ``4GiB``, ``11441MiB``, ``500MB``, ``123456``, or of ``60%`` of ``whole()``. Raises UserError with the value."""
    if isinstance(text, int):
        if text < 1:
            raise UserError(f"{what}={text} is not a positive number of bytes")
        return text
    percent = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text)
    if percent and whole is not None:
        nbytes = int(whole() * float(percent[1]) / 100)
    else:
        match = _SIZE.fullmatch(text)
        if percent or match is None or match[2].lower() not in _UNITS:
            raise UserError(f"{what}={text!r} is no size; write 4GiB, 500MB, bytes, or 60% of what keep needs")
        nbytes = int(float(match[1]) * _UNITS[match[2].lower()])
    if nbytes < 1:
        raise UserError(f"{what}={text!r} is not a positive number of bytes")
    return nbytes


MODULE_BYTES = 64 << 20
"""Kernels that are compiled and modules of libraries that are loaded after a device was opened, at most: seen, 20 MiB."""

NODE_BYTES = 2 * 2048
"""Of a captured kernel: a node of a graph takes up to 2 KiB outside the slab, and as much again is kept for the graphs."""

LAYER_KERNELS = 8
"""Kernels of a layer in a training step, at most."""


class ProcessMemory(NamedTuple):
    """A bound on what the driver counts for a process, and what of that lies outside the slab."""

    limit: int
    outside_bytes: int

    @property
    def slab_bytes(self) -> int:
        """What is left for the slab."""
        return self.limit - self.outside_bytes

    def text(self) -> str:
        """What it says about a budget."""
        return (
            f"--process-memory {self.limit} B less {self.outside_bytes} B outside the slab: context, cuDNN, kernels and graphs, "
            "and what other processes hold on this GPU"
        )


def process_room(device: Any, limit: int) -> int:
    """What ``limit`` bytes for the process leave on an open GPU before there is a slab; may be below zero."""
    return limit - _outside(device)


def process_memory(device: Any, limit: int, layers: int, captured: bool) -> ProcessMemory:
    """What ``limit`` bytes for the process leave for a slab on an open GPU. Raises UserError where that is nothing.

    What is outside now is measured, kernels and graphs that will be made are estimated from above.
    """
    graphs = layers * LAYER_KERNELS * NODE_BYTES if captured else 0
    found = ProcessMemory(limit, _outside(device) + graphs)
    if found.slab_bytes <= 0:
        raise UserError(
            f"--process-memory {limit} leaves nothing for the slab: {found.outside_bytes} bytes lie outside it on {device.name} "
            f"(context, cuDNN, kernels and graphs, and what other processes hold there); give more than {found.outside_bytes}"
        )
    return found


def _outside(device: Any) -> int:
    """What lies outside the slab, and the modules that are still to be loaded."""
    return int(device.outside_bytes()) + MODULE_BYTES


def device_limit(device: Any, memory: int | None, process: ProcessMemory | None) -> int | None:
    """The budget of the slab: what was asked for, on a GPU no more than there is. None: no limit.

    Raises UserError for a budget above the free memory of a GPU.
    """
    free = getattr(device, "free_bytes", None)
    if free is not None and memory is not None and memory > free:
        raise UserError(
            f"--memory {memory} is above what is free on {device.name}: {free} bytes; give at most --memory {free}"
        )
    limits = [limit for limit in (memory, None if process is None else process.slab_bytes) if limit is not None]
    if free is not None and memory is None:
        limits.append(int(device.available_bytes))
    return min(limits, default=None)


def require_fit(
    program: Program, memory: int | None, host_memory: int | None, leaner: Callable[[], tuple[int, int | None]] | None,
    why: str = "",
) -> None:  # fmt: skip
    """Raise DoesNotFit, naming row, residents and a minimum that works, if the program exceeds a budget.

    ``why`` says where the device budget comes from, if not from the user. ``leaner`` returns ``(workspace limit, reserved
    bytes)`` of the leanest recipe, so that the message can offer it.
    """
    if host_memory is not None and program.host_bytes > host_memory:
        raise _refusal(
            program,
            f"pinned host memory: the step needs {program.host_bytes} B ({human_bytes(program.host_bytes)}), the host budget is "
            f"{host_memory} B; the smallest that runs is --host-memory {program.host_bytes}",
        )
    if memory is None or program.reserved_bytes <= memory:
        return
    short = program.reserved_bytes - memory
    schedule = program.largest
    largest = ", ".join(f"{r.label} {human_bytes(r.nbytes)}" for r in schedule.profile.residents_at_peak[:5])
    advice = [f"--memory {program.reserved_bytes}", f"a batch below {schedule.batch}", "--policy auto"]
    if leaner is not None:
        limit, reserved = leaner()
        if reserved is not None and reserved < program.reserved_bytes:
            fits = "would fit" if reserved <= memory else "needs less"
            advice.append(
                f"--workspace-limit {limit} ({human_bytes(reserved)}: {fits}, but another recipe means other bits)"
            )
    raise _refusal(
        program,
        f"the step needs {program.reserved_bytes} B ({human_bytes(program.reserved_bytes)}), the budget is {memory} B "
        f"({human_bytes(memory)}{'; ' * bool(why)}{why}), short by {short} B, at {schedule.profile.peak_text} of schedule "
        f"{schedule.name!r}; largest residents there: {largest}; the smallest budget that runs is {program.reserved_bytes} B; "
        f"try {', or '.join(advice)}",
    )


def _refusal(program: Program, message: str) -> DoesNotFit:
    profile = program.largest.profile
    return DoesNotFit(
        message,
        minimum_bytes=program.reserved_bytes,
        minimum_host_bytes=program.host_bytes,
        row=profile.peak_text,
        residents=[(r.name, r.nbytes) for r in profile.residents_at_peak],
    )
