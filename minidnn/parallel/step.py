"""ParallelStep: a compiled step that trains together with those of other ranks.

All ranks make the same calls in the same order. ``run`` exchanges gradients as rows of its schedule; ``evaluate``,
``gradients``, saving and loading are collective, too: they first let the ranks agree on one state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidnn.errors import UserError
from minidnn.executor import Executor
from minidnn.parallel.agree import checksum, compare, digest
from minidnn.parallel.state import ParallelState
from minidnn.request import Request
from minidnn.schedule.plan import Plan
from minidnn.schedule.program import Program
from minidnn.state import ModelState
from minidnn.step import CompiledStep
from minidnn.step_result import StepResult

_AFTER = {None: 0, 0: 1, 1: 0}
"""Which gradients wait for their exchange after a delayed step, by which waited before it (None: none)."""


class ParallelStep(CompiledStep):
    """See the module; otherwise as ``CompiledStep``.

    Attributes:
        ranks: rank, number of ranks and strategy; ``whole_batch``, ``whole_tail``: samples of all ranks, ``batch`` and
            ``tail`` those that this rank works on.
    """

    def __init__(self, request: Request, plan: Plan, program: Program, memory: int | None = None) -> None:
        assert request.ranks is not None and request.communicator is not None
        self.ranks, self.communicator = request.ranks, request.communicator
        self._pending: int | None = None  # which gradient strip waits for its exchange
        self._pending_lr = 0.0
        self._agreed = True  # the state of all ranks
        super().__init__(request, plan, program, memory)
        self.whole_batch, self.whole_tail = self.ranks.batch, self.ranks.tail
        if request.device is not None:
            self._compare()

    def _make_state(self, executor: Executor) -> ModelState:
        return ParallelState(self.graph, self.program.persistent, executor, self.precision, self.communicator)

    @property
    def _parallel_state(self) -> ParallelState:
        state = self.executor_state
        assert isinstance(state, ParallelState)
        return state

    def _compare(self) -> None:
        """Refuse ranks that would not train one net. Collective."""
        from minidnn import __version__

        recipe, ranks, s = self.recipe, self.ranks, self.ranks.strategy
        nodes = [(n.name, repr(n.layer), [t.name for t in n.inputs]) for n in self.graph.nodes]
        facts: dict[str, Any] = {
            "version": __version__,
            "model": f"{len(nodes)} layers, {self.graph.parameter_count:,} parameters, {digest(nodes)}",
            "image": str(self.graph.inputs[0].shape[1:]),
            "global batch": ranks.batch,
            "last batch": ranks.tail,
            "strategy": f"{s.name}:{s.implementation}, {s.warmup} updates without delay, buckets of {s.bucket_bytes} bytes",
            "precision": recipe.precision,
            "optimizer": repr(self.optimizer),
            "accumulation": self.accumulate,
            "seed": self.seed,
            "plan": digest(self.plan.to_json()),
        }
        if ranks.batch % ranks.size == 0:  # else engines may be chosen for different sizes
            facts["recipe"] = recipe.hash
        facts["initial weights"] = "" if self.state is None else checksum(self.state.parameters())
        compare(self.communicator, facts)

    # -- running ----------------------------------------------------------------------------------------------------
    def run(
        self,
        x: NDArray[Any],
        y: NDArray[Any],
        lr: float | None = None,
        update: bool | None = None,
        of: int | None = None,
    ) -> StepResult:
        """Train on one batch of all ranks.

        Args:
            x, y: the whole batch, of which each rank takes its share; or, with ``of``, this rank's share of a batch of
                ``of`` samples alone (``ranks.taken(of)`` says which).
            lr, update: as for one rank. With ``ring_delayed`` the gradient of this batch is applied one step later, with
                the rate given here.

        The result's loss is the mean over this rank's samples. Raises UserError as ``CompiledStep.run`` does.
        """
        whole = len(x) if of is None else of
        sizes = (self.whole_batch,) if self.whole_tail is None else (self.whole_batch, self.whole_tail)
        if whole not in sizes:
            raise UserError(
                f"a batch of {whole} samples; this step wants {' or '.join(map(str, sizes))} of all ranks together (the batch "
                "it was compiled for, or its tail); compile with tail= for a smaller last batch"
            )
        taken = self.ranks.taken(whole)
        if of is None:
            x, y = x[taken], y[taken]
        elif len(x) != taken.stop - taken.start:
            raise UserError(
                f"{len(x)} samples are not the share of rank {self.rank} in a batch of {of}: it takes "
                f"{taken.stop - taken.start}"
            )
        self.rules.check(x, y)
        self.communicator.signs.mark(self.steps + 1)
        self._agreed = False
        weight = self.ranks.weight(whole)
        if self.ranks.strategy.delayed and (self._pending is not None or self.updates >= self.ranks.strategy.warmup):
            return self._run_delayed(x, y, whole, lr, weight)
        return self._train(x, y, whole, bool(update) or whole == self.whole_tail, lr, weight)

    def _schedule_name(self, samples: int, closes: bool) -> str:
        name = super()._schedule_name(samples, closes)
        return name.replace("train", "warmup") if self.ranks.strategy.delayed else name

    def _run_delayed(self, x: NDArray[Any], y: NDArray[Any], whole: int, lr: float | None, weight: float) -> StepResult:
        """Compute one gradient while that of the step before is exchanged and applied."""
        tail = "_tail" if len(x) != self.batch else ""
        name = {None: "first", 0: "train", 1: "train_other"}[self._pending] + tail
        result = self._submit(name, x, y, self._pending_lr, weight / whole, 1.0, self.updates + 1)
        self.steps += 1
        self.updates += self._pending is not None
        self._pending, self._pending_lr = _AFTER[self._pending], self.optimizer.lr if lr is None else lr
        return result

    def flush(self) -> None:
        """Apply the gradient that is still on its way. Collective; the next step begins as the first did."""
        if self._pending is not None:
            name = ("flush", "flush_other")[self._pending]
            self._submit(name, None, None, self._pending_lr, 0.0, 1.0, self.updates + 1)
            self.updates += 1
            self._pending = None

    def agree(self) -> None:
        """One state for all ranks: apply what is on its way, and average the running statistics. Collective.

        Done by itself before evaluating, saving and gradients; a later step of ``ring_delayed`` begins as the first did.
        """
        if not self._agreed:
            self.flush()
            self._parallel_state.average_statistics()
            self._agreed = True

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's ``value``, by rank. Collective.

        The emulated device runs queued work only when the host waits for it, and the others may wait for that work.
        """
        if self._executor is not None and self._executor.device.name == "emulated":
            self._executor.device.synchronize()
        self.communicator.signs.mark()
        return self.communicator.exchange(value)

    def gradients(self, x: NDArray[Any], y: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Mean gradients of a whole batch over all ranks, added in their order. Collective."""
        if len(x) != self.whole_batch:
            raise UserError(f"gradients wants the whole batch of {self.whole_batch}, not {len(x)} samples")
        self.agree()
        taken = self.ranks.taken(len(x))
        mine = super().gradients(x[taken], y[taken])
        self._agreed = False  # running statistics have advanced
        count = taken.stop - taken.start
        ranks = self.exchange({name: array * array.dtype.type(count / len(x)) for name, array in mine.items()})
        return {name: np.asarray(sum(other[name] for other in ranks)) for name in mine}

    def evaluate(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """Logits of this rank's ``x``, any N >= 1. The first call after training is collective: it lets the ranks agree."""
        self.agree()
        self.communicator.signs.mark()
        return super().evaluate(x)

    # -- state ------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, NDArray[Any]]:
        """As on one rank. Collective."""
        self.agree()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take the same parameters and running statistics on every rank. What was on its way is dropped. Collective.

        Raises UserError on every rank, with one sentence, where they are not the same.
        """
        compare(self.communicator, {"loaded weights": checksum(state)})
        self._pending = None
        super().load_state_dict(state)
        self._agreed = True

    def optimizer_state_dict(self) -> dict[str, NDArray[Any]]:
        """As on one rank, whole. Collective."""
        self.agree()
        return super().optimizer_state_dict()

    def load_optimizer_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take what ``optimizer_state_dict`` gave, on any number of ranks; the same on every rank. Collective."""
        compare(self.communicator, {"loaded optimizer state": checksum(state)})
        self._pending = None
        super().load_optimizer_state_dict(state)

    def verify(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        """As on one rank; ``x, y`` are any samples of this rank, at least one. Collective."""
        self.agree()
        take = np.arange(self.batch) % len(x)
        super().verify(np.asarray(x)[take], np.asarray(y)[take])
