"""CompiledStep: run a compiled program: train, evaluate, fetch gradients, save and restore its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from minidnn.batch_slot import part, require_pixels, write_pixels
from minidnn.device.base import Device
from minidnn.errors import UserError
from minidnn.executor import Executor
from minidnn.executors import make_executor
from minidnn.layers import Graph
from minidnn.optim import Optimizer
from minidnn.parallel.communicator import Communicator
from minidnn.precision import Precision
from minidnn.profiles import Profile
from minidnn.scalars import Counter, Scalar
from minidnn.schedule.instruction import Buffer, Value
from minidnn.schedule.plan import Plan
from minidnn.schedule.program import Program
from minidnn.schedule.recipe import Recipe
from minidnn.schedule.simulate import MemoryProfile
from minidnn.state import ModelState

LOGITS_OFFSET = 512  # of the pinned result slot; the loss lies before them


@dataclass(slots=True)
class Measured:
    """What ``verify`` measured; None until then."""

    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    host_bytes: int | None = None
    step_seconds: float | None = None


class StepResult:
    """The result of one ``run``. ``loss`` waits for the device only when it is read."""

    __slots__ = ("_event", "_executor", "_loss", "_view")

    def __init__(self, executor: Executor, event: Any, view: NDArray[Any]) -> None:
        self._executor: Executor | None = executor
        self._event = event
        self._view = view
        self._loss = float("nan")

    def settle(self) -> None:
        """Read the loss before its pinned slot is used again."""
        if self._executor is not None:
            self._executor.device.wait(self._event)
            self._loss = float(self._view)
            self._executor = self._event = None

    @property
    def loss(self) -> float:
        """Mean loss over the samples of this batch."""
        self.settle()
        return self._loss


class StepParts(TypedDict):
    """What a step is made of: the arguments of ``CompiledStep``."""

    graph: Graph
    plan: Plan
    recipe: Recipe
    program: Program
    profile: MemoryProfile
    gpu: Profile
    optimizer: Optimizer
    precision: Precision
    device: Device | None
    seed: int
    tail: int | None
    accumulate: int
    allocator: str
    memory: int | None
    capture: str


class CompiledStep:
    """A training step in planned memory. Make one with ``minidnn.compile`` or ``layup.compile``.

    Attributes:
        profile: the prediction for the whole program: peak, reserved and host bytes, step seconds, residents at the peak.
        measured: what ``verify`` measured.
        steps: ``run`` calls so far: the counter of dropout's random numbers. ``updates``: optimizer steps so far.
    """

    def __init__(
        self,
        *,
        graph: Graph,
        plan: Plan,
        recipe: Recipe,
        program: Program,
        profile: MemoryProfile,
        gpu: Profile,
        optimizer: Optimizer,
        precision: Precision,
        device: Device | None,
        seed: int,
        tail: int | None,
        accumulate: int,
        allocator: str,
        memory: int | None,
        capture: str = "auto",
        communicator: Communicator | None = None,
    ) -> None:
        self.graph, self.plan, self.recipe, self.program = graph, plan, recipe, program
        self.profile, self.optimizer, self.seed = profile, optimizer, seed
        self.batch, self.tail, self.accumulate = graph.inputs[0].shape[0], tail, accumulate
        self.measured = Measured()
        self.steps = self.updates = 0
        self.gpu, self.precision, self.allocator = gpu, precision, allocator
        self.classes = int(graph.logits.shape[-1])
        self._in_group = 0  # micro-batches, and samples, since the last update
        self._group_samples = 0
        self._results: list[StepResult | None] = [None, None]
        self._executor: Executor | None = None
        self._parts: dict[str, dict[str, Value]] = {}
        self.state: ModelState | None = None
        self.rank = 0 if communicator is None else communicator.rank
        self.whole_batch = self.batch  # samples of all ranks
        if device is not None:
            self._executor = make_executor(
                program, device, gpu, precision.name, allocator, memory, communicator, capture
            )
            self.state = self._make_state(self._executor)
            self.state.initialise(seed)

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
            raise UserError("this step has no device (device=None, or closed); compile it with a device to run it")
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
        samples = self._check(x, y)
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
        tail = "_tail" if samples != self.batch else ""
        if self.accumulate == 1 or (closes and self._in_group == 0):
            return "train" + tail
        if closes:
            return "accumulate_last" + tail
        return "accumulate" if self._in_group else "accumulate_first"

    def _submit(
        self,
        name: str,
        x: NDArray[Any] | None,
        y: NDArray[Any] | None,
        lr: float,
        share: float,
        scale: float,
        update: int,
    ) -> StepResult:
        executor = self.executor
        parity = executor.slot()
        if (pending := self._results[parity]) is not None:
            pending.settle()
        persistent = self.program.persistent
        slot = executor.slot_bytes((persistent.slot, persistent.other_slot)[parity])
        self._fill(name, slot, x, y, lr, share, scale, update)
        event = executor.run(name)
        loss_spec = self.graph.loss_node.output.spec
        loss = Value("loss", persistent.result, 0, self.precision.resolve(loss_spec), -1)
        result = self._results[parity] = StepResult(executor, event, executor.view(loss, slot=parity))
        return result

    def _fill(
        self,
        name: str,
        slot: NDArray[np.uint8],
        x: NDArray[Any] | None,
        y: NDArray[Any] | None,
        lr: float,
        share: float,
        scale: float,
        update: int,
    ) -> None:
        """Write batch and constants into a pinned slot: all that changes from step to step travels there."""
        persistent = self.program.persistent
        if name not in self._parts:
            batch = self.program[name].batch
            graph = self.graph if batch == self.batch else self.graph.with_batch(batch)
            self._parts[name] = persistent.batch_values(graph, persistent.slot)
        parts = self._parts[name]
        if x is not None:
            write_pixels(part(slot, parts["pixels"]), x)
        if y is not None:
            part(slot, parts["labels"])[...] = y
        scalars, counters = part(slot, persistent.scalars), part(slot, persistent.counters)
        part(slot, parts["constants"])[...] = 0
        scalars[Scalar.LR], scalars[Scalar.LOSS_WEIGHT], scalars[Scalar.GRADIENT_SCALE] = lr, share, scale
        scalars[Scalar.FINITE] = 1.0
        scalars[Scalar.BIAS1], scalars[Scalar.BIAS2] = self.optimizer.bias_corrections(update)
        counters[Counter.STEP_LOW], counters[Counter.STEP_HIGH] = self.steps & 0xFFFFFFFF, self.steps >> 32
        counters[Counter.SEED], counters[Counter.RANK] = self.seed & 0xFFFFFFFF, self.rank

    def fill_slot(self, name: str, slots: Mapping[Buffer, NDArray[np.uint8]], x: NDArray[Any], y: NDArray[Any]) -> None:
        """Fill the first pinned slot of a measured copy as the next run of a schedule would be."""
        share = 1.0 / len(x) if self.accumulate == 1 else 1.0 / (self.accumulate * self.batch)
        self._fill(name, slots[self.program.persistent.slot], x, y, self.optimizer.lr, share, 1.0, self.updates + 1)

    def gradients(self, x: NDArray[Any], y: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Forward and backward without an update: mean gradients by parameter name, in torchvision's layout.

        Running statistics advance as in training. N must be the batch.
        """
        if (samples := self._check(x, y)) != self.batch:
            raise UserError(f"gradients wants the whole batch of {self.batch}, not {samples} samples")
        self._submit("gradients", x, y, 0.0, 1.0 / samples, 1.0, self.updates + 1)
        self.executor.device.synchronize()
        return self.executor_state.export_all(self.executor.bound("gradients").results)

    def evaluate(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """Logits (N, classes) float32 for any N >= 1, with running statistics and without dropout, inside the same slab."""
        x = np.asarray(x)
        expected = self.graph.inputs[0].shape[1:]
        if x.ndim != len(expected) + 1 or x.shape[1:] != expected or len(x) < 1:
            raise UserError(
                f"x has shape {x.shape}, evaluation wants (N, {', '.join(map(str, expected))}) with N at least 1"
            )
        require_pixels(x)
        out = np.empty((len(x), self.classes), np.float32)
        for start in range(0, len(x), self.batch):
            part = x[start : start + self.batch]
            short = self.batch - len(part)
            whole = part if not short else np.concatenate([part, np.repeat(part[-1:], short, axis=0)])
            result = self._submit("eval", whole, None, 0.0, 0.0, 1.0, 1)
            parity = self._results.index(result)
            result.settle()
            out[start : start + len(part)] = self.executor_state.logits(parity, LOGITS_OFFSET)[: len(part)]
        return out

    def _check(self, x: NDArray[Any], y: NDArray[Any]) -> int:
        x, y = np.asarray(x), np.asarray(y)
        expected = self.graph.inputs[0].shape
        sizes = (self.batch,) if self.tail is None else (self.batch, self.tail)
        if x.ndim != len(expected) or x.shape[1:] != expected[1:] or x.shape[0] not in sizes:
            allowed = " or ".join(map(str, sizes))
            raise UserError(
                f"x has shape {x.shape}, this step wants (N, {', '.join(map(str, expected[1:]))}) with N = {allowed} "
                "(the batch it was compiled for, or its tail); compile with tail= for a smaller last batch"
            )
        require_pixels(x)
        if y.shape != x.shape[:1] or y.dtype.kind not in "iu":
            raise UserError(f"y has shape {y.shape} and type {y.dtype}, this step wants ({x.shape[0]},) integers")
        if y.size and not (int(y.min()) >= 0 and int(y.max()) < self.classes):
            raise UserError(
                f"label {int(y.min()) if y.min() < 0 else int(y.max())} is out of range; labels are 0 to {self.classes - 1}"
            )
        return int(x.shape[0])

    # -- state ------------------------------------------------------------------------------------------------------
    @property
    def executor_state(self) -> ModelState:
        """Parameters and optimizer state. Raises UserError for a step that was compiled to be planned only."""
        assert self.state is not None or self.executor
        assert self.state is not None
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
        counts = {"optimizer.step": np.int64(self.steps), "optimizer.updates": np.int64(self.updates)}
        return {**self.executor_state.optimizer(), **{name: np.asarray(value) for name, value in counts.items()}}

    def load_optimizer_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take what ``optimizer_state_dict`` gave. Raises UserError naming what is missing."""
        arrays = {k: v for k, v in state.items() if k not in ("optimizer.step", "optimizer.updates")}
        for name in ("optimizer.step", "optimizer.updates"):
            if name not in state:
                raise UserError(f"the optimizer state lacks {name!r}; it was not written by this program")
        self.executor_state.load_optimizer(arrays)
        self.steps, self.updates = int(state["optimizer.step"]), int(state["optimizer.updates"])
        self._in_group = self._group_samples = 0

    # -- looking ----------------------------------------------------------------------------------------------------
    def verify(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        """Measure one run of every schedule on a copy of the state, and compare with the prediction, to the byte.

        Fills ``measured``. Raises VerificationError where they differ; this step's own state does not change.
        """
        from minidnn.measure import measure_step

        self._check(x, y)
        self.measured = measure_step(self, x, y)

    def explain(self) -> str:
        """One line a layer: decision, stored bytes, workspace; then the totals."""
        from minidnn.explain import explain

        return explain(self)

    def settle(self) -> None:
        """Read every result that is still on its way, before the pinned slots are used for something else."""
        for result in self._results:
            if result is not None:
                result.settle()

    def close(self) -> None:
        """Give the device's memory back. The step cannot run afterwards."""
        if self._executor is not None:
            self.settle()
            self._executor.close()
            self._executor = None
