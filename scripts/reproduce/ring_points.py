"""Points of the ring reproduction: what is measured, how a group of processes is started for it, and what it must not take."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import models
from minidnn.errors import UserError
from minidnn.layers import Graph
from minidnn.metrics import write_json
from minidnn.schedule.ranks import share

ROOT = Path(__file__).resolve().parents[2]
WORKERS = {"ddp": "ring_ddp.py"}
"""Programs that measure a strategy which is not ours; all others are measured by ``ring_worker.py``."""

SHAPES = {"lenet": (28, 1, 10), "cifar_quick": (32, 3, 10)}
"""Image size, channels and classes of the data a net was published for; else ImageNet's."""


class Point(NamedTuple):
    """One measurement. ``batch``: of all ranks together. ``strategy``: one of ours, ``none`` (every rank trains alone, all at
    once: what a step takes beside its neighbours, without any exchange), ``ddp`` (PyTorch), or ``links``. ``capture``: of
    ``minidnn.compile``; "" of what is not ours."""

    net: str
    batch: int
    ranks: int
    strategy: str
    capture: str = ""

    @property
    def key(self) -> str:
        """Its name in the cache."""
        how = f" capture={self.capture}" * bool(self.capture)
        return f"{self.net} {self.batch} {self.ranks} {self.strategy}{how}"

    @property
    def local(self) -> int:
        """Samples of rank 0, which has the largest share."""
        part = share(self.batch, 0, self.ranks)
        return int(part.stop) - int(part.start)


def build(net: str, batch: int) -> Graph:
    """The net at the shapes of its data."""
    size, channels, classes = SHAPES.get(net, (224, 3, 1000))
    return models.build(net, batch=batch, image_size=size, in_channels=channels, classes=classes)


class Group(NamedTuple):
    """How processes are started, and what all their points have in common (``settings``, for the worker). ``deadline``: of
    ``time.time``, after which neither a process nor a point is begun."""

    launcher: Sequence[str]
    settings: Mapping[str, Any]
    point_seconds: float
    environ: Mapping[str, str]
    deadline: float = math.inf

    def measure(self, points: Sequence[Point]) -> Generator[tuple[Point, dict[str, Any]]]:
        """Measure points of one number of ranks and one worker, and give each result as soon as it is there.

        A point that takes too long, or kills its processes, is given as ``{"failed": reason}``; new ones do the rest. One that
        would begin after the deadline is not given. Close it where it is left early: processes under way end with it.
        """
        left = list(points)
        while left and time.time() < self.deadline:
            with closing(self._run(left)) as found:
                for point, result in found:
                    left.remove(point)
                    yield point, result

    def _run(self, points: Sequence[Point]) -> Generator[tuple[Point, dict[str, Any]]]:
        by_key, begun, seen, reason, patience = {point.key: point for point in points}, points[0], 0, "", 0.0
        with tempfile.TemporaryDirectory() as folder:
            asked, out, log = (Path(folder) / name for name in ("asked.json", "out.jsonl", "log.txt"))
            out.touch()
            write_json(asked, {"points": points, "out": str(out), "deadline": self.deadline, **self.settings})
            worker = Path(__file__).parent / WORKERS.get(points[0].strategy, "ring_worker.py")
            command = [*self.launcher, "-n", str(points[0].ranks), sys.executable, str(worker), str(asked)]
            environ = {**self.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            with log.open("w", encoding="utf-8") as errors:
                process = subprocess.Popen(command, env=environ, stdout=errors, stderr=errors, start_new_session=True)
            try:
                until = time.monotonic() + self.point_seconds
                while True:
                    ended = process.poll() is not None
                    for line in out.read_text(encoding="utf-8").splitlines()[seen:]:
                        seen += 1
                        entry = json.loads(line)
                        begun, until = by_key[entry["key"]], time.monotonic() + self.point_seconds
                        if "result" in entry:
                            yield begun, entry["result"]
                            by_key.pop(begun.key)
                    if ended or not by_key:
                        break
                    if time.monotonic() > until:
                        reason = f"stopped after {self.point_seconds:g} s"
                        break
                    time.sleep(0.05)
                patience = 0.0 if reason else 10.0  # none after an interruption, either
            finally:
                end(process, patience)
            if process.returncode == 0 and time.time() >= self.deadline:
                return  # what is left would have begun too late
            text = [line for line in log.read_text(encoding="utf-8").splitlines() if "rror" in line]
            reason = reason or (text or [f"exit code {process.returncode}"])[0].strip()[:300]
            for point in [begun] if seen and begun.key in by_key else [] if seen else list(by_key.values()):
                yield point, {"failed": reason}  # all of them where not even the first one was begun


def end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Wait for a launcher; then end it and all that it has started."""
    for number, seconds in ((0, patience), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def free_port() -> int:
    """A port on which ranks of this computer can meet."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def find_launcher(given: str | None) -> list[str]:
    """The words that start processes, up to ``-n``. Raises UserError where there is no mpiexec."""
    if given is not None:
        return given.split()
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if (found := shutil.which("mpiexec", path=beside)) is None:
        raise UserError("there is no mpiexec: pip install 'minidnn-layup[mpi]', or name one with --launcher")
    return [found]


def environment(threads: int) -> dict[str, str]:
    """For the processes. Open MPI is told to let root in, to start more ranks than cores, and to bind none to a core."""
    root = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        root |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    folders = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts" / "reproduce")]
    return root | {"PYTHONPATH": os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])}
