"""Speed-up of data parallelism: every strategy, weak and strong scaling, beside PyTorch and the alpha-beta model.

    python scripts/reproduce/ring.py                                             # NumPy, mpiexec, two ranks: minutes
    python scripts/reproduce/ring.py --device cuda --precision bf16 --ranks 1 2 --cache ring.cache.json

Starts ``mpiexec -n N`` by itself, a group of processes for each N, and begins again where ``--cache`` says it stopped. Weak
scaling: every rank has the batch of one; strong: they share it. Speed-up is images a second over those of one process
without a strategy (of ``ddp``: PyTorch's own). ``none`` is no strategy but the measure beside the others: as many processes,
each training alone. What it loses is lost to shared memory and cores, not to communication.

The prediction for a strategy is the time of ``none`` at the same local batch, and what the alpha-beta model of
``minidnn/parallel/cost.py`` says of communication: on GPUs what does not hide behind computation, on the emulated device, whose
rows run one after another, all of it. There links are measured, by ring steps of 1 KiB to 8 MiB; on GPUs the profile's count.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from figures import markdown, options, save
from ring_points import Group, Point, build, environment, find_launcher

import minidnn
from minidnn.commandline import run
from minidnn.errors import UserError
from minidnn.metrics import write_json
from minidnn.parallel.cost import Links, estimate
from minidnn.parallel.inprocess import InProcess
from minidnn.precision import PRECISIONS
from minidnn.profiles import load
from minidnn.schedule.ranks import STRATEGIES, Strategy

NETS = {"emulated": ["lenet:64", "cifar_quick:128"],
        "cuda": ["lenet:64", "cifar_quick:128", "vgg16:64", "vgg16:16", "resnet50:128"]}  # fmt: skip
REMARK = (
    "On the emulated device the ranks are processes of one computer: they share its memory bandwidth and caches, and more of "
    "them than cores share the cores, so that 'none', which exchanges nothing, has no speed-up of N either. Its rows run one "
    "after another, so no transfer hides. What is checked here is the cost model; how fast the strategies are, GPUs tell. "
    "'load' is the system's load average: above the number of ranks other programs were running, and times are too long."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
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
    add("--steps", type=int, default=50, help="most steps of a stretch that is timed (50)")
    add("--seconds", type=float, default=4.0, help="aimed-at time of a point (4)")
    add("--point-seconds", type=float, default=120.0, help="a point that takes longer is given up (120)")
    add("--cache", type=Path, metavar="FILE", help="remember points, and do not measure them again")
    args = parser.parse_args(argv)
    check(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it has started ends, too
    points = wanted(args)
    results = measured(args, points)
    rows, links = judged(args, points, results)
    print(table(rows))
    found = {"device": args.device, "precision": args.precision, "links": links, "rows": rows}
    save(
        f"ring_{'cpu' if args.device == 'emulated' else args.profile}",
        {**found, "remark": REMARK},
        args.json,
        args.tiny,
    )
    return 0


def check(args: Namespace) -> None:
    """Fill in defaults; refuse what cannot be."""
    if min(args.ranks) < 1:
        raise UserError(f"--ranks {min(args.ranks)}: give at least 1")
    if (args.latency is None) != (args.bandwidth is None):
        raise UserError("--latency and --bandwidth describe one link: give both, or neither")
    for name in args.strategies:
        Strategy.parse(name)
    args.ranks = sorted({1, *args.ranks})
    args.repeats = 25 if args.device == "emulated" else 5  # short stretches: some of them go undisturbed
    if args.tiny:
        args.nets, args.steps, args.seconds, args.repeats = args.nets or ["lenet:4"], 2, 0.1, 1
    sizes = [net.partition(":") for net in args.nets or NETS[args.device]]
    known = dict(net.split(":") for net in NETS["cuda"])
    args.nets = [(net, int(batch) if batch else int(known.get(net, 64))) for net, _, batch in sizes]
    if args.ddp == "auto":
        args.ddp = "yes" if args.device == "cuda" and find_spec("torch") is not None else "no"


def wanted(args: Namespace) -> list[tuple[str, Point]]:
    """Points with their scaling; those of one rank belong to both, and carry none."""
    found: list[tuple[str, Point]] = []
    rivals = ["ddp"] if args.ddp == "yes" else []
    for net, batch in args.nets:
        found += [("", Point(net, batch, 1, name)) for name in ("none", *rivals)]
        for scaling in args.scaling:
            for ranks in args.ranks[1:]:
                whole = batch * (ranks if scaling == "weak" else 1)
                found += [(scaling, Point(net, whole, ranks, name)) for name in ("none", *args.strategies, *rivals)]
    return found


def measured(args: Namespace, points: Sequence[tuple[str, Point]]) -> dict[str, dict[str, Any]]:
    """The results of all points, by key: from the cache, or measured now."""
    results: dict[str, dict[str, Any]] = {}
    if args.cache is not None and args.cache.exists():
        saved = json.loads(args.cache.read_text(encoding="utf-8"))
        results = {key: result for key, result in saved.items() if "failed" not in result}
    settings = {
        name: getattr(args, name) for name in ("device", "precision", "steps", "seconds", "repeats", "point_seconds")
    }
    group = Group(
        find_launcher(args.launcher), settings, args.point_seconds, environment(1 if args.device == "emulated" else 8)
    )
    everything = [point for _, point in points]
    if args.device == "emulated":
        everything = [*(Point("", 0, n, "links") for n in args.ranks[1:]), *everything]
    for ranks in args.ranks:
        for rival in (False, True):
            left = [
                p for p in everything if p.ranks == ranks and (p.strategy == "ddp") == rival and p.key not in results
            ]
            for point, result in group.measure(list(dict.fromkeys(left))):
                results[point.key] = (
                    {**result, "load": round(os.getloadavg()[0], 1)} if hasattr(os, "getloadavg") else result
                )
                shown = (
                    f"{result['step_seconds'] * 1e3:.2f} ms"
                    if "step_seconds" in result
                    else result.get("failed", "measured")
                )
                print(f"{point.key}: {shown}", file=sys.stderr, flush=True)
                if args.cache is not None:
                    write_json(args.cache, results)
    return results


def judged(
    args: Namespace, points: Sequence[tuple[str, Point]], results: Mapping[str, dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Speed-up, efficiency and prediction of every point, and the links used."""
    links: dict[int, Links] = {}
    shown: dict[str, Any] = {}
    for ranks in args.ranks[1:]:
        entry = results.get(Point("", 0, ranks, "links").key, {})
        if args.latency is not None:
            entry = {"latency_seconds": args.latency, "bandwidth": args.bandwidth}
        elif args.device == "cuda":
            assumed = Links.of(load(args.profile))
            entry = {"latency_seconds": assumed.latency_seconds, "bandwidth": assumed.bandwidth}
        if "bandwidth" in entry:
            links[ranks] = Links(entry["latency_seconds"], entry["bandwidth"])
        shown[str(ranks)] = entry
    rows = []
    for scaling, point in points:
        result = results[point.key]
        batch = next(b for net, b in args.nets if net == point.net and b in (point.batch, point.local))
        one = results[Point(point.net, batch, 1, "ddp" if point.strategy == "ddp" else "none").key]
        row: dict[str, Any] = {"net": point.net, "scaling": scaling, "ranks": point.ranks, "strategy": point.strategy}
        row |= {"batch": point.batch, "batch_of_rank_0": point.local, **result}
        if "step_seconds" in result and "step_seconds" in one:
            base = batch / one["step_seconds"]
            row["images_per_second"] = point.batch / result["step_seconds"]
            row["speed_up"] = row["images_per_second"] / base
            row["efficiency"] = row["speed_up"] / point.ranks
            if point.strategy not in ("none", "ddp") and point.ranks in links:
                alone = results[point._replace(strategy="none").key]
                row |= predicted(args, point, links[point.ranks], alone, base)
        rows.append(row)
    return rows, shown


