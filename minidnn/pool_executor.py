"""PoolExecutor: the same rows on a memory pool like CuPy's instead of a planned slab, on both devices.

``--allocator pool``: every ALLOC row takes a block from the pool and every FREE row gives it back; rows run one after another
on one stream, since a pool cannot know what other streams still read. It shows what planning saves: live, used and held bytes
differ. It does not overlap copies with computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from minidnn.device.base import Array, Device, Event
from minidnn.device.pool import PinnedPoolModel, PoolModel, PoolOutOfMemory
from minidnn.errors import DoesNotFit
from minidnn.executor import BATCHES_IN_FLIGHT, BoundSchedule, Executor
from minidnn.profiles import Profile
from minidnn.schedule.instruction import COMPUTE, DEVICE, HOST, RESULT, Buffer, Instruction, Op, Value
from minidnn.schedule.program import Program
from minidnn.schedule.simulate import row_seconds
from minidnn.schedule.text import human_bytes
from minidnn.spec import BLOCK_BYTES, TensorSpec


def runs_in(program: Program, limit: int) -> bool:
    """Whether the pool model, with this limit, serves all schedules one after another, twice: in the second round it is
    fragmented by the first."""
    pool = PoolModel(limit)
    try:
        for buffer in program.persistent.buffers:
            pool.malloc(buffer.footprint)
        for schedule in (*program.schedules.values(), *program.schedules.values()):
            blocks: dict[Buffer, int] = {}
            for row in schedule.rows:
                if row.buffer is not None and row.buffer.space == DEVICE:
                    if row.op is Op.ALLOC:
                        blocks[row.buffer] = pool.malloc(row.buffer.footprint)
                    else:
                        pool.free(blocks.pop(row.buffer))
    except PoolOutOfMemory:
        return False
    return True


def require_pool_fit(program: Program, limit: int) -> None:
    """Raise DoesNotFit, naming a limit that works, if the pool would run out of memory in some step."""
    if runs_in(program, limit):
        return
    low = program.peak_bytes // BLOCK_BYTES - 1  # blocks: certainly too few, and enough
    high = 2 * low
    while not runs_in(program, high * BLOCK_BYTES):
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if runs_in(program, middle * BLOCK_BYTES) else (middle, high)
    needed = high * BLOCK_BYTES
    profile = program.largest.profile
    raise DoesNotFit(
        f"the pool needs {needed} B ({human_bytes(needed)}) for this step, whose live bytes never exceed {program.peak_bytes} B: "
        f"the rest is lost to fragmentation; the limit is {limit} B; try --memory {needed}, or --allocator slab, which needs "
        f"{program.reserved_bytes} B",
        minimum_bytes=needed,
        minimum_host_bytes=program.host_bytes,
        row=profile.peak_text,
        residents=[(r.name, r.nbytes) for r in profile.residents_at_peak],
    )


class PoolExecutor(Executor):
    """See the module. ``pool`` and ``pinned_pool`` have the counters.

    Raises DoesNotFit if the pool would have to hold more than ``memory`` bytes. Schedules run in another order than
    ``runs_in`` tries could still fragment it further, and raise PoolOutOfMemory then.
    """

    def __init__(self, program: Program, device: Device, profile: Profile, precision: str, memory: int | None) -> None:
        if memory is not None:
            require_pool_fit(program, memory)
        super().__init__(program, device, profile, precision, reserve=False)
        made = getattr(device, "pools", _emulated_pools)
        self.pool: Any
        self.pinned_pool: Any
        self.pool, self.pinned_pool = made(memory)
        self._blocks: dict[Buffer, int] = {}
        for buffer in (*program.persistent.buffers, *program.persistent.host_buffers):
            self._allocate(buffer)

    def _pool(self, buffer: Buffer) -> Any:
        return self.pinned_pool if buffer.space == HOST else self.pool

    def _allocate(self, buffer: Buffer) -> None:
        self._blocks[buffer] = self._pool(buffer).malloc(buffer.footprint)

    def _free(self, buffer: Buffer) -> None:
        self._pool(buffer).free(self._blocks.pop(buffer))

    def view(self, value: Value, offsets: Mapping[Buffer, int] | None = None, *, slot: int = 0) -> Array:
        """The array of a value in the block that its buffer has now."""
        buffer = self._slots[value.buffer][slot] if value.buffer in self._slots else value.buffer
        return self._pool(buffer).array(self._blocks[buffer], value.offset, value.spec)

    def slot_bytes(self, buffer: Buffer) -> Array:
        """All bytes of a pinned slot."""
        return self._pool(buffer).array(self._blocks[buffer], 0, TensorSpec((buffer.footprint,), "uint8"))

    def bound(self, name: str) -> BoundSchedule:
        """Nothing is bound ahead: addresses change with every step. Holds the arrays of fetched gradients."""
        if name not in self._bound:
            self._bound[name] = BoundSchedule(self.program[name], [], {})
        return self._bound[name]

    def run(self, name: str) -> Event:
        """Run one schedule, row by row, and return a completed event."""
        bound = self.bound(name)
        parity = self._runs % BATCHES_IN_FLIGHT
        try:
            for row in bound.schedule.rows:
                self._step(row, bound, parity)
        except BaseException:
            for buffer in [buffer for buffer in self._blocks if not buffer.persistent]:
                self._free(buffer)  # a failed step leaves nothing behind
            raise
        end = self.device.submit(COMPUTE, None, (), 0.0, True)
        self.device.synchronize()
        self._runs += 1
        return end

    def _step(self, row: Instruction, bound: BoundSchedule, parity: int) -> None:
        if row.op is Op.ALLOC:
            assert row.buffer is not None
            self._allocate(row.buffer)
        elif row.op is Op.FREE:
            assert row.buffer is not None
            self._free(row.buffer)
        elif row.op is not Op.HOLD:
            self._launch(row, bound, parity)

    def _launch(self, row: Instruction, bound: BoundSchedule, parity: int) -> None:
        operands = [
            bound.results.setdefault(v.name, np.empty(v.spec.shape, v.spec.dtype))
            if v.buffer.space == RESULT
            else self.view(v, slot=parity)
            for v in (*row.writes, *row.reads)
        ]
        if row.kernel:
            scratch = None if row.workspace is None else self.view(row.workspace)
            work = self.device.kernel(row.kernel, operands, scratch, row.attrs, COMPUTE)
        else:
            work = self.device.copy(operands[0], operands[1], COMPUTE)
        seconds = row_seconds(row, self._profile, self._precision)
        event = self.device.submit(COMPUTE, work, (), seconds, False)
        if event is not None:  # the emulated device runs late; on a GPU the order of the stream is all that is needed
            self.device.wait(event)

    def close(self) -> None:
        """Give everything back to the pools, and the pools back."""
        super().close()
        for buffer in list(self._blocks):
            self._free(buffer)
        self.pool.free_all_blocks()


class _EmulatedPool(PoolModel):
    """The model, and beside it an array for each block, poisoned when it is taken."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(limit)
        self._bytes: dict[int, Array] = {}

    def malloc(self, nbytes: int, stream: str = COMPUTE) -> int:
        block = super().malloc(nbytes, stream)
        self._bytes[block] = np.full(nbytes, 0xFF, np.uint8)
        return block

    def free(self, block: int) -> None:
        super().free(block)
        del self._bytes[block]

    def array(self, block: int, offset: int, spec: TensorSpec) -> Array:
        """A view into a block."""
        return self._bytes[block][offset : offset + spec.nbytes].view(spec.dtype).reshape(spec.shape)


class _EmulatedPinnedPool(PinnedPoolModel):
    """The same of pinned memory."""

    def allocate(self, nbytes: int) -> Array:
        return np.empty(nbytes, np.uint8)

    def malloc(self, nbytes: int) -> int:
        block = super().malloc(nbytes)
        self.place(block).fill(0xFF)
        return block

    def array(self, block: int, offset: int, spec: TensorSpec) -> Array:
        """A view into a block."""
        part: Array = self.place(block)[offset : offset + spec.nbytes].view(spec.dtype).reshape(spec.shape)
        return part


def _emulated_pools(limit: int | None) -> tuple[_EmulatedPool, _EmulatedPinnedPool]:
    return _EmulatedPool(limit), _EmulatedPinnedPool()
