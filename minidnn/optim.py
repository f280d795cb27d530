"""Optimizers: which kernel updates a layer's weights, and which tensors it keeps from step to step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from minidnn.errors import UserError


class Optimizer(Protocol):
    """What lowering and the step need to know of an optimizer."""

    @property
    def lr(self) -> float:
        """Learning rate where ``step.run`` is given none."""
        ...

    @property
    def kernel(self) -> str:
        """Kernel called as ``kernel(weight, *slots, gradient, scalars, **attrs)``."""
        ...

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the tensors like the weights that it keeps, all starting at zero."""
        ...

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Constants of the kernel."""
        ...

    def bias_corrections(self, update: int) -> tuple[float, float]:
        """Scalars BIAS1 and BIAS2 of update number ``update``, which counts from 1."""
        ...


def _check(name: str, value: float, low: float, high: float = math.inf) -> None:
    if not (low <= value < high):
        bound = f"at least {low:g}" + (f" and below {high:g}" if high < math.inf else "")
        raise UserError(f"{name}={value!r} is not a number {bound}")


@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay, as ``torch.optim.SGD`` defines them.

    g = gradient + weight_decay * w;  v = momentum * v + g;  w -= lr * (g + momentum * v if nesterov else v).
    Source of Nesterov's form: Sutskever et al. 2013.
    """

    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check("lr", self.lr, 0.0)
        _check("momentum", self.momentum, 0.0, 1.0)
        _check("weight_decay", self.weight_decay, 0.0)
        if self.nesterov and not self.momentum:
            raise UserError("nesterov=True needs a momentum above 0; 0.9 is usual")

    @property
    def kernel(self) -> str:
        """``sgd_update`` without momentum, else ``sgd_momentum_update``."""
        return "sgd_momentum_update" if self.momentum else "sgd_update"

    @property
    def slots(self) -> tuple[str, ...]:
        """The velocity, if there is momentum."""
        return ("momentum",) if self.momentum else ()

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Constants of the kernel."""
        if not self.momentum:
            return {"weight_decay": self.weight_decay}
        return {"momentum": self.momentum, "nesterov": self.nesterov, "weight_decay": self.weight_decay}

    def bias_corrections(self, update: int) -> tuple[float, float]:
        """Not used by SGD."""
        return 1.0, 1.0


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam (Kingma & Ba 2015) with L2 weight decay added to the gradient, as ``torch.optim.Adam`` defines it."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check("lr", self.lr, 0.0)
        _check("betas[0]", self.betas[0], 0.0, 1.0)
        _check("betas[1]", self.betas[1], 0.0, 1.0)
        _check("eps", self.eps, 0.0)
        _check("weight_decay", self.weight_decay, 0.0)

    kernel = "adam_update"
    slots = ("exp_avg", "exp_avg_sq")

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Constants of the kernel."""
        return {"beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps, "weight_decay": self.weight_decay}

    def bias_corrections(self, update: int) -> tuple[float, float]:
        """1 - beta^update, in double."""
        return 1.0 - self.betas[0] ** update, 1.0 - self.betas[1] ** update