def predicted(args: Namespace, point: Point, links: Links, alone: Mapping[str, Any], base: float) -> dict[str, Any]:
    """What the cost model makes of the measured time of a rank that trains alone."""
    if "step_seconds" not in alone:
        return {}
    communicator = InProcess.group(point.ranks)[0]
    step = minidnn.compile(
        build(point.net, point.batch), strategy=point.strategy, communicator=communicator, device=None,
        precision=args.precision, profile=args.profile,
    )  # fmt: skip
    found = estimate(step, links)
    added = found.communication_seconds if args.device == "emulated" else found.exposed_seconds
    seconds = alone["step_seconds"] + added
    return {
        "sent_bytes": found.sent_bytes,
        "predicted_communication_seconds": found.communication_seconds,
        "predicted_exposed_seconds": added,
        "predicted_step_seconds": seconds,
        "predicted_speed_up": point.batch / seconds / base,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The points, as published."""
    head = (
        "net",
        "scaling",
        "ranks",
        "batch",
        "strategy",
        "step ms",
        "predicted",
        "images/s",
        "speed-up",
        "predicted ",
        "efficiency",
    )
    cells = []
    for row in rows:
        first = (row["net"], row["scaling"], row["ranks"], row["batch"], row["strategy"])
        if "failed" in row:
            cells.append((*first, f"failed: {row['failed']}", *[None] * 5))
            continue
        times = [
            None if key not in row else f"{row[key] * 1e3:.2f}" for key in ("step_seconds", "predicted_step_seconds")
        ]
        ratios = [None if key not in row else f"{row[key]:.2f}" for key in ("speed_up", "predicted_speed_up")]
        speed = f"{row['images_per_second']:,.0f}" if "images_per_second" in row else None
        efficiency = f"{row['efficiency']:.1%}" if "efficiency" in row else None
        cells.append((*first, *times, speed, *ratios, efficiency))
    return markdown(head, cells)


if __name__ == "__main__":
    sys.exit(run(main))
