"""What the lessons share: options, the question at the end, a batch, and rows that somebody has tampered with."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidnn import CompiledStep, Graph, UserError, profiles
from minidnn.commandline import Parser, run
from minidnn.lifetime_map import lifetime_map
from minidnn.schedule.instruction import DEVICE, HOST, Instruction, Wait
from minidnn.schedule.program import Schedule

__all__ = [
    "State", "ask", "batch", "chain", "differing", "inserted", "laptop", "options", "require", "run", "show", "tampered",
    "without",
]  # fmt: skip

State = dict[str, NDArray[Any]]
"""Parameters and running statistics by name."""


def options(argv: Sequence[str] | None, text: str | None, **defaults: str | int | float) -> argparse.Namespace:
    """Read the command line: ``--answer``, and an option for each default. ``text`` is the lesson's docstring."""
    parser = Parser(text or "", epilog=None)
    parser.add_argument("--answer", metavar="VALUE", help="your answer to the question at the end")
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help="default: %(default)s")
    return parser.parse_args(argv)


def ask(answer: str | None, question: str, *, right: object, why: str, hint: str) -> int:
    """Print the question, or judge the answer. Returns the exit code: 1 for a wrong answer, else 0."""
    print(f"\nQuestion: {question}")
    if answer is None:
        print("Answer with --answer VALUE.")
        return 0
    if same(answer, str(right)):
        print(f"{answer}: right. {why}")
        return 0
    print(f"{answer}: not yet. {hint}")
    return 1


def require(condition: bool, sentence: str) -> None:
    """Refuse a wrong option in words."""
    if not condition:
        raise UserError(sentence)


def same(answer: str, right: str) -> bool:
    """Whether two answers are the same number, or the same word in any case."""
    answer, right = answer.strip().lower(), right.strip().lower()
    try:
        return math.isclose(float(answer.replace(",", "")), float(right), rel_tol=1e-9)
    except ValueError:
        return answer == right


def show(schedule: Schedule, *, order: str = "birth", host: bool = False, limit: int = 20) -> None:
    """Print the lifetime map of a schedule, its largest buffers; ``host``: then the map of host memory."""
    for space in (DEVICE, HOST) if host else (DEVICE,):
        print(lifetime_map(schedule.rows, schedule.offsets, columns=72, order=order, space=space, limit=limit))


def chain(length: int) -> Graph:
    """Convolutions one after another, of one pixel each so that they need no scratch memory; then a classifier."""
    g = Graph()
    x, y = g.input((8, 16, 16, 16)), g.label((8,))
    for i in range(length):
        x = g.conv2d(x, 16, 1, name=f"conv{i + 1}")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(x, name="mean"), 10, name="classifier"), y)
    return g


def batch(graph: Graph) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The same random images and labels every time."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(graph.inputs[0].shape, dtype=np.float32)
    return x, rng.integers(0, graph.logits.shape[-1], len(x))


def laptop(link: float) -> profiles.Profile:
    """The GPU of a laptop whose link to host memory is so many times as fast as it is."""
    require(link > 0, f"--link {link} must be positive")
    gpu = profiles.load("rtx4060")
    ways = ("h2d_bandwidth", "d2h_bandwidth", "h2d_bandwidth_both", "d2h_bandwidth_both")
    return replace(gpu, **{way: link * getattr(gpu, way) for way in ways})


def tampered(step: CompiledStep, rows: Iterable[Instruction]) -> CompiledStep:
    """Give a step that has not run yet these rows for its training schedule. Nothing checks them."""
    train = replace(step.program["train"], rows=tuple(rows))
    step.program = replace(step.program, schedules={**step.program.schedules, "train": train})
    step.executor.program = step.program
    return step


def differing(a: State, b: State) -> str:
    """Names of what differs between two states, in any bit."""
    return ", ".join(name for name in a if not np.array_equal(a[name], b[name]))


def inserted(rows: Sequence[Instruction], at: int, row: Instruction) -> list[Instruction]:
    """The rows with one more before row ``at``. Waits count rows, so those for later rows move along."""
    moved = [r._replace(waits=tuple(w._replace(row=w.row + (w.row >= at)) for w in r.waits)) for r in rows]
    return [*moved[:at], row, *moved[at:]]


def without(rows: Sequence[Instruction], at: int, wait: Wait) -> list[Instruction]:
    """The rows, but row ``at`` does not wait for this."""
    changed = rows[at]._replace(waits=tuple(w for w in rows[at].waits if w != wait))
    return [*rows[:at], changed, *rows[at + 1 :]]
