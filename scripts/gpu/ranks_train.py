"""train.py on several GPUs as its launcher and its user see it: python scripts/gpu/ranks_train.py

Each rank has a context on its own GPU alone, also where it goes on from a checkpoint. A rank without memory, one that is killed
and a signal to the launcher end all within 30 s; no process and no device memory is left.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

END_SECONDS = 30.0
LEFT_MIB = 64
"""What nvidia-smi may show more than before: it counts in steps, and others may use the GPUs."""
OPTIONS = ("--data", "synthetic:512,16,16,1,4", "-a", "lenet", "-b", "8", "--strategy", "ring_delayed", "-p", "5")


def contexts() -> list[int]:
    """The GPUs on which this process has a primary context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    driver.cuInit(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    found = []
    for index in range(count.value):
        driver.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active))
        found += [index] * bool(active.value)
    return found


def rank(mode: str, argv: list[str]) -> None:
    """One rank: train, and say which contexts there are. Mode ``full``: the last rank's GPU has no memory left."""
    import ranked
    import train
    from minidnn.commandline import run

    start, leave = ranked.start, ranked.leave
    held: list[Any] = []

    def full(args: Any) -> Any:
        team = start(args)
        if team is not None and team.rank == team.size - 1:
            if not team.device.startswith("cuda"):
                raise SystemExit("mode full needs GPUs")
            import cupy

            cupy.cuda.Device(int(team.device.removeprefix("cuda:"))).use()
            size = cupy.cuda.runtime.memGetInfo()[0]
            while size >= 1 << 20:
                try:
                    held.append(cupy.cuda.Memory(size))
                except (cupy.cuda.runtime.CUDARuntimeError, MemoryError):
                    size //= 2
        return team

    def told(team: Any, code: int) -> int:
        print("RANK" + json.dumps([team.rank, team.device, contexts()]), flush=True)
        return leave(team, code)

    if mode == "full":
        ranked.start = full
    ranked.leave = told
    sys.exit(run(train.main, argv))


class Case:
    """A launcher with its ranks, in a folder of its own."""

    def __init__(self, ranks: int, device: str, mode: str, folder: Path, *options: str) -> None:
        mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        words = torchrun if mpiexec is None else [mpiexec, "-n", str(ranks), sys.executable]
        environ = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        self.ranks, self.device, self.folder, self.passes_signals = ranks, device, folder, mpiexec is not None
        self.before = used()
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [*words, __file__, "--rank", mode, *OPTIONS, "--device", device, "--output", str(folder / "run"), *options],
                stdout=out, stderr=err, env=os.environ | environ,
            )  # fmt: skip

    def pids(self) -> list[int]:
        """The ranks."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes()
            except OSError:
                continue
            if (
                str(self.folder / "run").encode() in line
                and b"mpiexec" not in line
                and b"torch.distributed" not in line
            ):
                found.append(int(path.parent.name))
        return sorted(found)

    def until_trained(self) -> None:
        """Wait for the first figures of training."""
        log, deadline = self.folder / "run" / "metrics.jsonl", time.monotonic() + 200
        while not (log.exists() and log.stat().st_size):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"training did not begin: {self.err.read_text()[-2000:]}")
            time.sleep(0.05)

    def ended(
        self, since: float, code: Callable[[int], bool], *words: str, limit: float = END_SECONDS
    ) -> dict[str, Any]:
        """Whether all are gone in time, with this exit code, these words on the error stream, and no memory held."""
        got = self.process.wait(300)
        while self.pids() and time.monotonic() - since < limit:
            time.sleep(0.1)
        seconds = time.monotonic() - since
        time.sleep(1.0)
        more = max((now - then for now, then in zip(used(), self.before, strict=True)), default=0)
        err = self.err.read_text()
        passed = (
            code(got) and not self.pids() and seconds <= limit and more <= LEFT_MIB and all(w in err for w in words)
        )
        return {"passed": passed, "code": got, "seconds": seconds, "left_mib": more} | (
            {} if passed else {"err": err[-2000:]}
        )


def used() -> list[int]:
    """MiB in use on every GPU; nothing where there is no nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return []
    return [int(line) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


def check_own_gpu(ranks: int, device: str, folder: Path) -> dict[str, Any]:
    """Train, then go on from the checkpoint: contexts on the own GPU alone, both times (B11, E6)."""
    found: list[Any] = []
    for options in (("--epochs", "1"), ("--epochs", "2", "--resume", "auto")):
        case, since = Case(ranks, device, "plain", folder, *options), time.monotonic()
        outcome = case.ended(since, lambda code: code == 0, limit=300.0)
        lines = [line.partition("RANK")[2] for line in case.out.read_text().splitlines() if "RANK" in line]
        seats = sorted(json.loads(line) for line in lines)
        own = [[r, name, [int(name[5:])] if name.startswith("cuda:") else []] for r, name, _ in seats]
        found.append(outcome | {"contexts": seats})
        found[-1]["passed"] = outcome["passed"] and seats == own and len(seats) == ranks
    return {"passed": all(part["passed"] for part in found), "runs": found}


def check_signal(ranks: int, device: str, folder: Path) -> dict[str, Any]:
    """SIGUSR1 to mpiexec, which passes it on, or SIGTERM to torchrun: saved (G4)."""
    case = Case(ranks, device, "plain", folder, "--epochs", "100000")
    case.until_trained()
    since = time.monotonic()
    case.process.send_signal(signal.SIGUSR1 if case.passes_signals else signal.SIGTERM)
    outcome = case.ended(since, lambda code: code == (130 if case.passes_signals else 1), limit=10.0)
    outcome["passed"] &= (
        "interrupted in epoch" in case.out.read_text() and (folder / "run" / "last.safetensors").exists()
    )
    return outcome


def check_killed(ranks: int, device: str, folder: Path) -> dict[str, Any]:
    """SIGKILL of one rank: the launcher names it (G3)."""
    case = Case(ranks, device, "plain", folder, "--epochs", "100000")
    case.until_trained()
    since = time.monotonic()
    os.kill(case.pids()[-1], signal.SIGKILL)
    return case.ended(since, bool, "rank")


def check_full(ranks: int, device: str, folder: Path) -> dict[str, Any]:
    """The last rank's GPU has hardly any memory left: it is named, and so is the reason (G3, C11)."""
    case, since = Case(ranks, device, "full", folder, "--epochs", "2"), time.monotonic()
    return case.ended(since, lambda code: code in (2, 5), f"error: rank {ranks - 1}", limit=300.0)


CHECKS = {"own_gpu": check_own_gpu, "signal": check_signal, "killed": check_killed, "full": check_full}


def main() -> int:
    """Run the checks and print them; 1 where one has failed."""
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", choices=CHECKS, default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    for name in args.only or CHECKS:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = CHECKS[name](args.ranks, args.device, Path(folder))
        print(name, json.dumps(results[name]), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return int(not all(result["passed"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
