"""Measure what a net's rows cost on a GPU, into a profile: python scripts/measure_costs.py -a resnet50 -b 128 --output h200.json

The profile has the link and memory rates of this machine and the time of every kernel call of a training step, so
``--profile FILE`` then plans and predicts with measured times. Each call is repeated in a captured graph on the operands
of the step; tensors that fit the L2 cache are found there, as they often are in a step.
"""

from __future__ import annotations

import threads  # noqa: F401  (before NumPy)

# isort: split
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from idle import row_times

import links
import minidnn
import models
from minidnn import profiles
from minidnn.commandline import Parser, run
from minidnn.device.cuda_libraries import import_cupy
from minidnn.metrics import provenance, write_json
from minidnn.precision import PRECISIONS
from minidnn.profiles import Profile
from minidnn.schedule.plan import Plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Parser((__doc__ or "").splitlines()[0], epilog=None)
    add = parser.add_argument
    add("-a", "--arch", required=True, metavar="NAME")
    add("-b", "--batch-size", type=int, required=True, metavar="N")
    add("--image-size", type=int, metavar="N")
    add("--classes", type=int, default=1000, metavar="N")
    add("--blocks", type=lambda text: [int(n) for n in text.split(",")], metavar="N,N,...", help="of -a resnet")
    add("--precision", default="fp32", choices=[p for p in PRECISIONS if p != "fp64"])
    add("--device", default="cuda:0")
    add(
        "--profile",
        default="h200",
        metavar="GPU",
        help="where the rates on paper and all that is not measured come from",
    )
    add("--workspace-limit", metavar="SIZE")
    add("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    graph = models.build(
        args.arch, batch=args.batch_size, image_size=args.image_size, classes=args.classes, blocks=args.blocks
    )
    step = minidnn.compile(
        graph, Plan(), device=args.device, profile=args.profile, precision=args.precision,
        workspace_limit=args.workspace_limit, capture="off",
    )  # fmt: skip
    device: Any = step.executor.device
    rng = np.random.default_rng(0)
    x = rng.standard_normal(graph.inputs[0].shape, np.float32)
    print(f"loss {step.run(x, rng.integers(0, args.classes, args.batch_size)).loss:.4f}")
    rows = {key: seconds for key, seconds in row_times(step).items() if not key.startswith("copy ")}
    gpu, versions = device.versions()["gpu"], device.versions()
    step.close()
    measured = links.measure(import_cupy())
    data = content(profiles.load(args.profile), measured, rows, gpu)
    about = provenance(0)
    data |= {"machine": about["machine"], "versions": about["versions"] | versions, "command": about["command"]}
    Profile.from_json(data, where=str(args.output))  # what cannot be read again is not written
    write_json(args.output, data)
    print(f"{len(rows)} kernel calls, {sum(rows.values()) * 1e3:.3f} ms without repetitions; saved {args.output}")
    return 0


def content(base: Profile, measured: dict[str, float], rows: dict[str, float], gpu: str) -> dict[str, Any]:
    """A profile file: the numbers of ``base``, except those that were measured here."""
    source = f"measured on one {gpu} by measure_costs.py"
    numbers: dict[str, Any] = {}
    for name in ("memory_bytes", "memory_bandwidth", "memory_efficiency", "launch_seconds", "copy_latency_seconds",
                 "interconnect_bandwidth", "interconnect_latency_seconds", "compute_slowdown"):  # fmt: skip
        if name in base.sources:
            numbers[name] = {"value": getattr(base, name), "source": base.sources[name]}
    for kind, table in (("flops", base.flops), ("efficiency", base.efficiency)):
        for precision, value in table.items():
            numbers[f"{kind}.{precision}"] = {"value": value, "source": base.sources[f"{kind}.{precision}"]}
    for name in ("h2d", "d2h", "h2d_both", "d2h_both"):
        field = f"{name[:3]}_bandwidth{name[3:]}"
        numbers[field] = {"value": measured[name], "source": source}
    numbers["copy_latency_seconds"] = {"value": measured["latency"], "source": source}
    share = min(1.0, measured["memory"] / base.memory_bandwidth)
    numbers["memory_efficiency"] = {"value": share, "source": f"{source}: a copy within device memory"}
    return {"name": f"{base.name} measured", "device": gpu, "numbers": numbers, "rows": rows}


if __name__ == "__main__":
    sys.exit(run(main))
