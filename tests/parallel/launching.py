"""Starts programs under mpiexec, where there is one."""

import os
import shutil
import subprocess
import sys
import time
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


def mpiexec(ranks: int, *command: str | Path, cwd: Path | None = None, timeout: float = 120) -> Ended:
    """Run a Python program on some ranks, more than there are cores if need be."""
    assert MPIEXEC is not None
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    words = [MPIEXEC, "-n", str(ranks), sys.executable, *map(str, command)]
    started = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=environ, timeout=timeout, check=False)
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - started)
