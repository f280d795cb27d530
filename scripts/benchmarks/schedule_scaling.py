"""How long the memory planning of a training step takes, pass by pass, as the net grows: it is linear in the layers.

    python scripts/benchmarks/schedule_scaling.py [--units 1 123 289 790 1622 3288]

ResNet (6, 32, n, 6) at batch 16 and 224 x 224, for every n in ``--units``: 137, 503, 1,001, 2,504, 5,000 and 9,998 layers.
No arrays, no device; the times are those of one core.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from record import markdown, save

import models
from minidnn.prepare import prepare
from minidnn.schedule.analysis import Analysis
from minidnn.schedule.instruction import DEVICE, HOST
from minidnn.schedule.lower import Step, lower
from minidnn.schedule.placement import place
from minidnn.schedule.plan import keep
from minidnn.schedule.program import layout, with_lifetimes
from minidnn.schedule.simulate import simulate, total_footprint
from minidnn.schedule.synchronise import synchronise
from minidnn.schedule.verify import check

UNITS = (1, 123, 289, 790, 1622, 3288)
BATCH, IMAGE_SIZE = 16, 224


class Clock:
    """Seconds of each named pass."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time one pass."""
        gc.collect()
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin


def measure(units: int) -> dict[str, Any]:
    """Plan the training step of one net. Raises ScheduleError if it is wrong."""
    clock = Clock()
    with clock("graph"):
        blocks = (6, 32, units, 6)
        graph = models.build("resnet", batch=BATCH, image_size=IMAGE_SIZE, blocks=blocks)
    with clock("recipe"):
        request = prepare(graph, device=None)
    with clock("lower"):
        persistent, plan = request.persistent(keep()), keep()
        lowered = lower(Analysis(request.graph, request.precision), persistent, plan, request.recipe, Step())
    with clock("lifetimes"):
        timed = with_lifetimes(lowered, persistent)
    base, host_base = total_footprint(persistent.buffers), total_footprint(persistent.host_buffers, HOST)
    with clock("place"):
        device = place(timed, base=base, space=DEVICE)
        host = place(timed, base=host_base, space=HOST)
    offsets = {**layout(persistent), **device.offsets, **host.offsets}
    with clock("synchronise"):
        rows = synchronise(timed, offsets, previous=timed)
    with clock("simulate"):
        fixed = [*persistent.buffers, *persistent.host_buffers]
        profile = simulate(
            rows,
            request.gpu,
            "fp32",
            base_bytes=base,
            offsets_extent=device.extent,
            host_bytes=host.extent,
            persistent=fixed,
        )
    with clock("verify"):
        check(rows, offsets, previous=rows, extent=device.extent, host_extent=host.extent)
    total = sum(clock.seconds[name] for name in ("lower", "lifetimes", "place", "synchronise", "simulate", "verify"))
    return {
        "layers": 3 * sum(blocks) + 2,
        "nodes": len(graph.nodes),
        "rows": len(rows),
        **{f"{name}_seconds": round(seconds, 4) for name, seconds in clock.seconds.items()},
        "planning_seconds": round(total, 4),
        "seconds_per_1000_rows": round(1000 * total / len(rows), 4),
        "reserved_over_peak": round(profile.reserved_bytes / profile.peak_bytes, 5),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description="time of planning a training step, by depth")
    parser.add_argument("--units", type=int, nargs="+", default=UNITS, metavar="N", help="units of the third stage")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/schedule_scaling.json")
    args = parser.parse_args(argv)
    rows = []
    for units in args.units:
        rows.append(measure(units))
        print(f"{rows[-1]['layers']} layers: {rows[-1]['planning_seconds']:.2f} s", file=sys.stderr, flush=True)
    print(markdown(rows))
    save("schedule_scaling", {"batch": BATCH, "image_size": IMAGE_SIZE, "rows": rows}, None, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
