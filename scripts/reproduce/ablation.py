"""What every reuse of bytes saves: each switched off alone, from ``keep``, and on alone, from ``naive``.

    python scripts/reproduce/ablation.py [--nets vgg16:64,resnet50:64] [--profile k40]

The thesis reuses gradient maps in a sliding window, one convolution workspace, and cuDNN's handle data, layer by layer. Here
there is one handle anyway, and three more switches: lifetimes, in-place layers, layer-wise update. No switch changes a bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from figures import WORKSPACES, markdown, options, save, signed, size
from policies import nets_of

import models
from layup.context import Context
from layup.evaluate import Candidate
from minidnn.commandline import run
from minidnn.graph import Role
from minidnn.prepare import prepare
from minidnn.schedule.instruction import Buffer, Instruction, Op
from minidnn.schedule.plan import Plan, Reuse, keep, naive

NETS = "lenet:128,vgg16:64,resnet50:64,googlenet:64,densenet121:64"
SWITCHES = tuple(field.name for field in fields(Reuse))


class Row(NamedTuple):
    """One setting of the switches on one net.

    ``saves_bytes``: reserved bytes that the technique saves: without it in a row "off alone", with it in "on alone".
    ``costs_seconds``: by how much the technique makes a step longer. ``gradient_window``: most gradients of activations
    alive at once, and their bytes.
    """

    net: str
    batch: int
    setting: str
    technique: str
    peak_bytes: int
    reserved_bytes: int
    saves_bytes: int
    step_seconds: float
    costs_seconds: float
    gradient_window: int
    gradient_bytes: int


def gradient_window(rows: Sequence[Instruction]) -> tuple[int, int]:
    """Most gradients of activations alive at once, and the most bytes they take. A gradient through an addition is the same."""
    alive: dict[Buffer, None] = {}
    most = most_bytes = nbytes = 0
    for row in rows:
        buffer = row.buffer
        if buffer is None or buffer.role is not Role.GRAD or buffer.space != "device":
            continue
        if row.op is Op.ALLOC:
            alive[buffer] = None
            nbytes += buffer.footprint
        elif row.op is Op.FREE:
            del alive[buffer]
            nbytes -= buffer.footprint
        most, most_bytes = max(most, len(alive)), max(most_bytes, nbytes)
    return most, most_bytes


def settings() -> Iterator[tuple[str, str, Plan]]:
    """Setting, technique and plan, ``keep`` and ``naive`` first of their kind."""
    yield "keep", "", keep()
    for name in SWITCHES:
        yield "off alone", name, replace(keep(), reuse=replace(Reuse(), **{name: False}))
    yield "naive", "", naive()
    for name in SWITCHES:
        yield "on alone", name, replace(naive(), reuse=replace(naive().reuse, **{name: True}))


def ablation(net: str, batch: int, profile: str) -> list[Row]:
    """All settings on one net."""
    context = Context(prepare(models.build(net, batch=batch), device=None, profile=profile))
    rows: list[Row] = []
    base: Row | None = None
    for setting, technique, plan in settings():
        candidate = Candidate(context, plan)
        prediction, seconds = candidate.program.prediction, candidate.seconds
        reserved = prediction.reserved_bytes
        saved = cost = 0.0
        if technique:
            assert base is not None
            sign = 1 if setting == "off alone" else -1
            saved, cost = sign * (reserved - base.reserved_bytes), -sign * (seconds - base.step_seconds)
        window = gradient_window(candidate.train.rows)
        row = Row(net, batch, setting, technique, prediction.peak_bytes, reserved, int(saved), seconds, cost, *window)
        base = base if technique else row
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = options(__doc__, "h200")
    parser.add_argument("--nets", metavar="NAME:BATCH,...", help=f"nets and batches ({NETS})")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for net, batch in nets_of(args.nets or ("lenet:8" if args.tiny else NETS)):
        found = ablation(net, batch, args.profile)
        print(f"{net}, batch {batch}, fp32, SGD with momentum, {args.profile}\n\n{table(found)}\n", flush=True)
        rows += found
    print(WORKSPACES)
    result = {"profile": args.profile, "rows": [row._asdict() for row in rows]}
    save(f"ablation_{Path(args.profile).stem}", result, args.json, args.tiny)
    return 0


def table(rows: Sequence[Row]) -> str:
    """The settings of one net."""
    head = ("setting", "technique", "peak", "reserved", "saves", "step ms", "costs ms", "gradients at once")
    cells = [
        (
            row.setting,
            row.technique.replace("_", " "),
            size(row.peak_bytes),
            size(row.reserved_bytes),
            size(row.saves_bytes) if row.technique else None,
            f"{row.step_seconds * 1e3:,.2f}",
            signed(row.costs_seconds * 1e3, 2) if row.technique else None,
            f"{row.gradient_window} ({size(row.gradient_bytes)})",
        )
        for row in rows
    ]
    return markdown(head, cells)


if __name__ == "__main__":
    sys.exit(run(main))
