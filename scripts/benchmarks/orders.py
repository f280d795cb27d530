"""Leave out every single wait of steps whose rows are scattered over four streams: is it flagged, and do bits change?

    python scripts/benchmarks/orders.py [--orders 40]

The tests do the same for a sample (``tests/step/test_orders.py``, whose nets and scattering these are). For every wait: the
static verification reads the schedule without it, and two training steps run in adversarial orders until one leaves NaN or
other bits. Exits with 1 if a deletion is not flagged, an allowed order changes a bit, or fewer than half of the deletions show.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import markdown, save

ROOT = Path(__file__).parents[2]


def measure(name: str, seed: int, orders: int) -> dict[str, Any]:
    """All deletions of one net. ``first_wrong_order`` counts from 0; null where no order of these changed a bit."""
    from tests.step.scatter import STEPS, Scattered, problems

    case = Scattered(name, seed)
    allowed = case.wrong(case.schedule, range(50))
    found = []
    for deletion in case.deletions:
        mutant = case.without(deletion)
        found.append((bool(problems(mutant)), case.wrong(mutant, range(orders))))
    shown = [order for _, order in found if order is not None]
    return {
        "net": name,
        "steps": STEPS,
        "rows": len(case.schedule.rows),
        "waits": len(case.deletions),
        "allowed_orders_with_identical_bits": 50 if allowed is None else allowed,
        "deletions_flagged": sum(flagged for flagged, _ in found),
        "deletions_that_change_bits": len(shown),
        "share": round(len(shown) / len(found), 4),
        "first_wrong_order": [order for _, order in found],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description="what happens without each single wait")
    parser.add_argument("--orders", type=int, default=40, help="adversarial orders tried for each deletion")
    parser.add_argument("--seed", type=int, default=1, help="of the scattering")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/orders.json")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT))  # the nets are those of the tests
    from tests.step.scatter import GRAPHS

    rows = [measure(name, args.seed, args.orders) for name in GRAPHS]
    print(markdown([{key: row[key] for key in row if key != "first_wrong_order"} for row in rows]))
    save("orders", {"orders": args.orders, "rows": rows}, args.seed, args.output)
    right = all(
        row["allowed_orders_with_identical_bits"] == 50
        and row["deletions_flagged"] == row["waits"]
        and row["share"] >= 0.5
        for row in rows
    )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
