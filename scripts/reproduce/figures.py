"""What the reproductions share: options, a stopwatch, and how figures are written and shown."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from layup.policies import find
from minidnn.commandline import Parser
from minidnn.metrics import provenance, write_json

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WORKSPACES = (
    "Workspaces are those of the NumPy kernels (im2col in chunks of about 2 MiB), planned like all else; the workspaces of "
    "cuDNN's engines differ and depend on the recipe of the GPU."
)

Result = TypeVar("Result")


class Took(NamedTuple):
    """Elapsed seconds, and seconds of processor time of this process alone."""

    wall_seconds: float
    cpu_seconds: float


def timed(work: Callable[[], Result]) -> tuple[Result, Took]:
    """Run ``work`` and time it."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, Took(time.perf_counter() - wall, time.process_time() - cpu)


def options(description: str | None, profile: str) -> Parser:
    """A parser with the options of all reproductions. ``profile``: the default GPU."""
    parser = Parser((description or "").partition("\n")[0].strip())
    parser.epilog = None
    add = parser.add_argument
    add("--profile", metavar="GPU", default=profile, help=f"GPU whose times are predicted: a name, a file ({profile})")
    add("--tiny", action="store_true", help="a small case in seconds, to see that the script runs; writes no result")
    add("--json", metavar="FILE", type=Path, help="where the figures go (default: benchmarks/results)")
    return parser


def names_of(text: str | None, default: Sequence[str]) -> list[str]:
    """Policies of a comma-separated list. Raises UserError for an unknown one."""
    return list(default) if text is None else [find(name.strip()).name for name in text.split(",")]


def save(name: str, result: Mapping[str, Any], path: Path | None, tiny: bool) -> None:
    """Write figures with machine, versions and command. Tiny ones only where a file was asked for."""
    if path is None and tiny:
        return
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    made_by = provenance()
    made_by["command"] = f"python scripts/reproduce/{made_by['command']}"
    write_json(path, {**result, **made_by})
    shown = path
    with suppress(ValueError):
        shown = path.relative_to(Path.cwd())
    print(f"\nwritten: {shown}")


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; a column whose first cell begins with a digit or a sign is right-aligned."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    numeric = [
        any(row[i][:1].isdigit() or (row[i][:1] in "+−" and row[i][1:]) for row in cells) for i in range(len(head))
    ]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join('---:' if right else '---' for right in numeric)}|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in cells])


def size(nbytes: float | None) -> str | None:
    """Bytes in decimal units, as the papers count: 1 GB = 1e9 B."""
    if nbytes is None:
        return None
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if abs(nbytes) >= 0.995 * scale:
            return f"{nbytes / scale:.2f} {unit}".replace("-", "−")
    return f"{nbytes / 1e3:.1f} kB".replace("-", "−")


def signed(value: float, digits: int = 1) -> str:
    """A number with its sign; a zero that rounding has left has none."""
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else f"{0:.{digits}f}"


def percent(value: float | None) -> str | None:
    """A share as a signed percentage."""
    return None if value is None else f"{signed(100 * value)} %"
