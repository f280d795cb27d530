"""Training on several ranks: rank 0 speaks and writes, the others keep step. Used by ``train.py``."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import layup
import minidnn
import models
from job import Job
from minidnn.checkpoint import Checkpoint, Progress, newest
from minidnn.data import Batches, Splits
from minidnn.errors import UserError
from minidnn.metrics import MetricsLog
from minidnn.parallel.agree import checksum, compare
from minidnn.parallel.launch import is_first, place
from minidnn.parallel.step import ParallelStep
from minidnn.parallel.team import Team, gather
from minidnn.schedule.ranks import Strategy, share
from minidnn.screen import Screen
from minidnn.trainer import Outcome
from runfolder import RunFolder, choose_folder

T = TypeVar("T")
FILES = ("weights", "plan", "recipe")
"""Options whose value is a path, which can differ between hosts; what is read from there is compared where it is used."""
OF_A_HOST = ("output", "resume", "profile", "workers")
"""Options that can differ between hosts."""
OTHERS_SECONDS = 3.0
"""After which a launcher has ended a rank, if another one has failed."""


class Silent(Screen):
    """The screen of a rank that says nothing."""

    def __init__(self) -> None:
        super().__init__(interactive=False)

    def line(self, text: str) -> None:
        """Nothing."""


class QuietFolder(RunFolder):
    """The folder of a run for a rank that writes no more than its own log there."""

    def __init__(self, path: Path, job: Job, rank: int) -> None:
        super().__init__(path, job)
        self._rank = rank

    def begin(self, progress: Progress) -> MetricsLog:
        """The log of this rank."""
        self.path.mkdir(parents=True, exist_ok=True)
        return MetricsLog(self.path / f"metrics.rank{self._rank}.jsonl", progress.steps)

    def save(self, progress: Progress, best: bool) -> None:
        """Take part in gathering the state, which rank 0 writes."""
        self.tensors()

    def summary(self, outcome: Outcome) -> dict[str, Any]:
        """What rank 0 writes."""
        return self.figures(outcome)


def start(args: Namespace) -> Team | None:
    """The team of the options and the environment; None without either. Only rank 0 says what is wrong with them."""

    def work() -> Team | None:
        for option, given in (("--ring-warmup", args.ring_warmup), ("--ring-timeout", args.ring_timeout)):
            if given is not None and args.strategy is None:
                raise UserError(
                    f"{option} {given:g} has no effect without --strategy: leave it out, or name a strategy"
                )
        if args.strategy is not None:
            strategy_of(args)
        return gather(os.environ, args.strategy, args.device, args.ring_timeout or 30.0)

    team = once(work)
    if team is not None:
        try:
            compare(team.communicator, in_common(args))
        except Exception as error:
            team.fail(error)
            raise
        args.device = team.device
    return team


def in_common(args: Namespace) -> dict[str, str]:
    """What all ranks must have been given alike: the program, the options, and where training begins.

    Files may lie elsewhere on another host: of those, only whether they are given is compared.
    """
    files = (__file__, *(package.__file__ for package in (minidnn, layup, models)))
    program = sources(*(Path(file).parent for file in files if file is not None))
    facts = {"program": f"version {minidnn.__version__}, sources {program}"}
    for name, value in vars(args).items():
        if name in OF_A_HOST:
            continue
        if name == "data" and value is not None and value.partition(":")[0] != "synthetic":
            value = value.partition(":")[0]
        text = "nothing" if value is None else "a file" if name in FILES else str(value)
        facts[f"option --{name.replace('_', '-')}"] = text
    return facts | {"checkpoint to go on from": begin_of(args)}


def sources(*folders: Path) -> str:
    """Twelve hexadecimal digits that name a program: the Python files of some folders."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            found.update(f"{folder.name}/{path.relative_to(folder).as_posix()}".encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def begin_of(args: Namespace) -> str:
    """What there is behind ``--resume``. Raises UserError for a damaged checkpoint."""
    path = newest(Path(args.output)) if args.resume == "auto" and args.output else Path(args.resume or "")
    if path is None or not path.is_file():
        return "none"
    with Checkpoint(path) as checkpoint:
        done = checkpoint.metadata.progress
    return f"one of epoch {done.epoch}, batch {done.batch}, {done.steps} steps in all"


