"""The trainer: epochs over a compiled step. It knows batches, rates and records, and nothing of memory.

Training can stop after any update and go on from there bit for bit: which batch comes next, its augmentation, its dropout
and its learning rate are functions of the counters in ``Progress``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from minidnn.checkpoint import Progress
from minidnn.data import Batches
from minidnn.errors import UserError
from minidnn.interruption import Interruption
from minidnn.lr_schedule import LearningRate
from minidnn.meter import Meter
from minidnn.metrics import MetricsLog
from minidnn.screen import Screen


class Result(Protocol):
    """What one step gives back."""

    @property
    def loss(self) -> float:
        """Mean loss of the batch; reading it waits for the device."""
        ...


class Step(Protocol):
    """What the trainer needs of a ``minidnn.CompiledStep``."""

    def run(self, x: NDArray[Any], y: NDArray[Any], lr: float | None = None, update: bool | None = None) -> Result:
        """One forward and backward; ``update`` True ends an accumulation group early."""
        ...

    def evaluate(self, x: NDArray[Any]) -> NDArray[Any]:
        """Logits, (N, classes)."""
        ...


class Peers(Protocol):
    """What the trainer needs of a step on several ranks. All ranks call it in the same order."""

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        ...

    def agree(self) -> None:
        """Give all ranks one state."""
        ...


@dataclass(frozen=True, slots=True)
class Training:
    """One training, from any point on.

    Attributes:
        step: the compiled step, at the state that the progress describes.
        train, test: batches of the two splits; ``test`` whole and in order.
        rate: learning rate of every update.
        epochs: passes over the training split.
        save: called after every epoch, and where training stops within one, with the progress and whether its accuracy
            is the best so far.
        log, screen: where figures go.
        accumulate: batches an update takes; the last group of an epoch may be smaller.
        max_steps: stop after this many batches since the start, at the end of an update.
        dropped: batches that each epoch leaves out because batch norm cannot use them (``batch_rules.unusable_tail``).
        print_freq: batches between two lines and two records.
        peers: in data parallelism the step itself; ``train`` then makes this rank's share of every batch, and ``test``,
            None for a rank without any, its part of the split.
    """

    step: Step
    train: Batches
    test: Batches | None
    rate: LearningRate
    epochs: int
    save: Callable[[Progress, bool], None]
    log: MetricsLog
    screen: Screen
    accumulate: int = 1
    max_steps: int | None = None
    dropped: int = 0
    print_freq: int = 50
    peers: Peers | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a training ended. ``acc1``: last accuracy, a fraction; ``interrupted``: before the last epoch was done."""

    progress: Progress
    acc1: float | None
    interrupted: bool
    images_per_second: float | None


def fit(training: Training, progress: Progress) -> Outcome:
    """Train from ``progress`` to the last epoch, ``max_steps`` or an interruption; evaluate and save after each epoch.

    The first Ctrl-C or SIGTERM finishes the update under way and saves; the second ends the process at once.

    Raises:
        UserError: the loss is not finite any more, or a checkpoint cannot be written.
    """
    t, meter, acc1 = training, Meter(), None
    with Interruption() as interruption:
        while progress.epoch < t.epochs:
            started = time.perf_counter()
            progress = _train(t, progress, meter, lambda: _any(t.peers, interruption.asked))
            acc1 = evaluate(t.step, t.test, lambda: interruption.asked, t.peers)
            if acc1 is None or progress.batch < len(t.train):
                t.save(progress, False)
                break
            progress, best = _end_of_epoch(t, progress, acc1, time.perf_counter() - started)
            t.save(progress, best)
            if t.max_steps is not None and progress.steps >= t.max_steps:
                break
        interrupted = _any(t.peers, interruption.asked) and progress.epoch < t.epochs
    return Outcome(progress, acc1, interrupted, meter.total)


def _any(peers: Peers | None, flag: bool) -> bool:
    """Whether any rank raises the flag, so that all ranks do the same."""
    return flag if peers is None else True in peers.exchange(flag)


def evaluate(
    step: Step, batches: Batches | None, interrupted: Callable[[], bool] = lambda: False, peers: Peers | None = None
) -> float | None:
    """Top-1 accuracy over a split, a fraction; None if interrupted. With ``peers`` each rank brings a part of the split."""
    if peers is not None:
        peers.agree()
    found = _correct(step, batches, interrupted)
    parts = [found] if peers is None else peers.exchange(found)
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts):
        return None
    return float(sum(right for right, _ in whole) / sum(count for _, count in whole))


