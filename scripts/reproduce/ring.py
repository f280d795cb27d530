"""Speed-up of data parallelism: every strategy, weak and strong scaling, beside PyTorch and the alpha-beta model.

    python scripts/reproduce/ring.py                                             # NumPy, mpiexec, two ranks: minutes
    python scripts/reproduce/ring.py --device cuda --precision bf16 --ranks 1 2 --cache ring.cache.json

Starts ``mpiexec -n N`` by itself, groups of processes for each N, and begins again where ``--cache`` says it stopped. Weak
scaling: every rank has the batch of one; strong: they share it. Speed-up is images a second over those of one process
without a strategy (of ``ddp``: PyTorch's own). ``none`` is no strategy but the measure beside the others: as many processes,
each training alone. What it loses is lost to shared memory and cores, not to communication. A step's batch lies in pinned
memory, as PyTorch's does on the GPU; ``fed_seconds`` in the file are those of a step whose batch the host copies there first.

The prediction for a strategy is the time of ``none`` at the same local batch, and what the alpha-beta model of
``minidnn/parallel/cost.py`` says of communication: on GPUs what does not hide behind computation, on the emulated device, whose
rows run one after another, all of it. There links are measured, by ring steps of 1 KiB to 8 MiB; on GPUs the profile's count.

After ``--seconds`` no point is begun; the most telling come first: ``none``, ``ring_delayed`` and PyTorch for every net, on the
largest number of ranks. Then, as after an interruption, table and file have what there is. Exit code 3: points are missing;
1: one has failed.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from figures import options, save
from ring_points import Group, Point, environment, find_launcher
from ring_study import judged, launches, table, wanted

from minidnn.commandline import run
from minidnn.errors import UserError
from minidnn.metrics import write_json
from minidnn.precision import PRECISIONS
from minidnn.schedule.ranks import STRATEGIES, Strategy

NETS = {"emulated": ["lenet:64", "cifar_quick:128"],
        "cuda": ["lenet:64", "cifar_quick:128", "vgg16:64", "vgg16:16", "resnet50:128"]}  # fmt: skip
REMARK = (
    "On the emulated device the ranks are processes of one computer: they share its memory bandwidth and caches, and more of "
    "them than cores share the cores, so that 'none', which exchanges nothing, has no speed-up of N either. Its rows run one "
    "after another, so no transfer hides. What is checked here is the cost model; how fast the strategies are, GPUs tell. "
    "'load' is the system's load average: above the number of ranks other programs were running, and times are too long."
)
SETTINGS = ("device", "precision", "steps", "measure_seconds", "repeats", "point_seconds")
"""Options that a worker needs, too."""
UNFINISHED = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    started = time.time()
    args = parse(argv)
    points = wanted(args)
    results = remembered(args)
    code = 0
    try:
        measure(args, points, results, started + args.seconds)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as error:  # of SIGTERM
        code = int(error.code or 0)
    rows, links = judged(args, points, results)
    print(table(rows))
    missing = [point.key for point in dict.fromkeys(point for _, point in points) if point.key not in results]
    found = {"device": args.device, "precision": args.precision, "links": links, "missing": missing, "rows": rows}
    if missing and args.json is None:
        print("\nnot written, because points are missing: --json FILE writes what there is")
    else:
        name = f"ring_{'cpu' if args.device == 'emulated' else args.profile}"
        save(name, {**found, "remark": REMARK}, args.json, args.tiny)
    if missing:
        said = f"not finished: {len(missing)} points are missing: {', '.join(missing)}; the same command with --cache goes on"
        print(said, file=sys.stderr)
    failed = [row for row in rows if "failed" in row]
    return code or (UNFINISHED if missing else int(bool(failed)))


def parse(argv: Sequence[str] | None) -> Namespace:
    """The options."""
    parser = options(__doc__, "h200")
    add = parser.add_argument
    add("--device", choices=("emulated", "cuda"), default="emulated", help="NumPy, or a GPU a rank (emulated)")
    add("--precision", choices=tuple(PRECISIONS), default="fp32")
    add("--nets", nargs="+", metavar="NAME[:BATCH]", help="nets, and the batch of one rank (default: by device)")
    add(
        "--strategies",
        nargs="+",
        metavar="NAME",
        default=list(STRATEGIES),
        help="with :steps or :nccl, how (default: all)",
    )
    add("--ranks", nargs="+", type=int, metavar="N", default=[1, 2], help="numbers of processes (1 2)")
    add("--scaling", nargs="+", choices=("weak", "strong"), default=["weak", "strong"])
    add(
        "--ddp",
        choices=("auto", "yes", "no"),
        default="auto",
        help="PyTorch's, too; auto: on GPUs, where torch is there",
    )
    add(
        "--latency", type=float, metavar="S", help="of a link, for the prediction (default: measured, or the profile's)"
    )
    add("--bandwidth", type=float, metavar="B", help="bytes a second each way")
    add("--launcher", metavar="WORDS", help="what starts processes, before -n (default: mpiexec)")
    add(
        "--capture",
        nargs="+",
        choices=("auto", "on", "off"),
        default=["auto"],
        help="CUDA graphs, as of minidnn.compile; several are compared (auto)",
    )
    add("--steps", type=int, default=50, help="most steps of a stretch that is timed (50)")
    add("--seconds", type=float, default=math.inf, metavar="S", help="begin no point later than this (no limit)")
    add("--measure-seconds", type=float, default=4.0, metavar="S", help="aimed-at time of a point's steps (4)")
    add("--point-seconds", type=float, default=120.0, metavar="S", help="a point that takes longer is given up (120)")
    add("--cache", type=Path, metavar="FILE", help="remember points, and do not measure them again")
    args = parser.parse_args(argv)
    check(args)
    return args


def check(args: Namespace) -> None:
    """Fill in defaults; refuse what cannot be."""
    if min(args.ranks) < 1:
        raise UserError(f"--ranks {min(args.ranks)}: give at least 1")
    if (args.latency is None) != (args.bandwidth is None):
        raise UserError("--latency and --bandwidth describe one link: give both, or neither")
    for name in args.strategies:
        Strategy.parse(name)
    if args.device == "emulated" and args.precision not in ("fp32", "fp64"):
        raise UserError(f"--precision {args.precision} needs --device cuda: the emulated device computes in fp32")
    if args.device == "emulated" and "on" in args.capture:
        raise UserError("--capture on needs --device cuda: the emulated device has no graphs")
    args.strategies, args.capture = (list(dict.fromkeys(names)) for names in (args.strategies, args.capture))
    args.ranks = sorted({1, *args.ranks})
    args.repeats = 25 if args.device == "emulated" else 5  # short stretches: some of them go undisturbed
    if args.tiny:
        args.nets, args.steps, args.measure_seconds, args.repeats = args.nets or ["lenet:4"], 2, 0.1, 1
    sizes = [net.partition(":") for net in args.nets or NETS[args.device]]
    known = dict(net.split(":") for net in NETS["cuda"])
    args.nets = [(net, int(batch) if batch else int(known.get(net, 64))) for net, _, batch in sizes]
    if args.ddp == "auto":
        args.ddp = "yes" if args.device == "cuda" and find_spec("torch") is not None else "no"


def remembered(args: Namespace) -> dict[str, dict[str, Any]]:
    """The results of the cache, by key. Raises UserError where they are of another device or precision."""
    if args.cache is None or not args.cache.exists():
        return {}
    saved = json.loads(args.cache.read_text(encoding="utf-8"))
    for name, value in facts(args).items():
        if saved.get(name) != value:
            raise UserError(f"--cache {args.cache}: its {name} is {saved.get(name)}, not {value}; name another file")
    return {key: result for key, result in saved["points"].items() if "failed" not in result}


def facts(args: Namespace) -> dict[str, str]:
    """What the points of a cache have in common."""
    return {"device": args.device, "precision": args.precision}


def measure(
    args: Namespace, points: Sequence[tuple[str, Point]], results: dict[str, dict[str, Any]], deadline: float
) -> None:
    """Measure the points that ``results`` has not, put each there as it comes. ``deadline``: of ``time.time``."""
    settings = {name: getattr(args, name) for name in SETTINGS}
    threads = 1 if args.device == "emulated" else 8
    group = Group(find_launcher(args.launcher), settings, args.point_seconds, environment(threads), deadline)
    for launch in launches(args, points):
        with closing(group.measure([point for point in launch if point.key not in results])) as found:
            for point, result in found:
                load = {"load": round(os.getloadavg()[0], 1)} if hasattr(os, "getloadavg") else {}
                results[point.key] = {**result, **load}
                if args.cache is not None:
                    write_json(args.cache, {**facts(args), "points": results})
                seconds = f"{result['step_seconds'] * 1e3:.2f} ms" if "step_seconds" in result else "measured"
                print(f"{point.key}: {result.get('failed', seconds)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, upon which what it has started ends, too
    sys.exit(run(main))
