"""Starts programs under mpiexec, where there is one."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
REASON = "needs mpi4py and an MPI: pip install 'minidnn-layup[mpi]'"
MISSING = MPIEXEC is None or find_spec("mpi4py") is None


NO_TORCH = find_spec("torch") is None


class Ended(NamedTuple):
    """How a job ended, and how long it took."""

    code: int
    out: str
    err: str
    seconds: float


def torchrun(ranks: int, *command: str | Path, cwd: Path | None = None, timeout: float = 120) -> Ended:
    """Run a Python program on some ranks under PyTorch's launcher."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    started = time.monotonic()
    done = subprocess.run(
        [*words, *map(str, command)], capture_output=True, text=True, cwd=cwd, env=environ, timeout=timeout, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - started)


def _environ() -> dict[str, str]:
    """More ranks than there are cores if need be, and as root, too."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


def mpiexec(ranks: int, *command: str | Path, cwd: Path | None = None, timeout: float = 120) -> Ended:
    """Run a Python program on some ranks."""
    return _run(["-n", str(ranks), sys.executable, *map(str, command)], cwd, timeout)


def mpiexec_apart(*commands: tuple[str | Path, ...], cwd: Path, timeout: float = 60, **environ: str) -> Ended:
    """Run a Python program of its own on each rank, as where hosts differ."""
    words: list[str] = []
    for command in commands:
        words += [":"] * bool(words) + ["-n", "1", sys.executable, *map(str, command)]
    return _run(words, cwd, timeout, **environ)


def _run(words: list[str], cwd: Path | None, timeout: float, **environ: str) -> Ended:
    assert MPIEXEC is not None
    started = time.monotonic()
    done = subprocess.run(
        [MPIEXEC, *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=_environ() | environ,
        timeout=timeout,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - started)


@contextmanager
def launched(words: Sequence[str | Path], cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A launcher under way; what it printed is in ``out`` and ``err`` in ``cwd``. Ended by force if it is still there."""
    with (cwd / "out").open("w") as out, (cwd / "err").open("w") as err:
        process = subprocess.Popen([*map(str, words)], stdout=out, stderr=err, text=True, cwd=cwd, env=_environ())
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def processes(text: str) -> list[int]:
    """Processes with a text in their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if text.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found
