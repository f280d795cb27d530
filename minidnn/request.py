"""Request: what is asked of a training step besides plan and budgets, the same for all plans that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from minidnn import profiles
from minidnn.budget import parse_bytes
from minidnn.device.base import Device
from minidnn.device.emulated import EmulatedDevice
from minidnn.errors import UserError
from minidnn.layers import Graph
from minidnn.optim import SGD, Optimizer
from minidnn.precision import Precision
from minidnn.precision import precision as find_precision
from minidnn.recipes import numpy_recipe
from minidnn.schedule.persistent import Persistent
from minidnn.schedule.plan import Plan, keep
from minidnn.schedule.program import Program, Schedule, build
from minidnn.schedule.recipe import Recipe
from minidnn.step import CompiledStep

DEFAULT_OPTIMIZER = SGD(lr=0.1, momentum=0.9, weight_decay=1e-4)


@dataclass(frozen=True, slots=True)
class Request:
    """Graph, recipe and all else that a plan and a budget do not change. Made by ``prepare``; holds no array."""

    graph: Graph
    tail_graph: Graph | None
    optimizer: Optimizer
    precision: Precision
    gpu: profiles.Profile
    recipe: Recipe
    accumulate: int
    seed: int
    allocator: str
    device: Device | None

    def with_workspace_limit(self, nbytes: int) -> Request:
        """The same request under another workspace limit: another recipe, other bits."""
        recipe = numpy_recipe(self.graph, self.precision, nbytes, self.recipe.deterministic)
        return replace(self, recipe=recipe)

    def with_batch(self, batch: int) -> Request:
        """The same request for another batch, without a smaller last one."""
        graph = self.graph.with_batch(batch)
        limit, deterministic = self.recipe.workspace_limit, self.recipe.deterministic
        recipe = numpy_recipe(graph, self.precision, limit, deterministic)
        return replace(self, graph=graph, tail_graph=None, recipe=recipe)

    def persistent(self, plan: Plan) -> Persistent:
        """The persistent region under a plan. It depends on what the plan streams and on nothing else of it."""
        return Persistent(self.graph, self.precision, self.optimizer, accumulate=self.accumulate > 1, plan=plan)

    def program(
        self, plan: Plan, persistent: Persistent | None = None, made: Mapping[str, Schedule] | None = None
    ) -> Program:
        """Build all schedules under a plan; ``made`` are those that exist already, on the same ``persistent``."""
        tail_recipe = None
        if self.tail_graph is not None:
            limit, deterministic = self.recipe.workspace_limit, self.recipe.deterministic
            tail_recipe = numpy_recipe(self.tail_graph, self.precision, limit, deterministic)
        return build(
            self.graph,
            self.tail_graph,
            plan,
            self.recipe,
            tail_recipe,
            persistent or self.persistent(plan),
            self.gpu,
            self.accumulate,
            made or {},
        )

    def device_budget(self, memory: int | str | None) -> int | None:
        """The device budget in bytes; a percentage is of what ``keep`` reserves."""
        if memory is None:
            return None
        return parse_bytes(memory, whole=lambda: self.program(keep()).reserved_bytes)

    def step(self, plan: Plan, program: Program, memory: int | None) -> CompiledStep:
        """The step that runs a program of this request on its device, if it has one."""
        return CompiledStep(
            graph=self.graph,
            plan=plan,
            recipe=self.recipe,
            program=program,
            profile=program.prediction,
            gpu=self.gpu,
            optimizer=self.optimizer,
            precision=self.precision,
            device=self.device,
            seed=self.seed,
            tail=None if self.tail_graph is None else self.tail_graph.inputs[0].shape[0],
            accumulate=self.accumulate,
            allocator=self.allocator,
            memory=memory,
        )


def prepare(
    graph: Graph,
    optimizer: Optimizer = DEFAULT_OPTIMIZER,
    device: str | Device | None = "emulated",
    profile: str | profiles.Profile = "h200",
    precision: str = "fp32",
    recipe: Recipe | None = None,
    seed: int = 0,
    deterministic: bool = True,
    allocator: str = "slab",
    tail: int | None = None,
    accumulate: int = 1,
    workspace_limit: int | str | None = None,
    strategy: str | None = None,
    communicator: object | None = None,
) -> Request:
    """Check a request and fix its recipe. The arguments are those of ``minidnn.compile``.

    Raises UserError for what cannot be done as asked, in one sentence.
    """
    graph.check()
    kind = find_precision(precision)
    if strategy is not None or communicator is not None:
        raise UserError(
            f"strategy={strategy!r}: data parallelism is not part of this version; leave strategy and communicator out"
        )
    if allocator not in ("slab", "pool"):
        raise UserError(f"allocator={allocator!r} is unknown; choose slab or pool")
    if accumulate < 1:
        raise UserError(f"accumulate={accumulate} must be at least 1")
    batch = graph.inputs[0].shape[0]
    if tail is not None and not 1 <= tail < batch:
        raise UserError(f"tail={tail} must be at least 1 and below the batch, {batch}")
    opened = _device(device, kind)
    limit = None if workspace_limit is None else parse_bytes(workspace_limit, what="workspace_limit")
    gpu = profiles.load(profile)
    if recipe is None:
        recipe = numpy_recipe(graph, kind, limit, deterministic)
    elif recipe.precision != precision:
        raise UserError(
            f"the recipe was made for precision {recipe.precision}, not {precision}; pass precision={recipe.precision!r}"
        )
    tail_graph = None if tail is None else graph.with_batch(tail)
    return Request(graph, tail_graph, optimizer, kind, gpu, recipe, accumulate, seed, allocator, opened)


def _device(device: str | Device | None, precision: Precision) -> Device | None:
    if not isinstance(device, str):
        return device
    if device != "emulated":
        raise UserError(
            f"device={device!r} is not part of this version; use device='emulated', or None to plan without arrays"
        )
    if precision.name not in ("fp32", "fp64"):
        raise UserError(
            f"precision {precision.name} needs a GPU; on the emulated device use fp32, or device=None to plan only"
        )
    return EmulatedDevice()
