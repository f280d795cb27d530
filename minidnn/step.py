"""CompiledStep: run a compiled program: train, evaluate, fetch gradients, save and restore its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidnn.batch_rules import BatchRules
from minidnn.batch_slot import RunNumbers, SlotViews, SlotWriter
from minidnn.errors import UserError
from minidnn.executor import Executor
from minidnn.executors import make_executor
from minidnn.explain import explain
from minidnn.measure import measure_step
from minidnn.request import Request
from minidnn.schedule.instruction import Value
from minidnn.schedule.persistent import LOGITS_OFFSET
from minidnn.schedule.plan import Plan
from minidnn.schedule.program import Program
from minidnn.state import ModelState
from minidnn.step_result import Measured, StepResult

_COUNTS = ("optimizer.step", "optimizer.updates")  # what a saved optimizer state calls ``steps`` and ``updates``
_NO_DEVICE = "this step has no device (device=None, or closed); compile it with a device to run it"


class CompiledStep:
    """A training step in planned memory. Make one with ``minidnn.compile`` or ``layup.compile``.

    Attributes:
        request: what was asked for: its graph as it was given, recipe, optimizer and all else but plan and budgets.
        profile: the prediction for the whole program: peak, reserved and host bytes, step seconds, residents at the peak.
        measured: what ``verify`` measured. rules: which batches may be given to ``run``.
        steps: ``run`` calls so far: the counter of dropout's random numbers. ``updates``: optimizer steps so far.
    """

    def __init__(self, request: Request, plan: Plan, program: Program, memory: int | None = None) -> None:
        """``program``: that of the plan; ``memory``: the budget of a pool in bytes, None: no limit of ours."""
        self.request, self.plan, self.program, self.profile = request, plan, program, program.prediction
        self.graph, self.recipe, self.precision = request.source, request.recipe, request.precision
        self.optimizer, self.gpu, self.allocator = request.optimizer, request.gpu, request.allocator
        self.seed, self.tail, self.accumulate = request.seed, request.tail, request.accumulate
        self.batch, *image = self.graph.inputs[0].shape
        self.whole_batch = self.batch  # samples of all ranks
        self.rank = 0 if request.communicator is None else request.communicator.rank
        self.classes = int(self.graph.logits.shape[-1])
        sizes = (self.batch,) if self.tail is None else (self.batch, self.tail)
        self.rules = BatchRules(tuple(image), sizes, self.classes)
        self.measured = Measured()
        self.steps = self.updates = 0
        self._in_group = self._group_samples = 0  # micro-batches, and samples, since the last update
        self._results: list[StepResult | None] = [None, None]  # by pinned slot
        self._writer = SlotWriter(self.graph, program, self.optimizer)
        self._slots: dict[tuple[int, str], tuple[SlotViews, Any]] = {}  # made once: steps of small nets are short
        self._executor: Executor | None = None
        self.state: ModelState | None = None
        if request.device is not None:
            self._executor = make_executor(
                program, request.device, self.gpu, self.precision.name, allocator=self.allocator, memory=memory,
                communicator=request.communicator, capture=request.capture,
            )  # fmt: skip
            self.state = self._make_state(self._executor)
            self.state.initialise(self.seed)

    @property
    def clip_grad_norm(self) -> float | None:
        """The bound of the gradient's norm; None: gradients are not clipped."""
        return self.program.persistent.clip_grad_norm

    @property
    def whole_gradients(self) -> bool:
        """Whether all gradients of an update live together whatever the plan: then no layer is updated before the last."""
        return bool(self.program.persistent.gradients)

    def _make_state(self, executor: Executor) -> ModelState:
        return ModelState(self.graph, self.program.persistent, executor, self.precision)

    @property
    def executor(self) -> Executor:
        """The executor. Raises UserError for a step that was compiled to be planned only."""
        if self._executor is None:
            raise UserError(_NO_DEVICE)
        return self._executor

    # -- running ----------------------------------------------------------------------------------------------------
    def run(self, x: NDArray[Any], y: NDArray[Any], lr: float | None = None, update: bool | None = None) -> StepResult:
        """Train on one batch: forward, backward and, on every ``accumulate``-th call, update.

        Args:
            x: (N, H, W, C) float32, or uint8, which is scaled by 1/255. N must be the batch or the tail.
            y: (N,) integers, 0 <= y < classes.
            lr: learning rate of this update; None: the optimizer's.
            update: True closes an accumulation group early, as a tail batch always does.

        Raises:
            UserError: wrong shape, type or label, naming what was expected. Nothing has run.
        """
        samples = self.rules.check(x, y)
        return self._train(x, y, samples, bool(update) or samples == self.tail, lr)

    def _train(
        self, x: NDArray[Any], y: NDArray[Any], samples: int, closes: bool, lr: float | None, weight: float = 1.0
    ) -> StepResult:
        """Submit one checked batch. ``samples`` counts those of all ranks; ``weight`` 0: this rank's do not count."""
        self._group_samples += samples
        closes = closes or self._in_group + 1 == self.accumulate
        name = self._schedule_name(len(x), closes)
        update_number, group = self.updates + 1, self.accumulate * self.whole_batch
        share = weight / (samples if self.accumulate == 1 else group)
        scale = 1.0 if self.accumulate == 1 else group / self._group_samples
        result = self._submit(name, x, y, self.optimizer.lr if lr is None else lr, share, scale, update_number)
        self.steps += 1
        self._in_group += 1
        if closes:
            self.updates, self._in_group, self._group_samples = update_number, 0, 0
        return result

    def _schedule_name(self, samples: int, closes: bool) -> str:
        """Which schedule trains on the next ``samples``; ``closes``: they are the last of their accumulation group."""
        tail = "_tail" if samples != self.batch else ""
        if self.accumulate == 1 or (closes and self._in_group == 0):
            return "train" + tail
        if closes:
            return "accumulate_last" + tail
        return "accumulate" if self._in_group else "accumulate_first"

    def _submit(
        self, name: str, x: NDArray[Any] | None, y: NDArray[Any] | None, lr: float, share: float, scale: float, update: int
    ) -> StepResult:  # fmt: skip
        """Fill the next pinned slot and queue a run of schedule ``name``. See ``RunNumbers`` for the numbers."""
        executor = self.executor
        parity = executor.slot()
        if (pending := self._results[parity]) is not None:
            pending.settle()
        if (parity, name) not in self._slots:
            self._slots[parity, name] = self._slot(parity, name)
        views, loss = self._slots[parity, name]
        self._writer.write(views, x, y, self._numbers(lr, share, scale, update))
        event = executor.run(name)
        result = self._results[parity] = StepResult(executor, event, loss)
        return result

    def _slot(self, parity: int, name: str) -> tuple[SlotViews, Any]:
        """Where runs of schedule ``name`` with this pinned slot find what changes, and where they leave the loss."""
        persistent, spec = self.program.persistent, self.precision.resolve(self.graph.loss_node.output.spec)
        slot = self.executor.slot_bytes((persistent.slot, persistent.other_slot)[parity])
        loss = self.executor.view(Value("loss", persistent.result, 0, spec, -1), slot=parity)
        return self._writer.views(slot, name), loss

    def fill_slot(self, name: str, slot: NDArray[np.uint8], x: NDArray[Any], y: NDArray[Any]) -> None:
        """Fill the bytes of a pinned slot as the next run of a schedule would."""
        share = 1.0 / len(x) if self.accumulate == 1 else 1.0 / (self.accumulate * self.batch)
        numbers = self._numbers(self.optimizer.lr, share, 1.0, self.updates + 1)
        self._writer.write(self._writer.views(slot, name), x, y, numbers)

    def _numbers(self, lr: float, share: float, scale: float, update: int) -> RunNumbers:
        return RunNumbers(lr, share, scale, update, step=self.steps, seed=self.seed, rank=self.rank)

    def gradients(self, x: NDArray[Any], y: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Forward and backward without an update: mean gradients by parameter name, in torchvision's layout.

        Running statistics advance as in training. N must be the batch.
        """
        if (samples := self.rules.check(x, y)) != self.batch:
            raise UserError(f"gradients wants the whole batch of {self.batch}, not {samples} samples")
        self._submit("gradients", x, y, 0.0, 1.0 / samples, 1.0, self.updates + 1)
        self.executor.device.synchronize()
        return self.executor_state.export_all(self.executor.bound("gradients").results)

    def evaluate(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """Logits (N, classes) float32 for any N >= 1, with running statistics and without dropout, inside the same slab."""
        x = np.asarray(x)
        self.rules.check_images(x)
        out = np.empty((len(x), self.classes), np.float32)
        for start in range(0, len(x), self.batch):
            part = x[start : start + self.batch]
            short = self.batch - len(part)  # the last batch is filled up with its last sample
            whole = part if not short else np.concatenate([part, np.repeat(part[-1:], short, axis=0)])
            result = self._submit("eval", whole, None, 0.0, 0.0, 1.0, 1)
            parity = self._results.index(result)
            result.settle()
            out[start : start + len(part)] = self.executor_state.logits(parity, LOGITS_OFFSET)[: len(part)]
        return out

    # -- state ------------------------------------------------------------------------------------------------------
    @property
    def executor_state(self) -> ModelState:
        """Parameters and optimizer state. Raises UserError for a step that was compiled to be planned only."""
        if self.state is None:
            raise UserError(_NO_DEVICE)
        return self.state

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Parameters and running statistics by torchvision's names, in torchvision's layouts."""
        return self.executor_state.parameters()

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take parameters and running statistics. Raises UserError naming missing, unexpected and misshapen entries."""
        self.executor_state.load_parameters(state)

    def optimizer_state_dict(self) -> dict[str, NDArray[Any]]:
        """``optimizer.<slot>.<parameter>`` for every parameter, ``optimizer.step`` and ``optimizer.updates``.

        Raises UserError inside an accumulation group, whose gradients are not part of the state.
        """
        if self._in_group:
            raise UserError(
                f"{self._in_group} of {self.accumulate} micro-batches are accumulated; save after the update"
            )
        counts = zip(_COUNTS, (self.steps, self.updates), strict=True)
        return self.executor_state.optimizer() | {name: np.asarray(count, np.int64) for name, count in counts}

    def load_optimizer_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take what ``optimizer_state_dict`` gave. Raises UserError naming what is missing."""
        for name in _COUNTS:
            if name not in state:
                raise UserError(f"the optimizer state lacks {name!r}; it was not written by this program")
        self.executor_state.load_optimizer(state, _COUNTS)
        self.steps, self.updates = (int(state[name]) for name in _COUNTS)
        self._in_group = self._group_samples = 0

    # -- looking ----------------------------------------------------------------------------------------------------
    def verify(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        """Measure one run of every schedule on a copy of the state, and compare with the prediction, to the byte.

        Fills ``measured``. Raises VerificationError where they differ; this step's own state does not change.
        """
        self.rules.check(x, y)
        self.settle()
        self.measured = measure_step(self.executor, self.fill_slot, x, y)

    def explain(self) -> str:
        """One line a layer: decision, stored bytes, workspace; then the totals."""
        return explain(self.graph, self.precision, self.plan, self.program)

    def settle(self) -> None:
        """Read every result that is still on its way, before the pinned slots are used for something else."""
        for result in self._results:
            if result is not None:
                result.settle()

    def close(self) -> None:
        """Give the device's memory back; close the device if it was named, not given. The step cannot run afterwards."""
        if self._executor is not None:
            self.settle()
            self._slots.clear()
            self._executor.close()
            self._executor = None
        self.request.close_device()