def once(work: Callable[[], T]) -> T:
    """Do what mostly fails alike on all ranks, before they can tell each other: rank 0 complains for all.

    Launchers end the whole job with the first process that ends badly, except Slurm's. Who is alive a while later has made
    a mistake of its own, and says so.
    """
    try:
        return work()
    except UserError as error:
        if is_first(os.environ):
            raise
        time.sleep(OTHERS_SECONDS)
        with suppress(UserError):  # the mistake may be the environment itself
            here = place(os.environ)
            if here.launcher != "Slurm":
                print(f"error: rank {here.rank}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None


def context(team: Team | None) -> AbstractContextManager[object]:
    """In it an error of one rank ends all ranks."""
    return nullcontext() if team is None else team


def leave(team: Team | None, code: int) -> int:
    """The exit code of this rank, once all are done."""
    return code if team is None else team.leave(code)


def screen_of(team: Team | None) -> Screen:
    """Rank 0 speaks."""
    return Silent() if team is not None and team.rank else Screen()


def strategy_of(args: Namespace) -> Strategy:
    """The strategy of the options."""
    strategy = Strategy.parse(args.strategy)
    return replace(strategy, warmup=args.ring_warmup) if args.ring_warmup else strategy


def folder_of(team: Team | None, args: Namespace, resumed: Path | None) -> Path:
    """The folder of the run, which rank 0 chooses."""
    first = team is None or team.rank == 0
    chosen = choose_folder(args.output, resumed, args.data, args.arch) if first else None
    return Path(str(chosen if team is None else team.communicator.exchange(chosen)[0]))


def open_folder(team: Team | None, path: Path, job: Job) -> RunFolder:
    """Rank 0 writes."""
    return RunFolder(path, job) if team is None or team.rank == 0 else QuietFolder(path, job, team.rank)


def same_data(team: Team | None, splits: Splits) -> None:
    """Refuse ranks that have read different data."""
    if team is not None:
        facts = {
            f"{name} data": f"{len(data)} images, {checksum({'labels': data.labels, 'first': data.images[:8]})}"
            for name, data in (("training", splits.train), ("test", splits.test))
        }
        compare(team.communicator, facts)


def batches(job: Job, splits: Splits) -> tuple[Batches, Batches | None]:
    """This rank's share of every training batch, and its part of the test split: None where there is nothing left."""
    step = job.step
    if not isinstance(step, ParallelStep):
        return job.batches(splits)
    part = share(len(splits.test), step.ranks.rank, step.ranks.size)
    mine = part.stop > part.start
    test = (
        replace(splits.test, images=splits.test.images[part], labels=splits.test.labels[part]) if mine else splits.test
    )
    train, tested = job.batches(splits._replace(test=test), step.ranks.rank, step.ranks.size)
    return train, tested if mine else None


def describe(step: Any) -> str:
    """Who takes part, and how batch and rate belong together."""
    assert isinstance(step, ParallelStep)
    ranks = step.ranks
    each = "/".join(map(str, sorted({ranks.of(r).local(ranks.batch) for r in range(ranks.size)}, reverse=True)))
    delay = f", {ranks.strategy.warmup} updates of warm-up without delay" if ranks.strategy.warmup else ""
    alone = " (mpiexec, srun or torchrun would start several)" if step.communicator.name == "in-process" else ""
    late = f"updates one step late{delay}, which often wants half the --lr; " if ranks.strategy.delayed else ""
    return (
        f"{ranks.size} rank{'s' * (ranks.size > 1)} by {step.communicator.name}{alone}, "
        f"strategy {ranks.strategy.name} ({ranks.strategy.implementation}): "
        f"{late}global batch {ranks.batch}, {each} a rank, gradients averaged over samples, the rate as given; "
        "layer-wise update off"
    )
