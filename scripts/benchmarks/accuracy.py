"""Train the published accuracies and write them down: digits over five seeds, Fashion-MNIST for one epoch.

    python scripts/benchmarks/accuracy.py --json benchmarks/results/accuracy.json [--fashion DIR] [--seeds 5]

Every run is a run of ``scripts/train.py`` in a process of its own, by the command line that is printed and stored. Figures
are read from its ``summary.json``; seconds are wall-clock seconds of the whole process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from minidnn.metrics import provenance, write_json  # noqa: E402  (the checkout, whether installed or not)

DIGITS = ["--data", "digits", "-a", "resnet20", "--memory", "6MiB"]


def train(arguments: list[str]) -> dict[str, Any]:
    """Run one training and return what matters of its summary, with its command and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [sys.executable, str(ROOT / "scripts" / "train.py"), *arguments, "--output", str(output)]
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - started
        summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    shown = " ".join(["python scripts/train.py", *arguments])
    print(f"{shown}: top-1 {summary['best_acc1']:.4f} best, {summary['acc1']:.4f} final, {seconds:.0f} s", flush=True)
    kept = ("best_acc1", "acc1", "images_per_second", "naive_bytes", "keep_bytes", "predicted", "measured", "seed")
    return {"command": shown, "seconds": seconds, **{key: summary[key] for key in kept}}


def main() -> None:
    """Run everything that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--seeds", type=int, default=5, help="digits: seeds 0 to this (default %(default)s); 0 leaves digits out"
    )
    parser.add_argument(
        "--fashion", metavar="DIR", help="folder of the Fashion-MNIST IDX files; without it that run is left out"
    )
    args = parser.parse_args()
    results: dict[str, Any] = provenance(seed=None)
    if args.seeds:
        runs = [train([*DIGITS, "--seed", str(seed)]) for seed in range(args.seeds)]
        results["digits"] = {
            "runs": runs,
            "mean_acc1": statistics.fmean(run["acc1"] for run in runs),
            "largest_seconds": max(run["seconds"] for run in runs),
        }
        print(f"digits: mean top-1 {results['digits']['mean_acc1']:.4f} after the last epoch")
    if args.fashion:
        results["fashion_mnist"] = train(["--data", f"mnist:{args.fashion}", "-a", "resnet20", "--epochs", "1"])
        results["fashion_mnist"]["command"] = results["fashion_mnist"]["command"].replace(args.fashion, "DIR")
    write_json(args.json, results)


if __name__ == "__main__":
    main()
