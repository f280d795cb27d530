"""Write the result of a benchmark, with all that is needed to make it again, and show it as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minidnn.metrics import provenance, write_json

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def save(name: str, result: Mapping[str, Any], seed: int | None, output: Path | None = None) -> Path:
    """Write ``result`` with machine, versions, seed and command to ``output``, or to the published results."""
    path = output or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    made_by = provenance(seed)
    made_by["command"] = f"python scripts/benchmarks/{made_by['command']}"
    write_json(path, {**result, **made_by})
    return path


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table whose columns are the keys of the first row; numbers to the right."""
    columns = list(rows[0])
    numeric = {c for c in columns if all(isinstance(row[c], int | float) for row in rows)}
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join('---:' if c in numeric else '---' for c in columns)}|"]
    lines += [f"| {' | '.join(_cell(row[c]) for c in columns)} |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
