"""How much more than its peak the slab of every model reserves, under ``keep`` and ``naive``: bytes alone, no arrays.

    python scripts/benchmarks/placement_table.py [--batch 32]

Every model has its original image size and 1000 classes. Exits with 1 if a ratio is above the promised 1.05.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from record import markdown, save

import minidnn
import models

BOUND = 1.05
BLOCKS = (3, 4, 6, 3)  # of "resnet", which has no depth of its own
PLANS = {"keep": minidnn.keep, "naive": minidnn.naive}


def measure(names: Sequence[str], batch: int) -> Iterator[dict[str, Any]]:
    """One row for every model and plan; the peak is that of the neediest schedule, training, evaluation or gradients."""
    for name in names:
        graph = models.build(name, batch=batch, blocks=BLOCKS if name == "resnet" else None)
        for policy, plan in PLANS.items():
            profile = minidnn.compile(graph, plan(), device=None).profile
            yield {
                "model": name,
                "policy": policy,
                "batch": batch,
                "image_size": graph.inputs[0].shape[1],
                "peak_bytes": profile.peak_bytes,
                "reserved_bytes": profile.reserved_bytes,
                "ratio": round(profile.reserved_bytes / profile.peak_bytes, 5),
            }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description="reserved bytes over peak bytes, for every model")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--models", nargs="+", default=models.available(), metavar="NAME")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/placement_table.json")
    args = parser.parse_args(argv)
    rows = list(measure(args.models, args.batch))
    print(markdown(rows))
    above = [f"{row['model']} {row['policy']} {row['ratio']}" for row in rows if row["ratio"] > BOUND]
    print(f"above {BOUND}: {', '.join(above) or 'none'}")
    save("placement_table", {"bound": BOUND, "rows": rows}, None, args.output)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
