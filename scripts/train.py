"""Train a convolutional net under a byte budget: python scripts/train.py --data digits -a resnet20 --memory 24MiB"""

from __future__ import annotations

import threads  # noqa: F401  (before NumPy)

# isort: split
import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

import ranked
from arguments import choose_device
from job import Job, assemble, load_data
from minidnn.checkpoint import Checkpoint, Progress
from minidnn.commandline import Parser, add_memory, add_model, add_training, complete, run
from minidnn.data import Batches
from minidnn.lr_schedule import LearningRate, parse_shape
from minidnn.parallel.step import ParallelStep
from minidnn.parallel.team import Team
from minidnn.screen import Screen
from minidnn.trainer import Outcome, Peers, Training, evaluate, fit
from resume import check_unchanged, find_checkpoint, notices
from runfolder import RunFolder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises what ``minidnn.commandline.run`` prints."""
    parser = Parser((__doc__ or "").strip())
    for add in (add_model, add_training, add_memory):
        add(parser)
    args = ranked.once(lambda: parser.parse_args(argv))
    team = ranked.start(args)
    with ranked.context(team):
        code = train(args, team)
    return ranked.leave(team, code)


def train(args: Namespace, team: Team | None) -> int:
    """Do what the options say, on this rank."""
    screen = ranked.screen_of(team)
    path = find_checkpoint(args, screen)
    saved = None
    if path is not None:
        with Checkpoint(path) as checkpoint:  # a damaged file is refused here, before anything else is done
            saved = checkpoint.metadata if args.resume is not None else None
    device, line = choose_device(args.device, args.profile)
    screen.line(line)
    args = complete(args, None if saved is None else saved.args)
    if saved is not None:
        check_unchanged(args, saved)
    peers: dict[str, Any] = {}
    if team is not None:
        peers = {"communicator": team.communicator, "strategy": ranked.strategy_of(args)}
    job = assemble(args, device=None if args.dry_run else device, **peers)
    if args.dry_run:
        screen.line(f"{describe(job)}\n{job.table()}")
        return 0
    folder = ranked.folder_of(team, args, None if saved is None else path)
    with ExitStack() as stack:
        # A loss that runs away ends the run with a sentence of ours; NumPy's warnings on the way there would hide it.
        stack.enter_context(np.errstate(over="ignore", invalid="ignore", divide="ignore"))
        stack.callback(lambda: job.close())
        job, splits = load_data(job)
        ranked.same_data(team, splits)
        train, test = ranked.batches(job, splits)
        screen.line(describe(job, len(splits.test)))
        progress = Progress() if saved is None else saved.progress
        if path is not None:
            with Checkpoint(path) as checkpoint:
                job.step.load_state_dict(checkpoint.weights())
                if saved is not None and not args.evaluate:
                    job.step.load_optimizer_state_dict(checkpoint.optimizer())
        if args.evaluate:
            return evaluate_only(job, test, len(splits.test), screen)
        rate = rate_of(job, train)
        if saved is not None and path is not None:
            for notice in notices(job, saved, rate, path.parent):
                screen.line(f"notice: {notice}")
        return train_and_report(job, train, test, rate, progress, ranked.open_folder(team, folder, job), screen)


def describe(job: Job, test: int | None = None) -> str:
    """What is trained on what and how, in two lines: nothing is scaled behind the user's back."""
    a, f = job.args, job.facts
    left_out = f.train % a.batch_size if job.drop_last else 0
    steps = f.train // a.batch_size if job.drop_last else -(-f.train // a.batch_size)
    rest = f.train % a.batch_size
    tail = (
        f", the last of {rest}" if rest and not job.drop_last else f", {left_out} samples left out" if left_out else ""
    )
    size = a.image_size or f.height
    images = f"{f.train:,} training images" if test is None else f"{f.train:,} training and {test:,} test images"
    lines = [
        f"{a.arch}: {job.graph.parameter_count:,} parameters, {a.precision}; {a.data}: {images}, "
        f"{size}x{size if a.image_size else f.width}x{f.channels}, {f.classes} classes",
        f"batch {a.batch_size} (global), {steps} steps an epoch{tail}, {a.epochs} epochs; {a.opt}, lr {a.lr:g} "
        f"{a.lr_sched}"
        + (f", an update every {a.accum} batches" if a.accum > 1 else "")
        + (f", clip: {a.clip_grad_norm:g}" if a.clip_grad_norm is not None else "")
        + f"; plan {job.step.plan.policy}"
        + whole_gradients(job),
    ]
    lines += [ranked.describe(job.step)] if isinstance(job.step, ParallelStep) else []
    lines += [*job.decisions(), *(f"notice: {note}" for note in job.notes)]
    return "\n".join(lines)


