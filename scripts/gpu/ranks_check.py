"""Check data parallelism on GPUs: every strategy, both implementations, against a single process and the emulated device.

    python scripts/gpu/ranks_check.py --threads 1 2 4 --json FILE          one GPU: ranks are threads that share it
    torchrun --nproc-per-node 2 scripts/gpu/ranks_check.py --json FILE     one GPU a rank, by NCCL; mpiexec -n 2 python … too
    torchrun --nproc-per-node 2 scripts/gpu/ranks_check.py --share         processes that share one GPU, through the host

``--device emulated`` checks the checks. Rank 0 prints a line a check and writes the JSON file; exits with 1 when one fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ranks_bench import PATIENCE, Bench, distance, index_of, momentum_distance
from ranks_killed import check_killed

from minidnn.device.cuda import CudaDevice
from minidnn.device.cuda_libraries import device_count, import_cupy, require_gpu
from minidnn.errors import UserError
from minidnn.metrics import provenance, write_json
from minidnn.parallel.agree import checksum
from minidnn.parallel.communicator import Communicator
from minidnn.parallel.inprocess import InProcess, run_ranks
from minidnn.parallel.launch import place
from minidnn.parallel.nccl import Nccl
from minidnn.parallel.team import gather
from minidnn.schedule.instruction import COMM
from minidnn.schedule.ranks import STRATEGIES
from minidnn.spec import TensorSpec
from minidnn.state import LOSS_SCALING

SYNCHRONOUS = tuple(name for name in STRATEGIES if name != "ring_delayed")
VARIANTS = (*(f"{name}:steps" for name in STRATEGIES), "ring_delayed:nccl", "ring:nccl", "all_reduce:nccl")
TOLERANCE, EMULATED_TOLERANCE = 1e-6, 1e-5
SUM_TOLERANCE = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 1e-2}  # of sums over ranks, which are in the type of the gradients
PART = 1 << 14  # elements a rank, of the arrays with which NCCL's calls are tried


def agreed(results: Sequence[dict[str, Any]]) -> bool:
    """Whether all ranks had the same weights after every step, and losses that are numbers."""
    finite = all(np.isfinite(result["losses"]).all() for result in results)
    return finite and all(result["sums"] == results[0]["sums"] for result in results)


def same(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whether all ranks had the same weights after every step, and the same state at the end."""
    state = all(checksum(result["state"]) == checksum(results[0]["state"]) for result in results)
    return {"passed": agreed(results) and state, "by": results[0]["by"], "seconds": round(results[0]["seconds"], 3)}


def check_strategy(bench: Bench, strategy: str, trained: dict[str, Any]) -> dict[str, Any]:
    """The same bits on all ranks; the sums of steps; the update of a single process."""
    results = bench.train(strategy)
    trained[strategy] = state = results[0]["state"]
    outcome = same(results)
    name, how = strategy.split(":")
    if how == "nccl":
        if f"{name}:steps" not in trained:
            trained[f"{name}:steps"] = bench.train(f"{name}:steps")[0]["state"]
        outcome["to_steps"] = distance(state, trained[f"{name}:steps"])
        outcome["passed"] &= outcome["to_steps"] <= TOLERANCE
    else:
        emulated = bench.train(strategy, emulated=True)[0]["state"]
        outcome["to_emulated"] = distance(state, emulated)
        outcome["passed"] &= outcome["to_emulated"] <= EMULATED_TOLERANCE
    if name in SYNCHRONOUS:
        alone = trained.setdefault("alone", None) or trained.update(alone=bench.alone()["state"]) or trained["alone"]
        outcome["to_alone"] = distance(state, alone)
        exact = checksum(state) == checksum(alone)
        outcome["passed"] &= exact if bench.ranks == 1 else outcome["to_alone"] <= TOLERANCE
    return outcome


def check_precision(bench: Bench, strategy: str, precision: str, trained: dict[str, Any]) -> dict[str, Any]:
    """With batch norm: the same bits of the weights on all ranks, one loss scale, the mean of the gradients of all shares."""
    results = bench.train(strategy, precision, norm=True)
    if f"{precision} shares" not in trained:
        trained[f"{precision} shares"] = bench.gradients(precision)
    first, state = bench.train(strategy, precision, norm=True, steps=1)[0]["state"], results[0]["state"]
    apart = momentum_distance(first, trained[f"{precision} shares"])
    scaling = {"scaling": [float(number) for number in state[LOSS_SCALING]]} if LOSS_SCALING in state else {}
    return {"passed": agreed(results) and apart <= SUM_TOLERANCE[precision], "to_shares": apart, **scaling}


def check_capture(bench: Bench, strategy: str) -> dict[str, Any]:
    """Captured steps have the bits of rows one by one."""
    rows, captured = bench.train(strategy), bench.train(strategy, capture="on")
    return {"passed": all(a["sums"] == b["sums"] for a, b in zip(rows, captured, strict=True))}