def _correct(step: Step, batches: Batches | None, interrupted: Callable[[], bool]) -> tuple[int, int] | None:
    """Samples classified rightly, and all samples; None if interrupted."""
    if batches is None:
        return 0, 0
    correct = 0
    with closing(batches.epoch(0)) as whole:
        for x, y in whole:
            if interrupted():
                return None
            correct += int(np.count_nonzero(step.evaluate(x).argmax(axis=1) == y))
    return correct, len(batches.dataset)


def _train(t: Training, progress: Progress, meter: Meter, interrupted: Callable[[], bool]) -> Progress:
    """The rest of an epoch, or less of it: to the end of the update at which training has to stop."""
    total = len(t.train)
    pending: list[tuple[int, Result]] = []  # results whose loss has not been read, since reading waits for the device
    meter.start()
    title, width = f"Epoch: [{progress.epoch}]", len(str(total))
    batches = t.train.epoch(progress.epoch, progress.batch)
    with t.screen.progress(title, total, progress.batch) as bar, closing(batches):
        for x, y in batches:
            if progress.batch % t.accumulate == 0:
                stop = interrupted() or (t.max_steps is not None and progress.steps >= t.max_steps)
                if stop:
                    break
            done = progress.batch + 1
            updates = done == total or done % t.accumulate == 0
            lr = t.rate(progress.updates)
            whole = t.train.samples(progress.batch)
            extra: dict[str, Any] = {} if t.peers is None else {"of": whole}
            result = t.step.run(x, y, lr=lr, update=True if updates else None, **extra)
            pending.append((t.train.counted(progress.batch), result))
            progress = replace(progress, batch=done, steps=progress.steps + 1, updates=progress.updates + int(updates))
            bar.advance()
            meter.count(whole)
            if done % t.print_freq == 0:
                progress, loss = _read(pending, progress, t.rate.base, t.peers)
                speed = meter.lap()
                bar.show(f"{title}[{done:>{width}}/{total}]  loss {loss:.4f}  lr {lr:.4g}  {speed:,.0f} images/s")
                t.log.write(
                    kind="step", step=progress.steps, epoch=progress.epoch, batch=done, update=progress.updates,
                    loss=loss, lr=lr, images_per_second=speed,
                )  # fmt: skip
        progress, _ = _read(pending, progress, t.rate.base, t.peers)
    meter.stop()
    return progress


def _read(
    pending: list[tuple[int, Result]], progress: Progress, lr: float, peers: Peers | None
) -> tuple[Progress, float]:
    """Read the pending losses, of all ranks, into the progress; also their mean."""
    before = progress.loss_samples, progress.loss_sum
    total, samples = (progress.loss_sum, progress.loss_samples) if peers is None else (0.0, 0)
    for number, (count, result) in enumerate(pending, start=1):
        loss = result.loss
        if not math.isfinite(loss):
            at = progress.steps - len(pending) + number
            raise UserError(
                f"the loss became {loss} at step {at}: begin again with --lr below {lr:g}, or with --warmup"
            )
        total, samples = total + loss * count, samples + count
    pending.clear()
    if peers is not None:
        sums = peers.exchange((total, samples))
        total = progress.loss_sum + sum(each for each, _ in sums)
        samples = progress.loss_samples + sum(count for _, count in sums)
    mean = (total - before[1]) / max(samples - before[0], 1)
    return replace(progress, loss_sum=total, loss_samples=samples), mean


def _end_of_epoch(t: Training, progress: Progress, acc1: float, seconds: float) -> tuple[Progress, bool]:
    """Line, record and the progress at the start of the next epoch; and whether the accuracy is the best so far."""
    best = progress.best_acc1 is None or acc1 > progress.best_acc1
    best_acc1 = acc1 if best or progress.best_acc1 is None else progress.best_acc1
    loss = progress.loss_sum / max(progress.loss_samples, 1)
    lr = t.rate(max(progress.updates - 1, 0))
    accuracy = f"Acc@1 {acc1:.2%} (best {best_acc1:.2%})"
    t.screen.line(f"Epoch: [{progress.epoch}]  loss {loss:.4f}  {accuracy}  lr {lr:.4g}  {seconds:.1f} s")
    t.log.write(
        kind="epoch", step=progress.steps, epoch=progress.epoch, train_loss=loss, acc1=acc1, best_acc1=best_acc1, lr=lr,
        seconds=seconds,
    )  # fmt: skip
    dropped = progress.dropped_batches + t.dropped
    after = Progress(
        epoch=progress.epoch + 1, steps=progress.steps, updates=progress.updates, best_acc1=best_acc1,
        dropped_batches=dropped,
    )  # fmt: skip
    return after, best
