"""Program: the schedules of one compiled step, placed together in one slab.

Slab = the persistent region, at the same offsets in all schedules, then the largest transient region. Copies can be in
flight across the boundary between two runs, so waits are derived over the declared cycle; when another schedule than the
declared one came before, the executor joins all streams first.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from minidnn.graph import Graph
from minidnn.precision import precision as find_precision
from minidnn.profiles import Profile
from minidnn.schedule.analysis import Analysis, InferenceAnalysis
from minidnn.schedule.instruction import DEVICE, HOST, Buffer, Instruction
from minidnn.schedule.liveness import insert_lifetimes
from minidnn.schedule.lower import Step, lower, lower_flush, lower_inference
from minidnn.schedule.persistent import Persistent
from minidnn.schedule.placement import place
from minidnn.schedule.plan import Plan
from minidnn.schedule.recipe import Recipe
from minidnn.schedule.simulate import MemoryProfile, simulate, total_footprint
from minidnn.schedule.strategy import Phase
from minidnn.schedule.stream import stream_parameters
from minidnn.schedule.synchronise import synchronise
from minidnn.schedule.text import dump


@dataclass(frozen=True, slots=True)
class Schedule:
    """A named list of rows, with ALLOC, FREE and waits, and the offset of every buffer it touches.

    ``previous``: the schedule that the declared cycle puts before it. ``batch``: samples it takes.
    """

    name: str
    rows: tuple[Instruction, ...]
    offsets: Mapping[Buffer, int]
    profile: MemoryProfile
    batch: int
    previous: str

    def dump(self) -> str:
        """The rows as text, one a line: index, op, layer, kernel, what is written and read, stream, waits."""
        return dump(self.rows, self.offsets)


@dataclass(frozen=True, slots=True)
class Program:
    """All schedules of a compiled step. Budget, refusal and capture cover the whole of it."""

    schedules: Mapping[str, Schedule]
    persistent: Persistent
    persistent_offsets: Mapping[Buffer, int]
    reserved_bytes: int
    host_bytes: int

    def __getitem__(self, name: str) -> Schedule:
        return self.schedules[name]

    @property
    def largest(self) -> Schedule:
        """The schedule that needs most of the slab."""
        return max(self.schedules.values(), key=lambda s: (s.profile.reserved_bytes, s.profile.peak_bytes))

    @property
    def peak_bytes(self) -> int:
        """Largest live bytes of any schedule."""
        return max(s.profile.peak_bytes for s in self.schedules.values())

    @property
    def prediction(self) -> MemoryProfile:
        """The whole program in one: bytes of its neediest schedules, seconds of a training step."""
        peak = max(self.schedules.values(), key=lambda s: s.profile.peak_bytes).profile
        seconds = self.schedules["train"].profile.step_seconds
        return replace(peak, reserved_bytes=self.reserved_bytes, host_bytes=self.host_bytes, step_seconds=seconds)


def training_steps(accumulate: int, tail: bool) -> dict[str, tuple[Step, bool]]:
    """The training schedules by name: what the step does, and whether it takes the smaller tail batch.

    A tail batch closes its accumulation group, so it always updates.
    """
    steps = {"train": (Step(), False), "gradients": (Step(updates=False, fetches=True), False)}
    if accumulate > 1:
        steps["accumulate_first"] = (Step(updates=False), False)
        steps["accumulate"] = (Step(accumulates=True, updates=False), False)
        steps["accumulate_last"] = (Step(accumulates=True), False)
    if tail:
        steps["train_tail"] = (Step(), True)
        if accumulate > 1:
            steps["accumulate_last_tail"] = (Step(accumulates=True), True)
    return steps


def delayed_steps(tail: bool) -> dict[str, tuple[Step, bool]]:
    """The training schedules of ``ring_delayed`` besides those of ``training_steps``; see ``schedule.strategy``."""
    steps = {"first": Step(updates=False)} | {p.value: Step(phase=p) for p in (Phase.OTHER, Phase.WARMUP)}
    named = {name: (step, False) for name, step in steps.items()}
    return named | ({f"{name}_tail": (step, True) for name, step in steps.items()} if tail else {})


def layout(persistent: Persistent) -> dict[Buffer, int]:
    """Offsets of the persistent buffers: side by side from the start of their slab, on device and host."""
    offsets, end = {}, {DEVICE: 0, HOST: 0}
    for buffer in (*persistent.buffers, *persistent.host_buffers):
        offsets[buffer] = end[buffer.space]
        end[buffer.space] += buffer.footprint
    return offsets


def with_lifetimes(rows: list[Instruction], persistent: Persistent) -> list[Instruction]:
    """Lowered rows with streamed parameters travelling, ALLOC and FREE: all that decides on the live bytes."""
    return insert_lifetimes(stream_parameters(rows, persistent))


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause Python's cyclic garbage collector: rows are many, hold no cycles, and looking through them again and again takes
    a third of the time of a deep net."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@uncollected()
def build_schedule(
    name: str,
    timed: list[Instruction],
    batch: int,
    persistent: Persistent,
    profile: Profile,
    precision: str,
    before: tuple[str, list[Instruction]] | None = None,
) -> Schedule:
    """Place the rows of ``with_lifetimes``, derive their waits, and predict bytes and time. Looks at no budget.

    ``before``: name and rows of the schedule that comes before this in the cycle; None: the schedule itself.
    """
    base, host_base = total_footprint(persistent.buffers), total_footprint(persistent.host_buffers, HOST)
    device = place(timed, base=base, space=DEVICE)
    host = place(timed, base=host_base, space=HOST)
    offsets = {**layout(persistent), **device.offsets, **host.offsets}
    previous, earlier = before or (name, timed)
    if before is not None:
        offsets |= place(earlier, base=base, space=DEVICE).offsets | place(earlier, base=host_base, space=HOST).offsets
    rows = synchronise(timed, offsets, previous=earlier)
    prediction = simulate(
        rows,
        profile,
        precision,
        base_bytes=base,
        offsets_extent=device.extent,
        host_bytes=host.extent,
        persistent=[*persistent.buffers, *persistent.host_buffers],
    )
    return Schedule(name, tuple(rows), offsets, profile=prediction, batch=batch, previous=previous)


@uncollected()
def build(
    graph: Graph, tail_graph: Graph | None, plan: Plan, recipe: Recipe, tail_recipe: Recipe | None, persistent: Persistent,
    profile: Profile, accumulate: int, made: Mapping[str, Schedule], inference: Graph | None = None,
) -> Program:  # fmt: skip
    """Lower every schedule, derive lifetimes, offsets and waits, and predict bytes and time. Looks at no budget.

    ``made``: schedules of this very plan and ``persistent`` that exist already. ``inference``: the graph that evaluation
    runs, of the same parameters; None: ``graph``.
    """
    precision = find_precision(recipe.precision)
    analyses = {False: Analysis(graph, precision)}
    recipes = {False: recipe}
    if tail_graph is not None and tail_recipe is not None:
        analyses[True] = Analysis(tail_graph, precision)
        recipes[True] = tail_recipe
    lowered: dict[str, tuple[list[Instruction], int]] = {}
    steps = training_steps(accumulate, tail_graph is not None)
    if delayed := persistent.ranks is not None and persistent.ranks.strategy.delayed:
        steps |= delayed_steps(tail_graph is not None)
        made = {}  # the cycle of two phases was not known to whoever made them
    for name, (step, tail) in steps.items():
        if name not in made:
            analysis = analyses[tail]
            rows = lower(analysis, persistent, plan, recipes[tail], step)
            lowered[name] = (rows, analysis.graph.inputs[0].shape[0])
    rows = lower_inference(InferenceAnalysis(inference or graph, precision), persistent, plan, recipe)
    lowered["eval"] = (rows, graph.inputs[0].shape[0])
    if delayed:
        for phase in (Phase.FLUSH, Phase.FLUSH_OTHER):
            rows = lower_flush(analyses[False], persistent, plan, recipe, Step(phase=phase))
            lowered[phase.value] = (rows, graph.inputs[0].shape[0])
    timed = {name: with_lifetimes(rows, persistent) for name, (rows, _) in lowered.items()}
    cycle = {"train": "train_other", "train_other": "train"} if delayed else {}
    schedules = dict(made)
    for name, (_, batch) in lowered.items():
        before = (cycle[name], timed[cycle[name]]) if name in cycle else None
        schedules[name] = build_schedule(name, timed[name], batch, persistent, profile, recipe.precision, before)
    return Program(
        schedules,
        persistent,
        layout(persistent),
        reserved_bytes=max(s.profile.reserved_bytes for s in schedules.values()),
        host_bytes=max(s.profile.host_bytes for s in schedules.values()),
    )
