"""What the tests of the command line share: a small net with everything random in it, and reading what a run has written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from minidnn.checkpoint import Checkpoint
from minidnn.graph import Tensor
from minidnn.layers import Graph

TINY = ("--data", "synthetic:44,8,8,3,4", "-a", "tiny", "-b", "8", "--augment")
"""Six steps an epoch, the last of four samples; batch norm, dropout, crop and flip (the last option: not of plan.py).

``tiny`` is known to ``script`` only."""

LENET = ("--data", "synthetic:44,16,16,1,4", "-a", "lenet", "-b", "8")
"""The same for processes of their own."""


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


class Script(Protocol):
    """``script("train", "--data", ...)``."""

    def __call__(self, name: str, *args: str) -> Done: ...


def tiny(g: Graph, x: Tensor, classes: int) -> Tensor:
    """conv-BN-ReLU twice, dropout, global pooling, linear."""
    for index in (1, 2):
        x = g.relu(g.batch_norm(g.conv2d(x, 8, 3, padding=1, name=f"conv{index}"), name=f"bn{index}"))
    return g.linear(g.global_avg_pool(g.dropout(x, 0.5)), classes, name="fc")


def one_pixel(g: Graph, x: Tensor, classes: int) -> Tensor:
    """A batch norm on a map of one pixel: it sees one value per channel and sample."""
    x = g.batch_norm(g.conv2d(x, 8, x.shape[1], name="conv1"), name="bn1")
    return g.linear(g.global_avg_pool(x), classes, name="fc")


def environment(root: Path) -> dict[str, str]:
    """One BLAS thread: nothing is timed here, and the machine is shared."""
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def checked(done: Done) -> Done:
    """Nothing that a script prints holds a traceback or an exception that was swallowed (C5)."""
    for stream in (done.out, done.err):
        assert "Traceback" not in stream and "Exception ignored" not in stream, stream
    return done


def refused(done: Done, *texts: str, code: int = 2) -> str:
    """The one line on the error stream of a command that was refused; it holds all the texts."""
    assert done.code == code, done
    assert done.err.count("\n") == 1 and done.err.startswith("error: "), done.err
    for text in texts:
        assert text in done.err, done.err
    return done.err


def tensors(folder: Path, name: str = "last.safetensors") -> dict[str, NDArray[Any]]:
    """Everything a checkpoint holds."""
    with Checkpoint(folder / name) as checkpoint:
        return dict(checkpoint)


def assert_same_bits(one: Path, other: Path) -> None:
    """Two runs ended in the same parameters, running statistics, optimizer state and counters."""
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name]), name


def records(folder: Path, kind: str, *keys: str) -> list[tuple[Any, ...]]:
    """The values under ``keys`` in the lines of one kind of ``metrics.jsonl``."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [tuple(record[key] for key in keys) for record in lines if record["kind"] == kind]


def read(folder: Path, name: str = "summary.json") -> Any:
    """A JSON file of a run."""
    return json.loads((folder / name).read_text())
