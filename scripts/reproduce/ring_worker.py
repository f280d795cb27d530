"""One rank that measures points for ``ring.py``, which starts it: every strategy, on this number of ranks, one after another."""

from __future__ import annotations

import threads  # noqa: F401

# isort: split
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from idle import host_seconds
from ring_points import Point, build

import minidnn
from minidnn.device.base import Device
from minidnn.device.cuda import open_device
from minidnn.device.emulated import EmulatedDevice
from minidnn.parallel.team import Team, gather

OPTIMIZER = minidnn.SGD(lr=1e-6, momentum=0.9, nesterov=True, weight_decay=1e-4)
"""Its rate leaves the net as it was through hundreds of steps on one batch: a GPU computes faster with gradients that have
vanished, because the batch has been learnt by heart, or with what has diverged."""
MESSAGES = tuple(1 << k for k in range(10, 24))
"""Bytes of the messages by which links are measured, out of as many as no cache holds, as after a backward pass."""
POOL_BYTES = 1 << 26


def seconds_of(work: Callable[[], object], everybody: Callable[[Any], list[Any]], settings: dict[str, Any]) -> float:
    """Seconds of one call, by the slowest rank, from stretches of calls that all ranks begin together: on GPUs the median
    of them; elsewhere the fastest, since other programs of the computer can only slow one down.

    ``everybody``: gives all ranks' values, and waits for all.
    """
    work()
    everybody(None)
    begin = time.perf_counter()
    work()
    once: float = max(everybody(time.perf_counter() - begin))
    calls = max(
        1, min(int(settings["steps"]), int(settings["measure_seconds"] / settings["repeats"] / max(once, 1e-7)))
    )
    found: list[float] = []
    for _ in range(settings["repeats"]):
        everybody(None)
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        found.append(max(everybody(time.perf_counter() - begin)) / calls)
    return min(found) if settings["device"] == "emulated" else statistics.median(found)


class Resubmitted:
    """Steps on the batch that lies in the pinned slots, which the host does not write again: as ``bench.py`` times them."""

    def __init__(self, step: minidnn.CompiledStep, delayed: bool) -> None:
        self._executor, self._done = step.executor, 0
        self._cycle = ("train", "train_other") if delayed else ("train",)

    def __call__(self) -> None:
        self._executor.slot()
        self._executor.run(self._cycle[self._done % len(self._cycle)])
        self._done += 1

    def close_cycle(self) -> None:
        """Go on to the end of a cycle, where the step itself can go on."""
        while self._done % len(self._cycle):
            self()


def train(point: Point, team: Team, device: Device, settings: dict[str, Any]) -> dict[str, Any]:
    """Time training steps. ``device``: of all points, so that it plans a convolution once. ``step_seconds``: with a batch that is
    in pinned memory; ``fed_seconds``: with one that the host copies there in every step; ``host_seconds``: of the host, to submit
    one to an idle GPU, which bounds the step of a small net. Raises ValueError for a loss that is no number."""
    alone, on_gpu = point.strategy == "none", settings["device"] != "emulated"
    graph = build(point.net, point.local if alone else point.batch)
    own: dict[str, Any] = {} if alone else {"strategy": point.strategy, "communicator": team.communicator}
    step = minidnn.compile(
        graph, optimizer=OPTIMIZER, device=device, precision=settings["precision"], capture=point.capture, **own
    )
    source = np.random.default_rng(0)
    x = source.random((step.batch, *graph.inputs[0].shape[1:]), np.float32)
    y = source.integers(0, graph.logits.shape[-1], step.batch)
    whole: dict[str, Any] = {} if alone else {"of": point.batch}
    resubmitted = Resubmitted(step, point.strategy.startswith("ring_delayed"))

    def everybody(value: Any) -> list[Any]:
        device.synchronize()
        return list(team.communicator.exchange(value))

    def feed() -> minidnn.StepResult:
        result = step.run(x, y, **whole)
        if not on_gpu:
            device.synchronize()
        return result

    def repeat() -> None:
        resubmitted()
        if not on_gpu:
            device.synchronize()

    try:
        for _ in range(7 if on_gpu else 3):  # ``first``, then whole cycles: kernels are loaded, then captured
            feed()
        seconds = seconds_of(repeat, everybody, settings)
        host = {"host_seconds": max(everybody(host_seconds(repeat, device.synchronize)))} if on_gpu else {}
        resubmitted.close_cycle()
        fed = seconds_of(feed, everybody, settings)
        last = feed()
        device.synchronize()  # not the loss alone: other ranks wait for what comes behind it
        graphs, loss = getattr(step.executor, "graphs", 0), last.loss
    finally:
        step.close()
    if not math.isfinite(loss):
        raise ValueError(f"after these steps the loss is {loss}")
    found = {"step_seconds": seconds, "fed_seconds": fed, "loss": loss}
    return {**found, **host, "reserved_bytes": step.profile.reserved_bytes, "graphs": graphs}


def links(team: Team, settings: dict[str, Any]) -> dict[str, Any]:
    """Time ring steps of several sizes, all ranks at once, and lay alpha + n / beta through them."""
    communicator, times = team.communicator, []
    outgoing, incoming = np.ones(POOL_BYTES, np.uint8), np.ones(POOL_BYTES, np.uint8)
    for nbytes in MESSAGES:
        places = cycle(range(0, POOL_BYTES, nbytes))

        def work(nbytes: int = nbytes, places: Iterator[int] = places) -> None:
            at = next(places)
            communicator.post(outgoing[at : at + nbytes], (communicator.rank + 1) % communicator.size)
            communicator.recv(incoming[at : at + nbytes], (communicator.rank - 1) % communicator.size)

        times.append(
            seconds_of(
                work,
                communicator.exchange,
                {**settings, "steps": 2000, "measure_seconds": settings["measure_seconds"] / 15},
            )
        )
    slope, start = np.polyfit(MESSAGES, times, 1, w=1 / np.asarray(times))
    start = max(float(start), 0.0)
    return {
        "latency_seconds": start,
        "bandwidth": 1 / float(slope),
        "messages": dict(zip(MESSAGES, times, strict=True)),
    }


def main() -> None:
    """Measure what the file of the first argument asks for; rank 0 writes a line before and after every point."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    team = gather(os.environ, "ring", settings["device"], settings["point_seconds"])
    assert team is not None

    def say(point: Point, **more: Any) -> None:
        if team.rank == 0:
            with Path(settings["out"]).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": point.key, **more}) + "\n")

    with team:
        on_gpu = team.device.startswith("cuda")
        device = open_device(team.device, settings["precision"], True) if on_gpu else EmulatedDevice()
        for point in (Point(*fields) for fields in settings["points"]):
            if team.communicator.exchange(time.time() >= settings["deadline"])[0]:
                break  # by the clock of rank 0, for all
            say(point)
            if point.strategy == "links":
                say(point, result=links(team, settings))
            else:
                say(point, result=train(point, team, device, settings))
        device.close()
    team.leave(0)


if __name__ == "__main__":
    main()
