"""Compare: every policy under several budgets, by the engine's own predictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from layup.context import Context
from layup.evaluate import Candidate
from layup.planner import Planner
from layup.policies import POLICIES
from minidnn.schedule.instruction import Op
from minidnn.schedule.text import human_bytes

SHARES = (100, 80, 60, 40, 20, 0)
"""Budgets in percent of the way from the smallest that runs to what ``keep`` reserves."""


class Row(NamedTuple):
    """One policy under one budget. What is predicted is None where no plan of the policy fits."""

    policy: str
    memory_bytes: int
    fits: bool
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    host_bytes: int | None = None
    step_seconds: float | None = None
    recompute_flops: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows by budget, the largest first, then by policy.

    ``keep_bytes``, ``keep_seconds``: what ``keep`` reserves and takes; ``minimum_bytes``: the smallest budget under which
    some policy runs.
    """

    rows: list[Row]
    keep_bytes: int
    keep_seconds: float
    minimum_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain data, the rows under ``"rows"``."""
        return {
            "rows": [row._asdict() for row in self.rows],
            "keep_bytes": self.keep_bytes,
            "minimum_bytes": self.minimum_bytes,
        }


def compare(
    context: Context,
    budgets: Iterable[int] | None = None,
    policies: Sequence[str] | None = None,
    *,
    also: Iterable[int] = (),
) -> Comparison:
    """Predict the best plan of every policy under every budget. Allocates nothing; a host budget is the context's.

    Args:
        budgets: device bytes; None: by ``SHARES``.
        policies: None: all.
        also: device bytes of further budgets.

    Raises UserError for an unknown policy.
    """
    auto = Planner(context, "auto")
    planners = {name: auto if name == "auto" else Planner(context, name) for name in policies or POLICIES}
    keep = auto.keep
    keep_bytes = keep.program.reserved_bytes
    smallest = auto.smallest(context.host_memory)
    minimum = keep_bytes if smallest is None else smallest.program.reserved_bytes
    if budgets is None:
        budgets = [minimum + (keep_bytes - minimum) * share // 100 for share in SHARES]
    rows = []
    for memory in sorted({*budgets, *also}, reverse=True):
        for name, planner in planners.items():
            candidate = planner.select(memory, context.host_memory)
            rows.append(Row(name, memory, False) if candidate is None else _row(name, memory, candidate))
    return Comparison(rows, keep_bytes, keep.seconds, minimum)


def _row(policy: str, memory: int, candidate: Candidate) -> Row:
    profile = candidate.program.prediction
    repeated = sum(row.flops for row in candidate.train.rows if row.op is Op.RECOMPUTE)
    sizes = (profile.peak_bytes, profile.reserved_bytes, profile.host_bytes)
    return Row(policy, memory, True, *sizes, profile.step_seconds, repeated)


def text(comparison: Comparison) -> str:
    """The comparison as a table: for every budget the policies that fit, the fastest first, and those that do not."""
    head = ("", "step, ms", "over keep", "peak", "reserved", "pinned host", "recomputed")
    cells: list[tuple[str, ...]] = [head]
    for memory, rows in _by_budget(comparison.rows).items():
        share = f"{100 * memory / comparison.keep_bytes:.1f} % of keep"
        least = ", the smallest that runs" if memory == comparison.minimum_bytes else ""
        cells.append((f"budget {human_bytes(memory)} ({share}{least})",))
        for row in sorted((r for r in rows if r.fits), key=lambda r: (r.step_seconds or 0.0, r.policy != "auto")):
            cells.append(_cells(row, comparison.keep_seconds))
        if beyond := [row.policy for row in rows if not row.fits]:
            cells.append((f"  does not fit: {', '.join(beyond)}",))
    widths = [max(len(row[i]) for row in cells if len(row) > 1) for i in range(len(head))]
    return "\n".join(row[0] if len(row) == 1 else _line(row, widths) for row in cells)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))


def _cells(row: Row, keep_seconds: float) -> tuple[str, ...]:
    assert row.step_seconds is not None and row.peak_bytes is not None and row.reserved_bytes is not None
    assert row.host_bytes is not None and row.recompute_flops is not None
    over = f"{(row.step_seconds / keep_seconds - 1) * 100:+.1f} %"
    sizes = (human_bytes(row.peak_bytes), human_bytes(row.reserved_bytes), human_bytes(row.host_bytes))
    repeated = f"{row.recompute_flops / 1e9:,.1f} GFLOP" if row.recompute_flops else "-"
    return (f"  {row.policy}", f"{row.step_seconds * 1e3:,.3f}", over, *sizes, repeated)


def _by_budget(rows: Iterable[Row]) -> Mapping[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row.memory_bytes, []).append(row)
    return found
