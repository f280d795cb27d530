"""Autotuning: run the engines that cuDNN offers for a convolution direction or a matrix product and take the fastest.

What it finds depends on the clock, so it may differ from run to run, and the bits with it: a recipe records it. Operands and
workspace are allocated for the measurement and given back, so it belongs before a slab is opened.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import statistics
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from minidnn.errors import UserError
from minidnn.kernels.cuda_conv import bind_engine
from minidnn.kernels.cuda_launch import Launcher
from minidnn.kernels.cudnn import Cudnn
from minidnn.kernels.problem import OWN, SPLIT, Convolution, Problem, Product, operand_shapes, split
from minidnn.schedule.recipe import Engine

MOST_CANDIDATES = 16
TIMED_RUNS = 5
GAIN = 0.97  # a later candidate must be this much faster: below lies the spread of the clock
HOPELESS = 1.3  # times as slow as the best so far: one run tells enough
BLOCK_ELEMENTS = 1 << 18


class EngineCache:
    """Engines measured before, in a JSON file for one GPU, cuDNN and frontend: ``folder/<what>.json``.

    A file that cannot be read or written only costs the measuring. It never holds more than engines and their bytes.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self._path = folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', what)}.json"
        self._found: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            data = json.loads(self._path.read_text(encoding="utf-8"))
            self._found = data if isinstance(data, dict) else {}

    def get(self, key: str) -> Engine | None:
        """The engine of a problem, if it was measured before."""
        try:
            name, nbytes, options = self._found[key]
            return Engine(str(name), int(nbytes), tuple(sorted((str(k), int(v)) for k, v in options.items())))
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def put(self, key: str, engine: Engine) -> None:
        """Remember an engine, in the file as well: whole or not at all."""
        self._found[key] = [engine.name, engine.workspace_bytes, dict(engine.options)]
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            temporary.write_text(json.dumps(self._found, indent=1), encoding="utf-8")
            os.replace(temporary, self._path)


def cache_folder() -> Path:
    """Where engines are remembered: ``minidnn`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minidnn"


class Tuner:
    """Measures on one stream of the current device, that of the cuDNN handle. ``cache`` has what was measured before."""

    def __init__(self, cupy: Any, launcher: Launcher, stream: Any, cache: EngineCache | None = None) -> None:
        self._cache = cache
        self._cupy = cupy
        self._launcher = launcher
        self._cudnn: Cudnn = launcher.cudnn
        self._stream = stream
        self._found: dict[tuple[Problem, int | None], Engine] = {}

    def fastest(self, problem: Problem, workspace_limit: int | None, dtype: Any) -> Engine:
        """The fastest engine under the limit; our own kernel where cuDNN has none. Each problem is measured once."""
        key = (problem, workspace_limit)
        name = f"{tuple(problem)} {workspace_limit} {self._cudnn.restrictions}"
        if key not in self._found and (known := self._known(name, problem)) is not None:
            self._found[key] = known
        if key not in self._found:
            engine = best(self._measured(problem, workspace_limit, dtype))
            if engine == OWN and isinstance(problem, Product):
                engine = self._cudnn.select(problem, workspace_limit)
            elif engine == OWN and isinstance(problem, Convolution) and problem.direction == "forward_relu":
                engine = split(self.fastest(problem._replace(direction="forward"), workspace_limit, dtype))
            else:
                self._cudnn.keep_only(problem, engine)
            self._found[key] = engine
            if self._cache is not None:
                self._cache.put(name, engine)
        return self._found[key]

    def _known(self, name: str, problem: Problem) -> Engine | None:
        """An engine of the cache that this cuDNN still builds with the workspace it had."""
        engine = None if self._cache is None else self._cache.get(name)
        if engine is not None and engine.name == "cublas":
            return engine if self._cudnn.blas is not None else None
        if engine is None or not engine.name.startswith("cudnn"):
            return engine
        options = dict(engine.options)
        if options.pop(SPLIT, None) and isinstance(problem, Convolution):
            problem = problem._replace(direction="forward")
        try:
            return engine if self._cudnn.plan(problem, options).workspace_bytes == engine.workspace_bytes else None
        except UserError:
            return None

    def _measured(self, problem: Problem, workspace_limit: int | None, dtype: Any) -> Iterator[tuple[Engine, float]]:
        memory = {number: self._random(shape, dtype) for number, shape in operand_shapes(problem).items()}
        pointers = {number: int(block.ptr) for number, block in memory.items()}
        others, least = list(self._cudnn.others(problem, workspace_limit)), math.inf
        offered = (engine for engine in self._cudnn.engines(problem, workspace_limit) if engine not in others)
        for engine in (*others, *islice(offered, MOST_CANDIDATES)):
            try:
                workspace = self._cupy.cuda.Memory(engine.workspace_bytes) if engine.workspace_bytes else None
            except (self._cupy.cuda.runtime.CUDARuntimeError, MemoryError):
                continue
            run = bind_engine(
                self._launcher, problem, dict(engine.options), pointers, 0 if workspace is None else int(workspace.ptr)
            )
            seconds = self._seconds(run, least)
            least = min(least, seconds)
            yield engine, seconds

    def _random(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Memory full of normal numbers: on zeros some engines are faster than on any real batch."""
        runtime, size = self._cupy.cuda.runtime, math.prod(shape)
        block = np.random.default_rng(0).standard_normal(min(size, BLOCK_ELEMENTS), np.float32).astype(dtype)
        memory = self._cupy.cuda.Memory(size * block.itemsize)
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
        run()
        times: list[float] = []
        for _ in range(TIMED_RUNS):
            begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
            begin.record(self._stream)
            run()
            end.record(self._stream)
            end.synchronize()
            times.append(float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1e3)
            if times[0] > HOPELESS * least:
                break
        return statistics.median(times)


def best(measured: Iterator[tuple[Engine, float]]) -> Engine:
    """The fastest engine; of equally fast ones the first. Our own where there is none."""
    chosen, least = OWN, math.inf
    for engine, seconds in measured:
        if seconds < least * GAIN:
            chosen, least = engine, seconds
    return chosen
