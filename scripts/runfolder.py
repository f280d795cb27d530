"""The folder of a run: what is written, under which name, and that nothing of another run is lost."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Any

from outputs import make_folder

from job import Job
from layup.report import waterfall, write_report
from minidnn.checkpoint import BEST, LAST, Metadata, Progress, newest, save
from minidnn.commandline import TRAINING
from minidnn.errors import UserError
from minidnn.metrics import MetricsLog, provenance, write_json
from minidnn.schedule.plan import keep, naive
from minidnn.schedule.timing import schedule_times
from minidnn.trace import TracedSchedule, write_trace
from minidnn.trainer import Outcome

MOST_LAYERS = 1000
"""Nets with more layers get no waterfall in their report: each of its bars is a plan of its own."""


def choose_folder(output: str | None, resumed: Path | None, data: str, arch: str) -> Path:
    """The folder of this run; makes none.

    That of ``--output``; else that of the checkpoint a run goes on from; else the next free one. Raises UserError for a
    folder with a checkpoint that the run would write over.
    """
    if output is not None:
        folder = Path(output)
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--output {output} is a file: give a folder, new or empty")
        parent = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        if not os.access(parent, os.W_OK):
            raise UserError(f"--output {output} cannot be written (no permission in {parent}): give another folder")
        if newest(folder) is not None and (resumed is None or resumed.resolve().parent != folder.resolve()):
            raise UserError(
                f"--output {output} holds the checkpoint of another run: add --resume auto, or give another folder"
            )
        return folder
    if resumed is not None:
        return resumed.parent
    name = f"{data.partition(':')[0]}-{arch}"
    return next(p for number in count(1) if not (p := Path("runs") / f"{name}-{number}").exists())


class RunFolder:
    """Writes the files of one run; the folder appears with the first."""

    def __init__(self, path: Path, job: Job) -> None:
        self.path = path
        self._job = job

    def begin(self, progress: Progress) -> MetricsLog:
        """Write options, plan, recipe and the picture of one step; return the log of what is measured."""
        make_folder(self.path, f"--output {self.path}")
        step, args = self._job.step, self._job.args
        write_json(self.path / "args.json", vars(args) | provenance(args.seed))
        write_json(self.path / "plan.json", step.plan.to_json() | {"recipe_hash": step.recipe.hash})
        write_json(self.path / "recipe.json", step.recipe.to_json())
        schedule = step.program["train"]
        times = schedule_times(schedule.rows, step.gpu, step.precision.name)
        fixed = (*step.program.persistent.buffers, *step.program.persistent.host_buffers)
        write_trace(self.path / "trace.json", [TracedSchedule("train", schedule.rows, times, fixed)])
        self._report()
        return MetricsLog(self.path / "metrics.jsonl", progress.steps)

    def _report(self) -> None:
        """Draw the step. The waterfall compiles a plan for each technique, which takes long for very deep nets."""
        job = self._job
        step = job.step
        known = [(naive(), job.naive), (keep(), job.keep)]
        stages = waterfall(step, known) if len(step.graph.nodes) <= MOST_LAYERS else ()
        title = f"{job.args.arch} on {job.args.data}"
        budget = None if job.planned is None else job.planned.memory
        path = self.path / "report.html"
        write_report(path, step, planned=job.planned, waterfall=stages, memory=budget, title=title)

    def tensors(self) -> dict[str, Any]:
        """All that a checkpoint holds. Every rank takes part."""
        return self._job.step.state_dict() | self._job.step.optimizer_state_dict()

    def save(self, progress: Progress, best: bool) -> None:
        """Save the last checkpoint and, where it is that, the best."""
        step, args = self._job.step, self._job.args
        tensors = self.tensors()
        options = {name: getattr(args, name) for name in TRAINING}
        metadata = Metadata(progress, args.seed, options, step.recipe.hash)
        save(self.path / LAST, tensors, metadata)
        if best:
            save(self.path / BEST, tensors, metadata)

    def summary(self, outcome: Outcome) -> dict[str, Any]:
        """Write ``summary.json``, and return what it holds. ``acc1`` and ``best_acc1`` are fractions."""
        data = self.figures(outcome)
        write_json(self.path / "summary.json", data)
        return data

    def figures(self, outcome: Outcome) -> dict[str, Any]:
        """What the summary holds."""
        progress = outcome.progress
        known = [a for a in (progress.best_acc1, outcome.acc1) if a is not None]
        return {
            "best_acc1": max(known, default=None),
            "acc1": outcome.acc1,
            "epochs": progress.epoch,
            "steps": progress.steps,
            "updates": progress.updates,
            "dropped_batches": progress.dropped_batches,
            "images_per_second": outcome.images_per_second,
            **self._job.figures(),
            **provenance(self._job.args.seed),
        }
