"""Time training steps on a GPU, beside PyTorch in the same process: python scripts/bench.py -a resnet50 -b 128 --against torch

A step of ours includes the copy of its batch from pinned memory; PyTorch's batch is on the GPU already. Figures are medians
over ``--repeats`` of ``--steps`` steps each. Without --against only ours are timed.
"""

from __future__ import annotations

import threads  # noqa: F401  (before NumPy)

# isort: split
import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from idle import busy_seconds, by_kernel, furthest_from_floor, host_seconds, row_times

import minidnn
import models
from minidnn.commandline import Parser, run
from minidnn.errors import UserError
from minidnn.layers import Graph
from minidnn.metrics import provenance, write_json
from minidnn.precision import PRECISIONS
from minidnn.schedule.recipe import Recipe

SHOWN = 24  # rows far from their floor that are printed; the JSON file has more
OPTIMIZER = minidnn.SGD(lr=0.01, momentum=0.9, weight_decay=1e-4)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = Parser((__doc__ or "").splitlines()[0], epilog=None)
    add = parser.add_argument
    add("-a", "--arch", nargs="+", default=["resnet50"], metavar="NAME", help="models")
    add("-b", "--batch-size", nargs="+", type=int, default=[128], metavar="N", help="one for each model")
    add("--image-size", type=int, default=None, metavar="N")
    add("--blocks", type=lambda text: [int(n) for n in text.split(",")], metavar="N,N,...", help="of -a resnet")
    add("--precision", nargs="+", default=["fp16"], choices=[p for p in PRECISIONS if p != "fp64"])
    add("--device", default="cuda:0")
    add("--against", choices=("torch",), help="time PyTorch, too: eager, and compiled or graphed")
    add(
        "--compiled",
        nargs="*",
        default=["bf16", "fp16"],
        metavar="P",
        help="precisions in which torch.compile runs, too",
    )
    add(
        "--layouts",
        nargs="+",
        choices=("first", "last"),
        default=["first", "last"],
        help="channels, in PyTorch's eager mode",
    )
    add("--graphed", action="store_true", help="PyTorch also as a CUDA graph of the whole step")
    add("--nondeterministic", action="store_true", help="allow engines that add in a varying order")
    add("--capture", choices=("auto", "on", "off"), default="auto")
    add("--fusions", nargs="*", metavar="NAME", help="default: all that pay; none: --fusions without a name")
    add("--recipe", metavar="FILE", help="replay a recipe instead of measuring engines")
    add(
        "--kernels",
        action="store_true",
        help="also the time of every kernel, the rows furthest from their floor, and the share of a step the GPU is idle",
    )
    add("--idle", action="store_true", help="the share alone")
    add("--steps", type=int, default=20)
    add("--repeats", type=int, default=5)
    add("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if len(args.batch_size) not in (1, len(args.arch)):
        raise UserError(f"{len(args.batch_size)} batch sizes for {len(args.arch)} models: give one, or one for each")
    sizes = args.batch_size * (len(args.arch) if len(args.batch_size) == 1 else 1)
    rows: list[dict[str, Any]] = []
    for arch, batch in zip(args.arch, sizes, strict=True):
        for precision in args.precision:
            graph = models.build(arch, batch=batch, image_size=args.image_size, blocks=args.blocks)
            rows.append({"arch": arch, "batch": batch, "precision": precision})
            measure(graph, rows[-1], args, lambda: save(args.json, rows))
    return 0


def save(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Write what was measured so far: a run that is cut short leaves that."""
    if path is not None:
        write_json(path, {"rows": rows, **provenance(0)})


def measure(graph: Graph, row: dict[str, Any], args: argparse.Namespace, done: Callable[[], None]) -> None:
    """One model in one precision: ours, then the rivals, each printed and saved as soon as it is known."""
    row["minidnn"] = ours(graph, row["precision"], args)
    print(line(row), flush=True)
    done()
    gc.collect()
    if not args.against:
        return
    from rivals import rivals

    compiled = row["precision"] in args.compiled
    row["torch"] = {}
    how = {"steps": args.steps, "repeats": args.repeats}
    for name, outcome in rivals(graph, row["precision"], args.layouts, compiled=compiled, graphed=args.graphed, **how):
        row["torch"][name] = outcome
        if "failure" in outcome:
            print(f"    PyTorch {name}: {outcome['failure']}", flush=True)
            done()
            continue
        speed, memory = outcome["images_per_second"], outcome["peak_bytes"] / 2**30
        print(f"    PyTorch {name}: {speed:,.0f} images/s, {memory:.2f} GiB", flush=True)
        done()


def ours(graph: Graph, precision: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compile with the defaults, train, and time."""
    started = time.perf_counter()
    recipe = None
    if args.recipe:
        import json

        recipe = Recipe.from_json(json.loads(Path(args.recipe).read_text(encoding="utf-8")))
    step = minidnn.compile(
        graph, optimizer=OPTIMIZER, device=args.device, precision=precision, capture=args.capture,
        deterministic=not args.nondeterministic, fusions=args.fusions, recipe=recipe,
    )  # fmt: skip
    compiled = time.perf_counter() - started
    batch = graph.inputs[0].shape[0]
    rng = np.random.default_rng(0)
    x = rng.standard_normal(graph.inputs[0].shape, np.float32)
    y = rng.integers(0, graph.logits.shape[-1], batch)
    losses = [step.run(x, y).loss for _ in range(6)]
    executor, device = step.executor, step.executor.device
    device.synchronize()
    outside = device.outside_bytes()

    def clock(run: Any) -> list[float]:
        seconds = []
        for _ in range(args.repeats):
            device.synchronize()
            before = device.seconds()
            for _ in range(args.steps):
                run()
            device.synchronize()
            seconds.append((device.seconds() - before) / args.steps)
        return seconds

    def submit() -> None:
        executor.slot()
        executor.run("train")

    seconds = clock(submit)
    fed = clock(lambda: step.run(x, y))
    host = host_seconds(lambda: step.run(x, y), device.synchronize)
    submitted = host_seconds(submit, device.synchronize)
    median = statistics.median(seconds)
    found = {
        "images_per_second": batch / median, "step_seconds": median, "all_seconds": seconds,
        "images_per_second_with_host_batch": batch / statistics.median(fed), "host_seconds": host,
        "submit_seconds": submitted, "host_share": host / median,
        "compile_seconds": compiled, "losses": losses, "reserved_bytes": step.profile.reserved_bytes,
        "peak_bytes": step.profile.peak_bytes, "outside_bytes": outside, "outside_grown_bytes": device.outside_bytes() - outside,
        "rows": len(step.program["train"].rows), "deterministic": step.recipe.deterministic, "capture": args.capture,
        "fusions": list(step.recipe.fusions), "recipe": step.recipe.hash, "versions": device.versions(),  # type: ignore[attr-defined]  # of a GPU, which a bench needs
    }  # fmt: skip
    if args.kernels or args.idle:
        times = row_times(step)
        found |= {"busy_seconds": (busy := busy_seconds(step, times)), "idle_share": 1 - busy / median}
        if args.kernels:
            found |= {"kernels_seconds": by_kernel(step, times), "furthest": furthest_from_floor(step, times)}
    step.close()
    return found


def line(row: dict[str, Any]) -> str:
    """What a person wants to read of a row."""
    mine = row["minidnn"]
    text = (
        f"{row['arch']} b{row['batch']} {row['precision']}: {mine['images_per_second']:,.0f} images/s "
        f"({mine['step_seconds'] * 1e3:.2f} ms; fed by the host {mine['images_per_second_with_host_batch']:,.0f}; host "
        f"{mine['host_seconds'] * 1e3:.2f} ms, {mine['host_share']:.1%} of a step), "
        f"slab {mine['reserved_bytes'] / 2**30:.2f} GiB, compiled in {mine['compile_seconds']:.0f} s"
    )
    if "idle_share" in mine:
        text += f"\n    kernels {mine['busy_seconds'] * 1e3:.2f} ms one by one: GPU idle {mine['idle_share']:.1%}"
    for name, (seconds, count) in mine.get("kernels_seconds", {}).items():
        text += f"\n    {name:<40} {seconds * 1e3:8.3f} ms in {count} rows"
    for entry in mine.get("furthest", ())[:SHOWN]:
        seconds, count = entry["seconds"], entry["rows"]
        text += (
            f"\n    {entry['first']:<28} {entry['kernel']:<36} {count:>2} x {seconds * 1e6:7.1f} us, floor "
            f"{entry['floor_seconds'] * 1e6:6.1f} us: {entry['bytes'] / seconds / 1e12:5.2f} TB/s, "
            f"{entry['flops'] / seconds / 1e12:6.1f} TFLOP/s"
        )
    return text


if __name__ == "__main__":
    sys.exit(run(main))