def check_nccl(bench: Bench) -> dict[str, Any]:
    """Every call of NCCL on stream ``comm``, also where a group of one has nobody to talk to."""

    def work(communicator: Communicator) -> dict[str, float]:
        device: Any = bench.open()
        rank, size = communicator.rank, communicator.size
        count = PART * size
        device.open(8 * count, 512)
        group = Nccl(communicator, device.stream(COMM))

        def array(begin: int, elements: int) -> Any:
            return device.array("device", 4 * begin, TensorSpec((elements,), "float32"))

        whole, other, own = array(0, count), array(count, count), array(rank * PART, PART)
        errors: dict[str, float] = {}

        def ran(name: str, call: Callable[[], None], result: Any, expected: Any, begin: Any) -> None:
            device.put(whole, begin)
            device.put(other, -1.0)
            call()
            device.wait(device.submit(COMM, None, (), 0.0, True))
            errors[name] = float(np.abs(device.get(result) - expected).max())

        def ring() -> None:
            group.post(whole, (rank + 1) % size)
            group.recv(other, (rank - 1) % size)

        total, ranks = size * (size + 1) / 2, np.repeat(np.arange(size, dtype=np.float32), PART)
        ran("all_reduce", lambda: group.all_reduce(whole), whole, total, rank + 1)
        ran("reduce_scatter", lambda: group.reduce_scatter(whole), own, total, rank + 1)
        ran("all_gather", lambda: group.all_gather(whole), whole, ranks, rank)
        ran("broadcast", lambda: group.broadcast(whole, size - 1), whole, size - 1, rank)
        ran("ring step", ring, other, (rank - 1) % size, rank)
        group.check()
        device.close()
        return errors

    errors = bench.every(work)
    return {"passed": all(error == 0 for found in errors for error in found.values()), "errors": errors[0]}


def checks(bench: Bench, by_nccl: bool, gpu: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    """Every check by name."""
    trained: dict[str, Any] = {}
    table: dict[str, Callable[[], dict[str, Any]]] = {"nccl": lambda: check_nccl(bench)} if by_nccl else {}
    for variant in VARIANTS:
        table[variant] = partial(check_strategy, bench, variant, trained)
    for variant in VARIANTS:
        for precision in ("fp16", "bf16") if gpu else ("fp32",):
            table[f"{variant} {precision}"] = partial(check_precision, bench, variant, precision, trained)
    if gpu and (by_nccl or bench.ranks == 1):
        for variant in ("ring_delayed:nccl", "ring:steps", "all_reduce:nccl"):
            table[f"{variant} captured"] = partial(check_capture, bench, variant)
    return table


def run_checks(
    table: dict[str, Callable[[], dict[str, Any]]], ranks: int, only: Sequence[str] | None, says: bool
) -> dict[str, Any]:
    """Do checks; an error is a failure."""
    outcome: dict[str, Any] = {}
    for name, check in table.items():
        if only and not any(name.startswith(start) for start in only):
            continue
        try:
            found = check()
        except Exception as error:
            if not says or place(os.environ).size > 1:
                raise  # the others wait for this rank
            traceback.print_exc()
            found = {"passed": False, "exception": f"{type(error).__name__}: {error}"}
        outcome[f"{ranks} ranks, {name}"] = found
        if says:
            print("ok    " if found["passed"] else "FAILED", f"{ranks} ranks, {name}", found, flush=True)
    return outcome


# -- command line -------------------------------------------------------------------------------------------------------
def on_threads(args: argparse.Namespace) -> dict[str, Any]:
    """Ranks as threads that share a GPU, then processes of which one is killed."""
    outcome: dict[str, Any] = {}
    gpu = args.device != "emulated"
    for ranks in args.threads:
        every = partial(run_ranks, ranks, timeout=PATIENCE)
        bench = Bench(ranks, every, index_of(args.device, args.share), False)
        table = checks(bench, False, gpu)
        if gpu and ranks == 1:
            table["nccl"] = partial(check_nccl, bench)
        outcome |= run_checks(table, ranks, args.only, True)
    share = gpu and device_count(import_cupy().cuda.runtime) < args.killed
    table = {"killed": lambda: check_killed(args.device, share, args.killed)}
    return outcome | run_checks(table, args.killed, args.only, True)


def as_processes(args: argparse.Namespace) -> dict[str, Any]:
    """This rank's part in the checks under a launcher."""
    team = gather(os.environ, "ring", "emulated" if args.share else args.device, timeout=60.0)
    assert team is not None
    with team:
        group = team.communicator
        index = index_of(args.device if args.share else team.device, args.share)
        bench = Bench(team.size, lambda work: group.exchange(work(group)), index, args.share)
        gpu = args.device != "emulated"
        by_nccl = gpu and not args.share and not isinstance(group, InProcess)
        outcome = run_checks(checks(bench, by_nccl, gpu), team.size, args.only, team.rank == 0)
        failed = finish(args, outcome) if team.rank == 0 else 0
    team.leave(failed)
    return outcome


def finish(args: argparse.Namespace, outcome: dict[str, Any]) -> int:
    """Print the sum, write the file, and return the exit code."""
    failed = [name for name, found in outcome.items() if not found["passed"]]
    print(
        f"{len(outcome) - len(failed)} of {len(outcome)} checks passed"
        + (f"; failed: {'; '.join(failed)}" if failed else "")
    )
    record = provenance()
    if args.device != "emulated":
        device = CudaDevice(index_of(args.device, args.share) or 0)
        record["versions"] |= device.versions()
        device.close()
    if args.json:
        write_json(args.json, record | {"passed": not failed, "checks": outcome})
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="ranks, without a launcher"
    )
    parser.add_argument("--device", default="cuda", help="cuda, or emulated")
    parser.add_argument("--share", action="store_true", help="under a launcher: all ranks on GPU 0, through the host")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument(
        "--killed", type=int, default=2, metavar="N", help="ranks of which one is killed, without a launcher"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="checks whose name begins so")
    args = parser.parse_args(argv)
    try:
        here = place(os.environ)
        if here.launcher:
            outcome = as_processes(args)
            return 0 if all(found["passed"] for found in outcome.values()) else 1
        if args.device != "emulated":
            require_gpu(import_cupy().cuda.runtime, index_of(args.device, args.share) or 0, "fp32")
        return finish(args, on_threads(args))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