def whole_gradients(job: Job) -> str:
    """Why weights are not updated layer by layer, where the plan leaves that open. Data parallelism has a line of its own."""
    a, step = job.args, job.step
    needs = {
        "accumulation": a.accum > 1,
        "clipping": step.clip_grad_norm is not None,
        "dynamic loss scaling": step.precision.scaled,
    }
    why = " and ".join(name for name, given in needs.items() if given)
    said = isinstance(step, ParallelStep) or step.plan.reuse.layerwise_update is False or not why
    return "" if said else f"; layer-wise update off: {why} {'need' if ' and ' in why else 'needs'} whole gradients"


def rate_of(job: Job, train: Batches) -> LearningRate:
    """The learning rate of every update."""
    a = job.args
    return LearningRate(a.lr, math.ceil(len(train) / a.accum), a.epochs, parse_shape(a.lr_sched), a.warmup)


def peers_of(job: Job) -> Peers | None:
    """The step, where it has peers."""
    return job.step if isinstance(job.step, ParallelStep) else None


def evaluate_only(job: Job, test: Batches | None, count: int, screen: Screen) -> int:
    """Print the accuracy, and write nothing."""
    accuracy = evaluate(job.step, test, peers=peers_of(job))
    assert accuracy is not None
    screen.line(f"Acc@1 {accuracy:.2%} ({round(accuracy * count):,} of {count:,} test images)")
    return 0


def train_and_report(
    job: Job,
    train: Batches,
    test: Batches | None,
    rate: LearningRate,
    progress: Progress,
    folder: RunFolder,
    screen: Screen,
) -> int:
    """Verify, train, and say how it ended; return the exit code."""
    args = job.args
    if progress.epoch >= args.epochs:
        screen.line(f"nothing is left to train: {progress.epoch} epochs are done; more --epochs go on")
        return 0
    verified = args.verify or job.device == "emulated"
    if verified:
        with closing(train.epoch(0)) as batches:
            job.step.verify(*next(batches))
    screen.line(job.table())
    if verified:
        screen.line(measured_text(job))
    training = Training(
        step=job.step, train=train, test=test, rate=rate, epochs=args.epochs, save=folder.save, log=folder.begin(progress),
        screen=screen, accumulate=args.accum, max_steps=args.max_steps, dropped=int(job.dropped is not None),
        print_freq=args.print_freq, peers=peers_of(job),
    )  # fmt: skip
    outcome = fit(training, progress)
    summary = folder.summary(outcome)
    screen.line(ending(outcome, summary["best_acc1"], len(train), folder))
    return 130 if outcome.interrupted else 0


def measured_text(job: Job) -> str:
    """What has been compared: ``verify`` would have raised, had anything differed."""
    schedules = job.step.program.schedules
    rows = sum(len(schedule.rows) for schedule in schedules.values())
    return f"measured as predicted, to the byte, at each of the {rows:,} rows of {', '.join(schedules)}"


def ending(outcome: Outcome, best_acc1: float | None, batches: int, folder: RunFolder) -> str:
    """The last line of a run."""
    p = outcome.progress
    where = f"{folder.path}/last.safetensors"
    if outcome.interrupted:
        return f"interrupted in epoch {p.epoch} after batch {p.batch} of {batches}: saved; go on with --resume {where}"
    speed = "" if outcome.images_per_second is None else f", {outcome.images_per_second:,.0f} images/s"
    accuracy = "" if best_acc1 is None else f"best Acc@1 {best_acc1:.2%}, "
    dropped = f", {p.dropped_batches} batches of one image left out" if p.dropped_batches else ""
    return f"{accuracy}{p.steps:,} steps{speed}{dropped}; saved {where}"


if __name__ == "__main__":
    sys.exit(run(main))
