"""What a budget costs, and how long planning takes: three cases that set the bar, planned for an H200.

    python scripts/reproduce/tradeoff.py [--cases half deep streamed]

``half``: ResNet-50, batch 128, fp16, no fusion, ``auto`` at half of what ``keep`` reserves: within 10 % of its time.
``deep``: 2,504 layers at batch 16 in 12 GiB, parameters on the device: planned in under 30 s.
``streamed``: 9,998 layers, parameters and optimizer state in pinned host memory, at most 100 GiB of it: under 2 minutes.
fp16 is planned here, not run: on the emulated device no array has that precision.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from figures import WORKSPACES, markdown, options, percent, save, size, timed

import layup
import models
from minidnn.commandline import run
from minidnn.errors import DoesNotFit
from minidnn.layers import Graph


class Case(NamedTuple):
    """What is planned, and the bar. ``memory``, ``host_memory``: budgets; ``seconds``: to plan in; ``over``: over keep."""

    name: str
    build: Callable[[], Graph]
    memory: str
    host_memory: str | None = None
    precision: str = "fp32"
    streamed: bool = False
    seconds: float | None = None
    over: float | None = None


def deep(n3: int, batch: int = 16, image_size: int = 224) -> Callable[[], Graph]:
    """ResNet (6, 32, n3, 6)."""
    return partial(models.build, "resnet", batch=batch, image_size=image_size, blocks=(6, 32, n3, 6))


CASES = (
    Case("half", partial(models.build, "resnet50", batch=128), "50%", precision="fp16", over=0.10),
    Case("deep", deep(790), "12GiB", seconds=30),
    Case("streamed", deep(3288), "12GiB", "100GiB", streamed=True, seconds=120),
)
TINY = (
    Case("half", partial(models.build, "resnet20", batch=32), "60%", precision="fp16", over=0.10),
    Case("streamed", deep(1, 2, 32), "1GiB", "4GiB", streamed=True, seconds=120),
)


def measure(case: Case, policy: str, profile: str) -> dict[str, Any]:
    """Plan one case, graph and all, and time it. A case that does not fit has the fewest bytes that would."""

    def work() -> layup.Planned:
        streamed = ("*",) if case.streamed else ()
        budgets: dict[str, Any] = {"memory": case.memory, "host_memory": case.host_memory}
        same: dict[str, Any] = {"device": None, "profile": profile, "precision": case.precision}
        return layup.plan(case.build(), policy=policy, streamed=streamed, **budgets, **same)

    result: dict[str, Any] = {
        "case": case.name,
        **{f: getattr(case, f) for f in ("memory", "host_memory", "precision")},
    }
    result |= {
        "policy": policy,
        "streamed": case.streamed,
        "target_plan_seconds": case.seconds,
        "target_over_keep": case.over,
    }
    try:
        found, took = timed(work)
    except DoesNotFit as error:
        return {
            **result,
            "fits": False,
            "minimum_bytes": error.minimum_bytes,
            "minimum_host_bytes": error.minimum_host_bytes,
        }
    profiled, costs = found.profile, found.context.costs
    alone = sum(costs.forward_seconds) + sum(costs.backward_seconds)
    return result | {
        "fits": True,
        "chosen": found.plan.policy,
        "parameters": found.context.request.graph.parameter_count,
        "peak_bytes": profiled.peak_bytes,
        "reserved_bytes": profiled.reserved_bytes,
        "host_bytes": profiled.host_bytes,
        "step_seconds": profiled.step_seconds,
        "compute_seconds": alone,
        "over_compute": profiled.step_seconds / alone - 1,
        "stream_seconds": dict(profiled.stream_seconds),
        "plan_wall_seconds": took.wall_seconds,
        "plan_cpu_seconds": took.cpu_seconds,
        "candidates": len(found.candidates),
        "rows": len(found.program["train"].rows),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = options(__doc__, "h200")
    known = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=known, default=known, help="some cases only")
    parser.add_argument("--policy", metavar="NAME", default="auto", help="policy (auto)")
    args = parser.parse_args(argv)
    rows = []
    for case in TINY if args.tiny else CASES:
        if case.name in args.cases:
            rows.append(measure(case, args.policy, args.profile))
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(f"{table(rows)}\n\n{WORKSPACES}")
    save(f"tradeoff_{Path(args.profile).stem}", {"profile": args.profile, "rows": rows}, args.json, args.tiny)
    return 0


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The cases."""
    head = (
        "case", "budget", "policy", "reserved", "pinned host", "step ms", "over compute alone", "bar", "planned in s", "CPU s",
        "bar s",
    )  # fmt: skip
    cells = []
    for row in rows:
        budget = row["memory"] + (f", host {row['host_memory']}" if row["host_memory"] else "")
        bar = percent(row["target_over_keep"])
        if not row["fits"]:
            cells.append((row["case"], budget, row["policy"], "does not fit", *[None] * 7))
            continue
        chosen = row["policy"] if row["chosen"] == row["policy"] else f"{row['policy']}: {row['chosen']}"
        took = (f"{row['plan_wall_seconds']:.1f}", f"{row['plan_cpu_seconds']:.1f}", row["target_plan_seconds"])
        sizes = (size(row["reserved_bytes"]), size(row["host_bytes"]), f"{row['step_seconds'] * 1e3:,.2f}")
        cells.append((row["case"], budget, chosen, *sizes, percent(row["over_compute"]), bar, *took))
    return markdown(head, cells)


if __name__ == "__main__":
    sys.exit(run(main))
