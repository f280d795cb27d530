"""Autotuning: run the engines that cuDNN offers for a convolution direction and take the fastest.

What it finds depends on the clock, so it may differ from run to run, and the bits with it: a recipe records it. Operands and
workspace are allocated for the measurement and given back, so it belongs before a slab is opened.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

from minidnn.kernels.cudnn import OWN, Convolution, Cudnn, operand_shapes, split
from minidnn.schedule.recipe import Engine

MOST_CANDIDATES = 16
TIMED_RUNS = 5
GAIN = 0.97  # a later candidate must be this much faster: below lies the spread of the clock
BLOCK_ELEMENTS = 1 << 18


class Tuner:
    """Measures on one stream of the current device, that of the cuDNN handle."""

    def __init__(self, cupy: Any, cudnn: Cudnn, stream: Any) -> None:
        self._cupy = cupy
        self._cudnn = cudnn
        self._stream = stream
        self._found: dict[tuple[Convolution, int | None], Engine] = {}

    def fastest(self, problem: Convolution, workspace_limit: int | None, dtype: Any) -> Engine:
        """The fastest engine under the limit; our own kernel where cuDNN has none. Each problem is measured once."""
        key = (problem, workspace_limit)
        if key not in self._found:
            engine = best(self._measured(problem, workspace_limit, dtype))
            if engine == OWN and problem.direction == "forward_relu":
                engine = split(self.fastest(problem._replace(direction="forward"), workspace_limit, dtype))
            else:
                self._cudnn.keep_only(problem, engine)
            self._found[key] = engine
        return self._found[key]

    def _measured(
        self, problem: Convolution, workspace_limit: int | None, dtype: Any
    ) -> Iterator[tuple[Engine, float]]:
        memory = {number: self._random(shape, dtype) for number, shape in operand_shapes(problem).items()}
        pointers = {number: int(block.ptr) for number, block in memory.items()}
        for count, engine in enumerate(self._cudnn.engines(problem, workspace_limit)):
            if count == MOST_CANDIDATES:
                return
            try:
                workspace = self._cupy.cuda.Memory(engine.workspace_bytes) if engine.workspace_bytes else None
            except (self._cupy.cuda.runtime.CUDARuntimeError, MemoryError):
                continue
            plan = self._cudnn.plan(problem, dict(engine.options))
            run = self._cudnn.run(plan, pointers, 0 if workspace is None else int(workspace.ptr))
            yield engine, self._seconds(run)

    def _random(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Memory full of normal numbers: on zeros some engines are faster than on any real batch."""
        runtime, size = self._cupy.cuda.runtime, math.prod(shape)
        block = np.random.default_rng(0).standard_normal(min(size, BLOCK_ELEMENTS), np.float32).astype(dtype)
        memory = self._cupy.cuda.Memory(size * block.itemsize)
        for first in range(0, size, block.size):
            nbytes = min(block.size, size - first) * block.itemsize
            target = memory.ptr + first * block.itemsize
            runtime.memcpyAsync(target, block.ctypes.data, nbytes, runtime.memcpyHostToDevice, self._stream.ptr)
        self._stream.synchronize()
        return memory

    def _seconds(self, run: Any) -> float:
        """Median time of a run, after one that loads its modules."""
        run()
        times = []
        for _ in range(TIMED_RUNS):
            begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
            begin.record(self._stream)
            run()
            end.record(self._stream)
            end.synchronize()
            times.append(float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1e3)
        return statistics.median(times)


def best(measured: Iterator[tuple[Engine, float]]) -> Engine:
    """The fastest engine; of equally fast ones the first. Our own where there is none."""
    chosen, least = OWN, math.inf
    for engine, seconds in measured:
        if seconds < least * GAIN:
            chosen, least = engine, seconds
    return chosen
