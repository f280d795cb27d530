"""A rank that is killed in the middle of its work: all others must be gone soon. Started by ``ranks_check.py``.

Run under a launcher, it trains until the last rank kills itself in its fifth step.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ranks_bench import Bench, batch, index_of

import minidnn
from minidnn.parallel.team import gather

END_SECONDS = 30.0


def main() -> None:
    """Train until killed; say when."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--share", action="store_true")
    args = parser.parse_args()
    team = gather(os.environ, "ring", "emulated" if args.share else args.device, timeout=END_SECONDS * 0.8)
    assert team is not None
    with team:
        index = index_of(args.device if args.share else team.device, args.share)
        bench = Bench(team.size, lambda work: [], index, args.share)
        device = bench.open()
        communicator = bench.communicator(team.communicator, device)
        step = minidnn.compile(bench.graph, device=device, strategy="ring", communicator=communicator)
        for number in range(1_000_000):
            if (team.rank, number) == (team.size - 1, 5):
                print(f"KILLED {time.time()}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            step.run(*batch(bench.graph, number)).settle()


def check_killed(device: str, share: bool, ranks: int) -> dict[str, Any]:
    """All processes are gone soon after one is killed."""
    program = [str(Path(__file__).resolve()), "--device", device, *["--share"] * share]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*torchrun, *program], capture_output=True, text=True, timeout=300, check=False)
    ended = time.time()
    killed = [float(line.split("KILLED ")[1]) for line in done.stdout.splitlines() if "KILLED " in line]
    seconds = ended - killed[0] if killed else float("inf")
    passed = bool(killed) and seconds <= END_SECONDS and done.returncode != 0
    return {"passed": passed, "seconds": seconds, "code": done.returncode} | (
        {} if passed else {"err": done.stderr[-2000:]}
    )


if __name__ == "__main__":
    main()
