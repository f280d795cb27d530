"""Train a convolutional net under a byte budget: python scripts/train.py --data digits -a resnet20 --memory 24MiB"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from job import Job, assemble, choose_device, load_data
from minidnn.checkpoint import LAST, Checkpoint, Metadata, Progress, newest
from minidnn.commandline import Parser, add_memory, add_model, add_training, run
from minidnn.data import Batches
from minidnn.errors import UserError
from minidnn.lr_schedule import LearningRate, parse_shape
from minidnn.screen import Screen
from minidnn.trainer import Outcome, Training, evaluate, fit
from runfolder import RunFolder, choose_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises what ``minidnn.commandline.run`` prints."""
    parser = Parser(__doc__ or "")
    for add in (add_model, add_training, add_memory):
        add(parser)
    args = parser.parse_args(argv)
    screen = Screen()
    with ExitStack() as stack:
        checkpoint = open_checkpoint(args, screen)
        if checkpoint is not None:
            stack.enter_context(checkpoint)
        saved = checkpoint.metadata if checkpoint is not None and args.resume is not None else None
        device, line = choose_device(args.device)
        job = assemble(args, device=None if args.dry_run else device, saved=None if saved is None else saved.args)
        stack.callback(lambda: job.step.close())
        screen.line(line)
        if args.dry_run:
            screen.line(describe(job) + "\n" + job.table())
            return 0
        folder = choose_folder(args.output, None if saved is None else checkpoint.path, job.args.data, job.args.arch)
        job, splits = load_data(job)
        train, test = job.batches(splits)
        screen.line(describe(job))
        if checkpoint is not None:
            job.step.load_state_dict(checkpoint.weights())
        if args.evaluate:
            return evaluate_only(job, test, screen)
        progress = Progress()
        if saved is not None:
            job.step.load_optimizer_state_dict(checkpoint.optimizer())
            progress = saved.progress
        return train_and_report(job, train, test, progress, saved, RunFolder(folder, job), screen)
