"""Compile a graph into a step that can be run: recipe, program, budget, device. The place where the parts are tied together."""

from __future__ import annotations

from dataclasses import replace

from minidnn import profiles
from minidnn.budget import parse_bytes, require_fit
from minidnn.device.base import Device
from minidnn.device.emulated import EmulatedDevice
from minidnn.errors import UserError
from minidnn.layers import Graph
from minidnn.optim import SGD, Optimizer
from minidnn.precision import Precision
from minidnn.precision import precision as find_precision
from minidnn.recipes import numpy_recipe
from minidnn.schedule.persistent import Persistent
from minidnn.schedule.plan import Plan, PlanError, keep
from minidnn.schedule.program import Program, build
from minidnn.schedule.recipe import Recipe
from minidnn.step import CompiledStep

DEFAULT_OPTIMIZER = SGD(lr=0.1, momentum=0.9, weight_decay=1e-4)


def compile(
    graph: Graph,
    plan: Plan | None = None,
    optimizer: Optimizer = DEFAULT_OPTIMIZER,
    device: str | Device | None = "emulated",
    profile: str | profiles.Profile = "h200",
    precision: str = "fp32",
    memory: int | str | None = None,
    host_memory: int | str | None = None,
    recipe: Recipe | None = None,
    seed: int = 0,
    deterministic: bool = True,
    allocator: str = "slab",
    tail: int | None = None,
    accumulate: int = 1,
    workspace_limit: int | str | None = None,
    strategy: str | None = None,
    communicator: object | None = None,
) -> CompiledStep:
    """Compile a training step, or refuse it.

    Args:
        graph: ends in one loss; see ``minidnn.Graph``.
        plan: what becomes of every layer's outputs; None: ``keep``.
        device: ``"emulated"``, a device object, or None: plan only, no arrays.
        profile: GPU by which time is predicted: a bundled name or the path of a measured profile.
        precision: fp32, or fp64 for gradient checks; others are planned (``device=None``) but not run by the emulated device.
        memory: budget of the slab in bytes; None (no limit of ours), an int, ``"4GiB"``, or ``"60%"`` of keep's reserved bytes.
        host_memory: the same for pinned host memory.
        recipe: replay these bit-changing choices; None: the backend chooses, under ``workspace_limit`` bytes a convolution.
        seed: of initial weights and dropout.
        allocator: ``"slab"``: one allocation, planned offsets. ``"pool"``: the same rows on the model of CuPy's pool.
        tail: samples of a smaller last batch.
        accumulate: micro-batches that one update sees.

    Raises:
        DoesNotFit: a budget is exceeded; nothing was allocated.
        UserError: anything else that cannot be done as asked, in one sentence.
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
    plan = plan or keep()
    limit = None if workspace_limit is None else parse_bytes(workspace_limit, what="workspace_limit")
    gpu = profiles.load(profile)
    if recipe is None:
        recipe = numpy_recipe(graph, kind, limit, deterministic)
    elif recipe.precision != precision:
        raise UserError(
            f"the recipe was made for precision {recipe.precision}, not {precision}; pass precision={recipe.precision!r}"
        )
    tail_graph = None if tail is None else graph.with_batch(tail)

    def program_of(plan: Plan, recipe: Recipe) -> Program:
        tail_recipe = (
            None if tail_graph is None else numpy_recipe(tail_graph, kind, recipe.workspace_limit, deterministic)
        )
        persistent = Persistent(graph, kind, optimizer, accumulate=accumulate > 1, plan=plan)
        return build(graph, tail_graph, plan, recipe, tail_recipe, persistent, gpu, accumulate)

    def keep_bytes() -> int:
        return program_of(keep(), recipe).reserved_bytes

    def leaner() -> tuple[int, int | None]:
        try:
            return 1, program_of(plan, numpy_recipe(graph, kind, 1, deterministic)).reserved_bytes
        except PlanError:
            return 1, None

    budget = None if memory is None else parse_bytes(memory, whole=keep_bytes)
    host_budget = None if host_memory is None else parse_bytes(host_memory, what="host_memory")
    program = program_of(plan, recipe)
    require_fit(program, budget, host_budget, leaner)
    peak = max(program.schedules.values(), key=lambda s: s.profile.peak_bytes).profile
    prediction = replace(
        peak,
        reserved_bytes=program.reserved_bytes,
        host_bytes=program.host_bytes,
        step_seconds=program["train"].profile.step_seconds,
    )
    return CompiledStep(
        graph=graph,
        plan=plan,
        recipe=recipe,
        program=program,
        profile=prediction,
        gpu=gpu,
        optimizer=optimizer,
        precision=kind,
        device=opened,
        seed=seed,
        tail=tail,
        accumulate=accumulate,
        allocator=allocator,
        memory=budget,
    )


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
