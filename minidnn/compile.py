"""Compile a graph into a step that can be run: request, program, budget. The place where the parts are tied together."""

from __future__ import annotations

from minidnn import profiles
from minidnn.budget import parse_bytes, require_fit
from minidnn.device.base import Device
from minidnn.layers import Graph
from minidnn.optim import Optimizer
from minidnn.request import DEFAULT_OPTIMIZER, prepare
from minidnn.schedule.plan import Plan, PlanError, keep
from minidnn.schedule.recipe import Recipe
from minidnn.step import CompiledStep


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
    request = prepare(
        graph, optimizer, device, profile, precision, recipe, seed, deterministic, allocator, tail, accumulate,
        workspace_limit, strategy, communicator,
    )  # fmt: skip
    plan = plan or keep()

    def leaner() -> tuple[int, int | None]:
        try:
            return 1, request.with_workspace_limit(1).program(plan).reserved_bytes
        except PlanError:
            return 1, None

    budget = request.device_budget(memory)
    host_budget = None if host_memory is None else parse_bytes(host_memory, what="host_memory")
    program = request.program(plan)
    require_fit(program, budget, host_budget, leaner)
    return request.step(plan, program, budget)
