"""How a run on several ranks ends from outside (G3, G4): a signal to the launcher alone, and no memory at the beginning."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minidnn.checkpoint import Checkpoint
from tests.parallel.launching import MISSING, MPIEXEC, NO_TORCH, REASON, ROOT, launched, mpiexec, processes

PROGRAM = ROOT / "tests" / "parallel" / "train_tiny.py"
needs_mpi = pytest.mark.skipif(MISSING, reason=REASON)
needs_torch = pytest.mark.skipif(NO_TORCH, reason="needs PyTorch, which brings torchrun")
MPI = (str(MPIEXEC), "-n", "2", sys.executable)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OPTIONS = ("-a", "tiny", "-b", "4", "--epochs", "100000", "-p", "5", "--strategy", "ring_delayed")


@pytest.mark.parametrize(
    ("launcher", "number", "orderly"),
    [
        pytest.param(MPI, signal.SIGUSR1, 130, marks=needs_mpi),
        pytest.param(TORCHRUN, signal.SIGTERM, 1, marks=needs_torch),  # a code of its own
        pytest.param(MPI, signal.SIGINT, 0, marks=needs_mpi),  # Open MPI kills its ranks a moment later
    ],
)
def test_a_signal_to_the_launcher_leaves_a_whole_checkpoint_and_no_process(
    tmp_path: Path, launcher: tuple[str, ...], number: signal.Signals, orderly: int
) -> None:
    output, images = tmp_path / "run", 40_000 if orderly else 40
    awaited = output / ("metrics.jsonl" if orderly else "last.safetensors")
    words = (*launcher, PROGRAM, "--data", f"synthetic:{images},8,8,3,4", *OPTIONS, "--output", output)
    with launched(words, tmp_path) as process:
        deadline = time.monotonic() + 60
        while not (awaited.exists() and awaited.stat().st_size) and time.monotonic() < deadline:
            assert process.poll() is None, (tmp_path / "err").read_text()
            time.sleep(0.05)
        assert len(processes(str(output))) >= 3
        sent = time.monotonic()
        process.send_signal(number)
        code = process.wait(30)
    out, err = ((tmp_path / name).read_text() for name in ("out", "err"))
    while processes(str(output)) and time.monotonic() - sent < 10:
        time.sleep(0.05)
    assert processes(str(output)) == [] and time.monotonic() - sent < 10, err
    with Checkpoint(output / "last.safetensors") as checkpoint:
        progress = checkpoint.metadata.progress
        assert progress.steps > 0 and all(checkpoint[name] is not None for name in checkpoint)
    assert code == orderly or (not orderly and code)
    if orderly:
        assert f"interrupted in epoch 0 after batch {progress.batch} of 10000: saved" in out and progress.batch > 0


@needs_mpi
def test_a_rank_without_memory_at_the_beginning_ends_all_and_is_named_once(tmp_path: Path) -> None:
    ended = mpiexec(
        2, PROGRAM, "--harm", "1,-1,0", "--data", "synthetic:40,8,8,3,4", *OPTIONS, cwd=tmp_path, timeout=60
    )
    assert ended.code == 5 and ended.seconds < 30 and os.listdir(tmp_path) == []
    assert ended.err.count("error: rank 1 failed: MemoryError: no bytes left") == ended.err.count("error: ") == 1


@needs_mpi
def test_the_check_for_several_gpus_runs_and_sees_what_is_left() -> None:
    program = ROOT / "scripts" / "gpu" / "ranks_train.py"
    words = (sys.executable, program, "--device", "emulated", "--only", "own_gpu", "killed")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    done = subprocess.run(words, capture_output=True, text=True, env=environ, timeout=120, check=False)
    assert done.returncode == 0, done
    own, killed = (json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines())
    assert [run["contexts"] for run in own["runs"]] == [[[0, "emulated", []], [1, "emulated", []]]] * 2
    assert killed["seconds"] < 10 and killed["code"] != 0
