"""Evaluate: what the engine says of a plan, in steps, so that no more is built than a choice needs.

Bounds from the costs alone; then the rows, whose live bytes are exact; then the schedule of a training step, with offsets, waits
and time; then the whole program. Each step costs several times the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from layup.context import Context
from layup.estimate import Estimate, estimate_plan
from minidnn.schedule.instruction import HOST, Instruction
from minidnn.schedule.plan import Plan, Reuse
from minidnn.schedule.program import Program, Schedule, build_schedule
from minidnn.schedule.simulate import MemoryProfile, live_curve


class Bounds(NamedTuple):
    """No run of the plan takes less: the compute stream alone, or a link alone; what is kept, at the end of forward."""

    seconds: float
    peak_bytes: int


class Candidate:
    """A plan, and what is known of it so far."""

    def __init__(self, context: Context, plan: Plan | Callable[[], Plan], guess: Estimate | None = None) -> None:
        """``plan``: or what makes it when it is needed. ``guess``: the estimate of the plan, if there is one."""
        self.context = context
        self.guess = guess
        self._plan = plan
        self._rows: list[Instruction] = []  # of the step, until its schedule is made of them

    @cached_property
    def plan(self) -> Plan:
        """The plan itself."""
        return self.context.complete(self._plan if isinstance(self._plan, Plan) else self._plan())

    @cached_property
    def bounds(self) -> Bounds:
        """From the costs alone."""
        if self.guess is not None:
            return Bounds(self.guess.least_seconds, self.guess.least_bytes)
        costs, plan = self.context.costs, self.plan
        found = estimate_plan(costs, replace(plan, reuse=Reuse(), memory_centric=False))
        kept = found.least_bytes
        if not plan.reuse.lifetimes:
            kept = costs.base_bytes + sum(key.footprint for key in costs.keys)
        return Bounds(found.least_seconds, kept)

    @cached_property
    def peaks(self) -> tuple[int, int]:
        """Exact live bytes of a training step, on device and host; the slabs take at least these."""
        context = self.context
        self._rows = rows = context.rows(self.plan)
        device = max(live_curve(rows, context.base_bytes))
        return device, max(live_curve(rows, context.host_base_bytes, space=HOST))

    @cached_property
    def train(self) -> Schedule:
        """The schedule of a training step."""
        context = self.context
        request = context.request
        rows, self._rows = self._rows or context.rows(self.plan), []
        batch = request.graph.inputs[0].shape[0]
        return build_schedule("train", rows, batch, context.persistent, request.gpu, request.recipe.precision)

    @cached_property
    def program(self) -> Program:
        """The whole program: what a budget is compared with."""
        return self.context.request.program(self.plan, self.context.persistent, {"train": self.train})

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        return self.train.profile.step_seconds

    def runs_in(self, memory: float, host_memory: float) -> bool:
        """Whether a training step fits both budgets. Builds no more than is needed to say no."""
        if self.bounds.peak_bytes > memory or self.peaks[0] > memory or self.peaks[1] > host_memory:
            self.forget_rows()
            return False
        profile = self.train.profile
        return profile.reserved_bytes <= memory and profile.host_bytes <= host_memory

    def forget_rows(self) -> None:
        """Give up the rows, which are kept for the schedule."""
        self._rows = []

    def forget(self) -> None:
        """Give up all that was built, gigabytes in a net of thousands of layers. It is built again if asked for."""
        self.forget_rows()
        for name in ("train", "program"):
            self.__dict__.pop(name, None)

    def fits(self, memory: float, host_memory: float) -> bool:
        """Whether the whole program fits both budgets: training, evaluation, gradients, smaller batches."""
        if not self.runs_in(memory, host_memory):
            return False
        return self.program.reserved_bytes <= memory and self.program.host_bytes <= host_memory


def evaluate(context: Context, plan: Plan) -> MemoryProfile:
    """What a training step takes under a plan, by the engine."""
    return Candidate(context, plan).train.profile
