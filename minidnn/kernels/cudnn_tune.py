"""Autotuning: run the engines that cuDNN offers for a convolution direction or a matrix product and take the fastest.

What it finds depends on the clock, so it may differ from run to run, and the bits with it: a recipe records it. Operands and
workspace are allocated for the measurement and given back, so it belongs before a slab is opened: at any time those of one
problem and one engine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidnn.errors import UserError
from minidnn.kernels.cuda_conv import bind_engine, workspace_bytes
from minidnn.kernels.cuda_launch import Launcher
from minidnn.kernels.cudnn import Cudnn
from minidnn.kernels.engine_cache import EngineCache
from minidnn.kernels.problem import OWN, SPLIT, Convolution, Problem, Product, operand_shapes, own, result_of, split
from minidnn.schedule.recipe import Engine
from minidnn.spec import TensorSpec, round_up

SEARCH = 5
"""Number of these rules: what was found by others is not taken from the cache."""
MOST_CANDIDATES = 16
TIMED_RUNS = 5
GAIN = 0.97  # of the time of another: what is not faster by this is as fast, by the spread of the clock
HOPELESS = 1.3  # times as slow as the best so far: one run tells enough
PATIENCE = 5
"""Candidates in a row that are hopeless: those after them, which the heuristics think slower, are not tried."""
PATIENCE_SECONDS = 0.5
"""That hopeless candidates in a row may run altogether. (Some engines for true fp32 take seconds for a layer of VGG-16.)"""
SINGLE_ERROR = 1e-4  # ten times what sums in another order cost, a third of what rounding to TF32 does
LOADING_SECONDS = 0.1  # that a first run may take for its modules
BLOCK_ELEMENTS = 1 << 18
ALLOCATED = 2 << 20  # what a driver's allocation is rounded up to
ROOM_STEP = 64 << 20
"""Of what is left for workspace: it is measured and varies by some bytes, and engines shall be found in the cache again."""


class SingleCheck:
    """Whether engines compute in single precision, as they are asked to: some round to TF32 although tensor cores are barred.

    What cuBLAS finds in its default arithmetic is what the others are compared with, or a split convolution, which has been
    compared before; without either all are taken at their word.
    """

    def __init__(self) -> None:
        self._known: NDArray[np.float32] | None = None

    def agrees(self, engine: Engine, found: NDArray[np.float32]) -> bool:
        """``found``: what the engine has computed."""
        if self._known is None:
            self._known = found if engine.name == "cublas" or SPLIT in dict(engine.options) else None
            return True
        return float(np.linalg.norm(found - self._known)) <= SINGLE_ERROR * float(np.linalg.norm(self._known))


class Tuner:
    """Measures on one stream of the current device, that of the cuDNN handle. ``cache`` has what was measured before."""

    def __init__(self, cupy: Any, launcher: Launcher, stream: Any, cache: EngineCache | None = None) -> None:
        self._cache = cache
        self._cupy = cupy
        self._launcher = launcher
        self._cudnn: Cudnn = launcher.cudnn
        self._stream = stream
        self._found: dict[tuple[Problem, int | None], Engine] = {}

    def fastest(self, problem: Problem, workspace_limit: int | None, dtype: Any, room: int | None = None) -> Engine:
        """The fastest engine under the limit; our own kernel where cuDNN has none. Each problem is measured once.

        ``room``: bytes that the search itself may take, if they are bounded. Where they are too few for the operands nothing is
        measured, and the heuristics choose.
        """
        if room is not None:
            left = room - sum(_allocated(shape, problem.dtype) for shape in operand_shapes(problem).values())
            if left < 0:
                return self._cudnn.select(problem, workspace_limit)
            left -= left % ROOM_STEP
            workspace_limit = left if workspace_limit is None else min(workspace_limit, left)
        key = (problem, workspace_limit)
        name = f"{SEARCH} {tuple(problem)} {workspace_limit} {self._cudnn.restrictions}"
        if key not in self._found and (known := self._known(name, problem)) is not None:
            self._found[key] = known
        if key not in self._found:
            others = list(self._split(problem, workspace_limit, dtype))
            engine = best(self._measured(problem, workspace_limit, dtype, others))
            if engine == OWN and isinstance(problem, Product):
                engine = self._cudnn.select(problem, workspace_limit)
            elif engine == OWN:
                engine = own(problem)
            self._cudnn.keep(problem, engine)
            self._found[key] = engine
            if self._cache is not None:
                self._cache.put(name, engine)
        return self._found[key]

    def _known(self, name: str, problem: Problem) -> Engine | None:
        """An engine of the cache that this cuDNN still builds with the workspace it had."""
        engine = None if self._cache is None else self._cache.get(name)
        if engine is None or engine.name.startswith(OWN.name):
            return engine
        try:
            nbytes = workspace_bytes(self._launcher, problem, dict(engine.options))
        except UserError:
            return None
        return engine if nbytes == engine.workspace_bytes else None

    def _split(self, problem: Problem, workspace_limit: int | None, dtype: Any) -> Iterator[Engine]:
        """For a convolution with bias and ReLU that of the convolution alone, if a library has one."""
        if isinstance(problem, Convolution) and problem.direction == "forward_relu":
            engine = self.fastest(problem._replace(direction="forward"), workspace_limit, dtype)
            if engine != OWN:
                yield split(engine)

    def _measured(
        self, problem: Problem, workspace_limit: int | None, dtype: Any, others: list[Engine]
    ) -> Iterator[tuple[Engine, float]]:
        """Every engine that has room, with its time, beginning with ``others`` and those that cuDNN's heuristics do not name.

        The operands are given back at the end, however that comes.
        """
        others, least = [*others, *self._cudnn.others(problem, workspace_limit)], math.inf
        offered = islice(self._cudnn.offered(problem, workspace_limit), MOST_CANDIDATES)
        memory: dict[int, Any] = {}
        try:
            for number, shape in operand_shapes(problem).items():
                memory[number] = self._random(shape, dtype)
            pointers = {number: int(block.ptr) for number, block in memory.items()}
            behind = -len(others)  # candidates of the heuristics' order in a row that were far behind
            wasted = 0.0  # their seconds
            single = SingleCheck() if self._cudnn.single else None
            for engine in chain(others, offered):
                seconds = self._timed(problem, engine, pointers, least)
                if seconds is None or (single and not single.agrees(engine, self._result(problem, memory))):
                    continue
                yield engine, seconds
                hopeless = seconds > HOPELESS * least
                behind = behind + 1 if behind < 0 or hopeless else 0
                wasted = wasted + seconds if hopeless else 0.0
                least = min(least, seconds)
                if behind == PATIENCE or (behind > 0 and wasted > PATIENCE_SECONDS):
                    break
        finally:  # a traceback that is kept would keep the operands
            memory.clear()

    def _timed(self, problem: Problem, engine: Engine, pointers: Mapping[int, int], least: float) -> float | None:
        """The time of an engine, in a workspace that is given back before the next one's is taken; None if there is no room."""
        workspace: Any = None
        try:
            if engine.workspace_bytes:
                workspace = self._cupy.cuda.Memory(engine.workspace_bytes)
        except (self._cupy.cuda.runtime.CUDARuntimeError, MemoryError):
            return None
        try:
            address = 0 if workspace is None else int(workspace.ptr)
            return self._seconds(bind_engine(self._launcher, problem, dict(engine.options), pointers, address), least)
        finally:  # a traceback that is kept would keep it
            workspace = None

    def _result(self, problem: Problem, memory: Mapping[int, Any]) -> NDArray[np.float32]:
        """The first numbers of what an engine has just computed."""
        number = result_of(problem)
        found = np.empty(min(math.prod(operand_shapes(problem)[number]), BLOCK_ELEMENTS), np.float32)
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(
            found.ctypes.data, memory[number].ptr, found.nbytes, runtime.memcpyDeviceToHost, self._stream.ptr
        )
        self._stream.synchronize()
        return found

    def _random(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Memory full of normal numbers: on zeros some engines are faster than on any real batch."""
        runtime, size = self._cupy.cuda.runtime, math.prod(shape)
        block = np.random.default_rng(0).standard_normal(min(size, BLOCK_ELEMENTS), np.float32).astype(dtype)
        try:
            memory = self._cupy.cuda.Memory(size * block.itemsize)
        except (self._cupy.cuda.runtime.CUDARuntimeError, MemoryError):
            raise UserError(
                f"the search for the fastest engines needs {size * block.itemsize} bytes for a tensor {shape}, and "
                f"{self._cupy.cuda.runtime.memGetInfo()[0]} are free; give a smaller batch or a --recipe, or end what else "
                "runs there"
            ) from None
        stream, whole, filled = self._stream.ptr, size * block.itemsize, block.nbytes
        runtime.memcpyAsync(memory.ptr, block.ctypes.data, filled, runtime.memcpyHostToDevice, stream)
        while filled < whole:
            nbytes = min(filled, whole - filled)
            runtime.memcpyAsync(memory.ptr + filled, memory.ptr, nbytes, runtime.memcpyDeviceToDevice, stream)
            filled += nbytes
        self._stream.synchronize()
        return memory

    def _seconds(self, run: Any, least: float) -> float:
        """Median time of a run, after one that loads its modules; of one run alone if that is far from ``least``."""
        first = self._once(run)
        if first > HOPELESS * least + LOADING_SECONDS:
            return first
        times: list[float] = []
        for _ in range(TIMED_RUNS):
            times.append(self._once(run))
            if times[0] > HOPELESS * least:
                break
        return statistics.median(times)

    def _once(self, run: Any) -> float:
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        begin.record(self._stream)
        run()
        end.record(self._stream)
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1e3


def best(measured: Iterator[tuple[Engine, float]]) -> Engine:
    """Of the engines within ``GAIN`` of the fastest the first with the least workspace; our own where there is none."""
    found = list(measured)
    least = min((seconds for _, seconds in found), default=0.0)
    return min((engine for engine, seconds in found if seconds * GAIN <= least), key=_workspace, default=OWN)


def _allocated(shape: tuple[int, ...], dtype: str) -> int:
    return round_up(TensorSpec(shape, dtype).nbytes, ALLOCATED)


def _workspace(engine: Engine) -> int:
    return engine.workspace_bytes
