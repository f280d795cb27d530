"""Which points a measurement of data parallelism takes, in which order, and what they say together."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from figures import markdown
from ring_points import Point, build

import minidnn
from minidnn.parallel.cost import Links, estimate
from minidnn.parallel.inprocess import InProcess
from minidnn.profiles import load

FIRST = ("links", "none", "ring_delayed", "ddp")
"""Strategies that are measured before all others."""


def wanted(args: Namespace) -> list[tuple[str, Point]]:
    """Points with their scaling, in the order of the table; those of one rank belong to both, and carry none."""
    found: list[tuple[str, Point]] = []
    for net, batch in args.nets:
        found += [("", point) for point in _points(args, net, batch, 1, ())]
        for scaling in args.scaling:
            for ranks in args.ranks[1:]:
                whole = batch * (ranks if scaling == "weak" else 1)
                found += [(scaling, point) for point in _points(args, net, whole, ranks, args.strategies)]
    return found


def _points(args: Namespace, net: str, batch: int, ranks: int, strategies: Sequence[str]) -> list[Point]:
    ours = [Point(net, batch, ranks, name, how) for how in args.capture for name in ("none", *strategies)]
    return ours + [Point(net, batch, ranks, "ddp")] * (args.ddp == "yes")


def launches(args: Namespace, points: Sequence[tuple[str, Point]]) -> list[list[Point]]:
    """The points in the order of their worth, those together that one group of processes measures one after another.

    On the largest number of ranks every net without exchange, with ``ring_delayed`` and with PyTorch; then single processes,
    by which speed-up counts; then the same on other numbers; then all other strategies, each for every net.
    """
    everything = [point for _, point in points]
    if args.device == "emulated":
        everything = [*(Point("", 0, ranks, "links") for ranks in args.ranks[1:]), *everything]
    most = max(args.ranks)

    def launch(point: Point) -> tuple[int, int, bool]:
        first = point.strategy.partition(":")[0] in FIRST
        worth = 1 if point.ranks == 1 < most else 3 if not first else 0 if point.ranks == most else 2
        return worth, -point.ranks, point.strategy == "ddp"

    nets, strategies = [net for net, _ in args.nets], ("links", "none", *args.strategies, "ddp")

    def place(point: Point) -> tuple[int, ...]:
        how = args.capture.index(point.capture) if point.capture else 0
        net = nets.index(point.net) if point.net else -1
        strategy = strategies.index(point.strategy)
        return (how, net, strategy) if launch(point)[0] < 3 else (how, strategy, net)

    found: dict[tuple[int, int, bool], list[Point]] = {}
    for point in sorted(dict.fromkeys(everything), key=lambda point: (launch(point), place(point))):
        found.setdefault(launch(point), []).append(point)
    return list(found.values())


def judged(
    args: Namespace, points: Sequence[tuple[str, Point]], results: Mapping[str, dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Speed-up, efficiency and prediction of every point as far as its results are there, and the links used."""
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
        result = results.get(point.key, {"missing": True})
        batch = next(b for net, b in args.nets if net == point.net and b in (point.batch, point.local))
        alone = point if point.strategy == "ddp" else point._replace(strategy="none")
        one = results.get(alone._replace(batch=batch, ranks=1).key, {})
        row: dict[str, Any] = {"net": point.net, "scaling": scaling, "ranks": point.ranks, "strategy": point.strategy}
        row |= {"capture": point.capture} if point.capture else {}
        row |= {"batch": point.batch, "batch_of_rank_0": point.local, **result}
        if "step_seconds" in result and "step_seconds" in one:
            base = batch / one["step_seconds"]
            row["images_per_second"] = point.batch / result["step_seconds"]
            row["speed_up"] = row["images_per_second"] / base
            row["efficiency"] = row["speed_up"] / point.ranks
            if point.strategy not in ("none", "ddp") and point.ranks in links:
                row |= predicted(args, point, links[point.ranks], results.get(alone.key, {}), base)
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
        "capture",
        "graphs",
        "step ms",
        "predicted",
        "images/s",
        "speed-up",
        "predicted ",
        "efficiency",
        "host ms",
    )
    cells = []
    for row in rows:
        first = [row.get(key) for key in ("net", "scaling", "ranks", "batch", "strategy", "capture", "graphs")]
        if "failed" in row or "missing" in row:
            said = f"failed: {row['failed']}" if "failed" in row else "missing"
            cells.append((*first, said, *[None] * 6))
            continue
        times = [
            None if key not in row else f"{row[key] * 1e3:.2f}" for key in ("step_seconds", "predicted_step_seconds")
        ]
        ratios = [None if key not in row else f"{row[key]:.2f}" for key in ("speed_up", "predicted_speed_up")]
        speed = f"{row['images_per_second']:,.0f}" if "images_per_second" in row else None
        efficiency = f"{row['efficiency']:.1%}" if "efficiency" in row else None
        host = f"{row['host_seconds'] * 1e3:.2f}" if "host_seconds" in row else None
        cells.append((*first, *times, speed, *ratios, efficiency, host))
    return markdown(head, cells)
