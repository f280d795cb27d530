"""Request: what is asked of a training step besides plan and budgets, the same for all plans that are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minidnn import profiles
from minidnn.budget import ProcessMemory, device_limit, parse_bytes, process_memory
from minidnn.device.base import Device
from minidnn.device.emulated import EmulatedDevice
from minidnn.errors import UserError
from minidnn.fuse import check_fusions, fuse
from minidnn.layers import Graph
from minidnn.optim import SGD, Optimizer
from minidnn.parallel.communicator import Communicator
from minidnn.parallel.gpus import on_device
from minidnn.parallel.inprocess import InProcess
from minidnn.parallel.step import ParallelStep
from minidnn.precision import Precision
from minidnn.precision import precision as find_precision
from minidnn.recipes import numpy_recipe
from minidnn.schedule.persistent import Persistent
from minidnn.schedule.plan import Plan, keep
from minidnn.schedule.program import Program, Schedule, build
from minidnn.schedule.ranks import Ranks, Strategy
from minidnn.schedule.recipe import Recipe
from minidnn.step import CompiledStep, StepParts

if TYPE_CHECKING:
    from minidnn.device.cuda import CudaDevice

DEFAULT_OPTIMIZER = SGD(lr=0.1, momentum=0.9, weight_decay=1e-4)


@dataclass(frozen=True, slots=True)
class Request:
    """Graph, recipe and all else that a plan and a budget do not change. Made by ``prepare``; holds no array.

    ``source`` is the graph as it was given, ``graph`` what the recipe's fusions make of it: what is planned and lowered.
    """

    source: Graph
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
    ranks: Ranks | None = None
    communicator: Communicator | None = None
    capture: str = "auto"
    process_memory: int | None = None
    clip_grad_norm: float | None = None

    def translate(self, plan: Plan) -> Plan:
        """A plan for the graph as it was given, said of the fused one."""
        return fuse(self.source, self.recipe.fusions).plan(plan)

    def with_workspace_limit(self, nbytes: int) -> Request:
        """The same request under another workspace limit: another recipe, other bits. It is to be counted, not run: of 1 byte
        a GPU says what engines without workspace take, and not which these are, which would take seconds."""
        nothing = nbytes == 1 and hasattr(self.device, "select_engine")
        return replace(self, recipe=self._recipe(self.source, 0 if nothing else nbytes))

    def _recipe(self, graph: Graph, workspace_limit: int | None) -> Recipe:
        """The recipe of another batch or limit, without measuring, so that it is the same every time."""
        deterministic, fusions = self.recipe.deterministic, self.recipe.fusions
        return make_recipe(graph, self.precision, workspace_limit, deterministic, fusions, self.device, tune=False)

    def with_batch(self, batch: int) -> Request:
        """The same request for another batch, without a smaller last one."""
        source = self.source.with_batch(batch)
        recipe = self._recipe(source, self.recipe.workspace_limit)
        graph = fuse(source, recipe.fusions).graph
        return replace(self, source=source, graph=graph, tail_graph=None, recipe=recipe)

    def persistent(self, plan: Plan) -> Persistent:
        """The persistent region under a plan. It depends on what the plan streams and on nothing else of it."""
        return Persistent(
            self.graph, self.precision, self.optimizer, accumulate=self.accumulate > 1, plan=plan, ranks=self.ranks,
            clip_grad_norm=self.clip_grad_norm,
        )  # fmt: skip

    def program(
        self, plan: Plan, persistent: Persistent | None = None, made: Mapping[str, Schedule] | None = None
    ) -> Program:
        """Build all schedules under a plan; ``made`` are those that exist already, on the same ``persistent``."""
        tail_recipe = None
        if self.tail_graph is not None:
            tail = self.source.with_batch(self.tail_graph.inputs[0].shape[0])
            tail_recipe = self._recipe(tail, self.recipe.workspace_limit)
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
            self.source,
        )

    def device_budget(self, memory: int | str | None) -> int | None:
        """The device budget in bytes; a percentage is of what ``keep`` reserves. None on a GPU: what is free there.

        Raises UserError for what a GPU does not have, and where ``process_memory`` leaves nothing.
        """
        asked = None if memory is None else parse_bytes(memory, whole=lambda: self.program(keep()).reserved_bytes)
        return device_limit(self.device, asked, self.process())

    def process(self) -> ProcessMemory | None:
        """What ``process_memory`` leaves for the slab; None without such a bound. Measures, so it may vary by some bytes."""
        if self.process_memory is None:
            return None
        captured = self.capture != "off" and self.allocator == "slab"
        return process_memory(self.device, self.process_memory, len(self.graph.nodes), captured)

    def step(self, plan: Plan, program: Program, memory: int | None) -> CompiledStep:
        """The step that runs a program of this request on its device, if it has one."""
        tail = None if self.tail_graph is None else self.tail_graph.inputs[0].shape[0]
        common = StepParts(
            graph=self.source,
            plan=plan,
            recipe=self.recipe,
            program=program,
            profile=program.prediction,
            gpu=self.gpu,
            optimizer=self.optimizer,
            precision=self.precision,
            device=self.device,
            seed=self.seed,
            tail=tail,
            accumulate=self.accumulate,
            allocator=self.allocator,
            memory=memory,
            capture=self.capture,
        )
        if self.ranks is None:
            return CompiledStep(**common)
        assert self.communicator is not None
        return ParallelStep(**common, ranks=self.ranks, communicator=self.communicator)


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
    strategy: str | Strategy | None = None,
    communicator: Communicator | None = None,
    capture: str = "auto",
    fusions: Sequence[str] | None = None,
    process_memory: int | str | None = None,
    clip_grad_norm: float | None = None,
) -> Request:
    """Check a request and fix its recipe. The arguments are those of ``minidnn.compile``.

    Raises UserError for what cannot be done as asked, in one sentence.
    """
    graph.check()
    kind = find_precision(precision)
    if allocator not in ("slab", "pool"):
        raise UserError(f"allocator={allocator!r} is unknown; choose slab or pool")
    if accumulate < 1:
        raise UserError(f"accumulate={accumulate} must be at least 1")
    if clip_grad_norm is not None and not 0 < clip_grad_norm < math.inf:
        raise UserError(
            f"clip_grad_norm={clip_grad_norm!r} is no finite norm above 0; 1.0 is usual, None does not clip"
        )
    batch = graph.inputs[0].shape[0]
    if tail is not None and not 1 <= tail < batch:
        raise UserError(f"tail={tail} must be at least 1 and below the batch, {batch}")
    ranks = None
    if strategy is not None or communicator is not None:
        communicator = communicator or InProcess.group(1)[0]
        ranks = _ranks(strategy, communicator, batch, tail, device, accumulate, allocator, clip_grad_norm)
        if ranks.strategy.delayed and optimizer is DEFAULT_OPTIMIZER:
            optimizer = replace(DEFAULT_OPTIMIZER, nesterov=True)
        graph = graph.with_batch(ranks.local(batch))
        # As many as in a whole batch, it may be: all ranks have the same schedules, since they verify them together.
        tail = None if tail is None else ranks.local(tail)
    if capture not in ("auto", "on", "off"):
        raise UserError(f"capture={capture!r} is unknown; choose auto, on or off")
    if recipe is not None and recipe.precision != precision:
        raise UserError(
            f"the recipe was made for precision {recipe.precision}, not {precision}; pass precision={recipe.precision!r}"
        )
    if recipe is not None and fusions is not None and check_fusions(fusions) != recipe.fusions:
        raise UserError(f"the recipe has the fusions {recipe.fusions}, not {tuple(fusions)}; leave fusions out")
    whole_process = None if process_memory is None else parse_bytes(process_memory, what="process_memory")
    limit = None if workspace_limit is None else parse_bytes(workspace_limit, what="workspace_limit")
    gpu = profiles.load(profile)
    deterministic = deterministic if recipe is None else recipe.deterministic
    opened = _device(device, kind, deterministic)
    try:
        if ranks is not None:
            communicator = on_device(communicator or InProcess.group(1)[0], opened)
        captures = hasattr(opened, "capture")
        if capture == "on" and not (captures and (communicator is None or communicator.capturable)):
            what = f"{communicator.name}" if captures and communicator else f"device={device!r}"
            raise UserError(f"capture='on' cannot be combined with {what}; leave capture out")
        if capture == "on" and allocator == "pool":
            raise UserError(
                "capture='on' needs addresses that stay, which allocator='pool' has not; leave one of them out"
            )
        if whole_process is not None and not hasattr(opened, "free_bytes"):
            raise UserError(
                f"process_memory={process_memory!r} bounds what the driver of a GPU counts for the process; device={device!r} "
                "has nothing outside its slab to be measured: use memory=, or device='cuda:0'"
            )
        if recipe is not None and recipe.backend == "cuda" and isinstance(opened, EmulatedDevice):
            raise UserError(
                "the recipe names cuDNN's engines, which the emulated device has not; use device='cuda:0', device=None to plan, "
                "or leave recipe out"
            )
        if recipe is None:
            recipe = make_recipe(graph, kind, limit, deterministic, fusions, opened)
            if ranks is not None and hasattr(opened, "select_engine") and batch % ranks.size == 0 and communicator:
                # Each has measured which engines are fastest: they need not have found the same.
                recipe = Recipe.from_json(communicator.exchange(recipe.to_json())[0])
        fused = fuse(graph, recipe.fusions).graph
        tail_graph = None if tail is None else fused.with_batch(tail)
    except BaseException:
        if opened is not None and isinstance(device, str):
            opened.close()
        raise
    return Request(
        graph, fused, tail_graph, optimizer, kind, gpu, recipe, accumulate, seed, allocator, opened, ranks, communicator,
        capture, whole_process, clip_grad_norm,
    )  # fmt: skip


def make_recipe(
    graph: Graph, precision: Precision, limit: int | None, deterministic: bool, fusions: Sequence[str] | None,
    device: Device | None, *, tune: bool = True,
) -> Recipe:  # fmt: skip
    """The recipe of a graph on a device; ``fusions`` None: those that pay there. ``tune``: measure which engines are fastest."""
    if not hasattr(device, "select_engine"):
        return numpy_recipe(graph, precision, limit, deterministic, fusions or ())
    from minidnn.cuda_recipes import cuda_recipe

    cuda: CudaDevice = device  # type: ignore[assignment]
    return cuda_recipe(graph, precision, limit, deterministic, fusions, device=cuda, tune=tune)


def _device(device: str | Device | None, precision: Precision, deterministic: bool) -> Device | None:
    if not isinstance(device, str):
        return device
    if device.startswith("cuda"):
        from minidnn.device.cuda import open_device

        return open_device(device, precision.name, deterministic)
    if device != "emulated":
        raise UserError(f"device={device!r} is unknown; use 'cuda:0', 'emulated', or None to plan without arrays")
    if precision.name not in ("fp32", "fp64"):
        raise UserError(
            f"precision {precision.name} needs a GPU: device='cuda:0'; on the emulated device use fp32, or device=None to "
            "plan only"
        )
    return EmulatedDevice()


def _ranks(
    wish: str | Strategy | None,
    communicator: Communicator,
    batch: int,
    tail: int | None,
    device: str | Device | None,
    accumulate: int,
    allocator: str,
    clip_grad_norm: float | None,
) -> Ranks:
    """Who takes part and how. Raises UserError for what does not go together."""
    if wish is None:
        raise UserError("a communicator without a strategy: name one, for example strategy='ring_delayed'")
    strategy = Strategy.parse(wish)
    if strategy.implementation is None:
        where = device if isinstance(device, str) else getattr(device, "name", "")
        fast = where.startswith("cuda") and not strategy.rooted
        strategy = replace(strategy, implementation="nccl" if fast else "steps")
    if strategy.delayed and accumulate > 1:
        raise UserError(
            f"accumulate={accumulate} cannot be combined with ring_delayed, whose second gradient buffer is on its way while "
            "the first is written; use strategy ring, or accumulate=1"
        )
    if clip_grad_norm is not None:
        raise UserError(
            f"clip_grad_norm={clip_grad_norm:g} cannot be combined with the strategy {strategy.name}: the norm is over the whole "
            "gradient, of which a rank sees the sums of its shard alone; leave it out, or train on one rank"
        )
    if allocator == "pool":
        raise UserError(
            f"allocator='pool' runs all rows on one stream, and the strategy {strategy.name} needs two; use slab"
        )
    return Ranks(communicator.rank, communicator.size, strategy, batch, tail)
