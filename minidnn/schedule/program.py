"""Program: the schedules of one compiled step, placed together in one slab.

Slab = the persistent region, at the same offsets in all schedules, then the largest transient region. Copies can be in
flight across the boundary between two runs, so waits are derived over the declared cycle; when another schedule than the
declared one came before, the executor joins all streams first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minidnn.graph import Graph
from minidnn.precision import precision as find_precision
from minidnn.profiles import Profile
from minidnn.schedule.analysis import Analysis, InferenceAnalysis
from minidnn.schedule.instruction import DEVICE, HOST, Buffer, Instruction
from minidnn.schedule.liveness import insert_lifetimes
from minidnn.schedule.lower import Step, lower, lower_inference
from minidnn.schedule.persistent import Persistent
from minidnn.schedule.placement import place
from minidnn.schedule.plan import Plan
from minidnn.schedule.recipe import Recipe
from minidnn.schedule.simulate import MemoryProfile, simulate
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


def build(
    graph: Graph,
    tail_graph: Graph | None,
    plan: Plan,
    recipe: Recipe,
    tail_recipe: Recipe | None,
    persistent: Persistent,
    profile: Profile,
    accumulate: int,
) -> Program:
    """Lower every schedule, derive lifetimes, offsets and waits, and predict bytes and time. Looks at no budget."""
    precision = find_precision(recipe.precision)
    persistent_offsets, base, host_base = {}, 0, 0
    for buffer in persistent.buffers:
        persistent_offsets[buffer] = base
        base += buffer.footprint
    for buffer in persistent.host_buffers:
        persistent_offsets[buffer] = host_base
        host_base += buffer.footprint
    lowered: dict[str, tuple[list[Instruction], int]] = {}
    analyses = {False: Analysis(graph, precision)}
    recipes = {False: recipe}
    if tail_graph is not None and tail_recipe is not None:
        analyses[True] = Analysis(tail_graph, precision)
        recipes[True] = tail_recipe
    for name, (step, tail) in training_steps(accumulate, tail_graph is not None).items():
        analysis = analyses[tail]
        rows = lower(analysis, persistent, plan, recipes[tail], step)
        lowered[name] = (rows, analysis.graph.inputs[0].shape[0])
    rows = lower_inference(InferenceAnalysis(graph, precision), persistent, plan, recipe)
    lowered["eval"] = (rows, graph.inputs[0].shape[0])
    fixed = [*persistent.buffers, *persistent.host_buffers]
    schedules = {}
    for name, (rows, batch) in lowered.items():
        rows = insert_lifetimes(stream_parameters(rows, persistent))
        device = place(rows, base=base, space=DEVICE)
        host = place(rows, base=host_base, space=HOST)
        offsets = {**persistent_offsets, **device.offsets, **host.offsets}
        rows = synchronise(rows, offsets, previous=rows)
        prediction = simulate(
            rows,
            profile,
            recipe.precision,
            base_bytes=base,
            offsets_extent=device.extent,
            host_bytes=host.extent,
            persistent=fixed,
        )
        schedules[name] = Schedule(name, tuple(rows), offsets, prediction, batch, previous=name)
    return Program(
        schedules,
        persistent,
        persistent_offsets,
        reserved_bytes=max(s.profile.reserved_bytes for s in schedules.values()),
        host_bytes=max(s.profile.host_bytes for s in schedules.values()),
    )
