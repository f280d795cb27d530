"""Going on from a checkpoint: which one, what has to stay as it was, and what is said where something did not."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from arguments import read_json
from job import Job
from minidnn.checkpoint import Metadata, newest
from minidnn.errors import UserError
from minidnn.lr_schedule import LearningRate, parse_shape
from minidnn.screen import Screen

_FIXED = ("arch", "blocks", "image_size", "num_classes", "batch_size", "accum", "drop_last", "opt", "seed")
"""Options on which the counters, the order of the data or the names in the file depend."""

_FREE = (
    "epochs",
    "lr",
    "lr_sched",
    "warmup",
    "momentum",
    "wd",
    "clip_grad_norm",
    "precision",
    "label_smoothing",
    "augment",
)


def find_checkpoint(args: Namespace, screen: Screen) -> Path | None:
    """The file of ``--resume`` or ``--weights``; None to begin at the beginning. Raises UserError for a contradiction."""
    if args.resume is not None and args.weights is not None:
        raise UserError(
            f"--resume {args.resume} goes on with a run and --weights {args.weights} begins one: give one of them"
        )
    if args.evaluate and args.resume is None and args.weights is None:
        raise UserError("--evaluate has no weights to evaluate: add --resume FILE or --weights FILE")
    if args.resume != "auto":
        path = args.resume if args.resume is not None else args.weights
        return None if path is None else Path(path)
    if args.output is None:
        raise UserError("--resume auto looks for the newest checkpoint in the folder of the run: add --output DIR")
    found = newest(Path(args.output))
    if found is None and args.evaluate:
        raise UserError(f"--resume auto finds no checkpoint in {args.output}: give another --output, or a file")
    if found is None:
        screen.line(f"notice: there is no checkpoint in {args.output} yet: beginning at the beginning")
        args.resume = None
    return found


def check_unchanged(args: Namespace, saved: Metadata) -> None:
    """Refuse options under which the run could not go on."""
    for name in _FIXED:
        before, now = saved.args.get(name), getattr(args, name)
        if before != now:
            raise UserError(
                f"--{name.replace('_', '-')} {now} is not what the checkpoint was trained with, {before}: leave the option "
                "out to go on, or begin a new run from its --weights"
            )


def _budgets(args: Namespace, folder: Path) -> Iterator[str]:
    """What bounded the run so far and does not bound the rest of it: a checkpoint, which may go elsewhere, holds none."""
    try:
        before = read_json(str(folder / "args.json"))
    except UserError:
        return
    for name in ("memory", "process_memory", "host_memory"):
        if before.get(name) is not None and getattr(args, name) is None:
            option = f"--{name.replace('_', '-')}"
            yield f"the run so far had {option} {before[name]}, and this part of it has none: give it again to keep to it"


def notices(job: Job, saved: Metadata, rate: LearningRate, folder: Path) -> Iterator[str]:
    """One line for each thing that makes the rest of the run another one than it would have been; ``folder``: so far its."""
    args, old = job.args, saved.args
    yield from _budgets(args, folder)
    changed = [name for name in _FREE if old.get(name) != getattr(args, name)]
    if {"epochs", "lr", "lr_sched", "warmup"} & set(changed):
        update = saved.progress.updates
        before = replace(
            rate, base=old["lr"], epochs=old["epochs"], shape=parse_shape(old["lr_sched"]), warmup=old["warmup"]
        )
        changes = ", ".join(f"--{n.replace('_', '-')} {old.get(n)} -> {getattr(args, n)}" for n in changed)
        yield f"{changes}: the learning rate of the next update is {before(update):.6g} -> {rate(update):.6g}"
    elif changed:
        yield "changed: " + ", ".join(f"--{n.replace('_', '-')} {old.get(n)} -> {getattr(args, n)}" for n in changed)
    if job.step.recipe.hash != saved.recipe_hash:
        yield (
            f"the recipe is {job.step.recipe.hash}, the checkpoint's was {saved.recipe_hash}: what follows is not bit for bit "
            "what it would have been; --recipe with the recipe.json of the run repeats it"
        )
