"""Learning-rate schedules: pure functions of the number of updates done, so that a resumed run has the same rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from minidnn.errors import UserError, nearest

FORMS = "constant, cosine, step:EPOCHS:FACTOR or multistep:EPOCH,EPOCH:FACTOR"


@dataclass(frozen=True, slots=True)
class Constant:
    """The base rate throughout."""

    def factor(self, epoch: float, warmup: float, epochs: float) -> float:
        """What the base rate is multiplied with ``epoch`` epochs (a fraction counts) after the start."""
        return 1.0


@dataclass(frozen=True, slots=True)
class Cosine:
    """Half a cosine, from the base rate after the warm-up to zero at the end of training (Loshchilov & Hutter 2017)."""

    def factor(self, epoch: float, warmup: float, epochs: float) -> float:
        """(1 + cos(pi t)) / 2, where t goes from 0 to 1 between the end of the warm-up and the last epoch."""
        progress = min(1.0, (epoch - warmup) / max(epochs - warmup, 1e-9))
        return 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True)
class Step:
    """The rate times ``gamma`` after every ``every`` epochs, counted from the start of training, not of the run."""

    every: int
    gamma: float

    def factor(self, epoch: float, warmup: float, epochs: float) -> float:
        """gamma ** floor(epoch / every)."""
        return float(self.gamma ** (int(epoch) // self.every))


@dataclass(frozen=True, slots=True)
class MultiStep:
    """The rate times ``gamma`` after each of the ``milestones``, in epochs."""

    milestones: tuple[int, ...]
    gamma: float

    def factor(self, epoch: float, warmup: float, epochs: float) -> float:
        """gamma ** (milestones passed)."""
        return float(self.gamma ** sum(epoch >= milestone for milestone in self.milestones))


Shape = Constant | Cosine | Step | MultiStep


def parse_shape(text: str) -> Shape:
    """Read the value of ``--lr-sched``. Raises UserError with the known forms."""
    name, *parts = text.split(":")
    try:
        match name, parts:
            case "constant", []:
                return Constant()
            case "cosine", []:
                return Cosine()
            case "step", [every, gamma] if int(every) >= 1 and float(gamma) > 0:
                return Step(int(every), float(gamma))
            case "multistep", [milestones, gamma] if float(gamma) > 0:
                at = tuple(int(m) for m in milestones.split(","))
                if min(at) >= 1 and list(at) == sorted(set(at)):
                    return MultiStep(at, float(gamma))
    except ValueError:
        pass
    if name in ("constant", "cosine", "step", "multistep"):
        raise UserError(
            f"--lr-sched {text} cannot be read: give {FORMS}; epochs rise from at least 1, FACTOR is above 0"
        )
    raise UserError(f"unknown --lr-sched {text!r}; {nearest(name, ('constant', 'cosine', 'step', 'multistep'))}")


@dataclass(frozen=True, slots=True)
class LearningRate:
    """The rate of every update of a run; ``rate(update)`` is all there is, no state, nothing to restore.

    Attributes:
        base: the rate after the warm-up.
        updates_per_epoch: optimizer updates an epoch takes: its steps divided by the accumulated ones, rounded up.
        epochs: length of training; only the cosine depends on it.
        shape: how the rate falls.
        warmup: epochs in which it first rises linearly, update by update, from ``base / n`` to ``base``
            (Goyal et al., 2017); 0 for none.
    """

    base: float
    updates_per_epoch: int
    epochs: int
    shape: Shape
    warmup: float = 0.0

    def __post_init__(self) -> None:
        if not (self.base >= 0 and math.isfinite(self.base)):
            raise UserError(f"learning rate {self.base} is not possible: give a number of at least 0.")
        if not 0 <= self.warmup < max(self.epochs, 1):
            raise UserError(
                f"a warm-up of {self.warmup:g} epochs does not fit {self.epochs} epochs of training: "
                "give at least 0 and fewer than --epochs."
            )

    def __call__(self, update: int) -> float:
        """The rate of update number ``update``, counted from 0 at the start of training."""
        warmup_updates = round(self.warmup * self.updates_per_epoch)
        if update < warmup_updates:
            return self.base * (update + 1) / warmup_updates
        return self.base * self.shape.factor(
            update / self.updates_per_epoch, warmup_updates / self.updates_per_epoch, self.epochs
        )
