"""Compile a graph into a step that can be run: request, program, budget. The place where the parts are tied together."""

from __future__ import annotations

from collections.abc import Sequence

from minidnn import profiles
from minidnn.budget import parse_bytes, require_fit
from minidnn.device.base import Device
from minidnn.layers import Graph
from minidnn.optim import Optimizer
from minidnn.parallel.communicator import Communicator
from minidnn.parallel.step import ParallelStep
from minidnn.prepare import DEFAULT_OPTIMIZER, prepare
from minidnn.request import LEAST_WORKSPACE_LIMIT, Request
from minidnn.schedule.plan import Plan, PlanError, keep
from minidnn.schedule.program import Program
from minidnn.schedule.ranks import Strategy
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
    strategy: str | Strategy | None = None,
    communicator: Communicator | None = None,
    capture: str = "auto",
    fusions: Sequence[str] | None = None,
    process_memory: int | str | None = None,
    clip_grad_norm: float | None = None,
) -> CompiledStep:
    """Compile a training step, or refuse it.

    Args:
        graph: ends in one loss; see ``minidnn.Graph``.
        plan: what becomes of every layer's outputs; None: ``keep``.
        device: ``"cuda:0"``, ``"emulated"``, or None: plan only, no arrays; or a device object, which runs one step at a time,
            stays open when the step is closed, and keeps the plans of its libraries for the next.
        profile: GPU by which time is predicted: a bundled name or the path of a measured profile.
        precision: fp32, tf32, bf16 or fp16; the emulated device runs fp32, and fp64 for gradient checks.
        memory: budget of the slab in bytes; None (no limit of ours), an int, ``"4GiB"``, or ``"60%"`` of keep's reserved bytes.
        host_memory: the same for pinned host memory.
        recipe: replay these bit-changing choices; None: the backend chooses, under ``workspace_limit`` bytes a convolution.
        seed: of initial weights and dropout.
        allocator: ``"slab"``: one allocation, planned offsets. ``"pool"``: the same rows on a pool like CuPy's.
        tail: samples of a smaller last batch.
        accumulate: micro-batches that one update sees.
        strategy: data parallelism: ``ring_delayed``, ``ring``, ``all_reduce``, ``master_slave`` or ``tree``, with ``:steps`` or
            ``:nccl`` after it to choose how; graph and ``tail`` then count the samples of all ranks together.
        communicator: this rank's end of the group; None: a group of one.
        capture: whether training steps are replayed as CUDA graphs: ``"auto"`` (on a GPU), ``"on"`` or ``"off"``.
        process_memory: bytes that a GPU's driver may count for the process: the slab and what lies outside it, which is
            measured. It bounds ``memory``.
        clip_grad_norm: bound of the gradient's L2 norm over all parameters together, as
            ``torch.nn.utils.clip_grad_norm_``; None: none. The gradients of ``step.gradients`` are not clipped.
        fusions: chains of layers to compute as one (``minidnn.fuse.FUSIONS``); None: those that pay on the device.

    Raises:
        DoesNotFit: a budget is exceeded; nothing was allocated.
        UserError: anything else that cannot be done as asked, in one sentence.
    """
    request = prepare(
        graph, optimizer=optimizer, device=device, profile=profile, precision=precision, recipe=recipe, seed=seed,
        deterministic=deterministic, allocator=allocator, tail=tail, accumulate=accumulate,
        workspace_limit=workspace_limit, strategy=strategy, communicator=communicator, capture=capture,
        fusions=fusions, process_memory=process_memory, clip_grad_norm=clip_grad_norm,
    )  # fmt: skip
    try:
        return _compile(request, plan, memory, host_memory)
    except BaseException:
        request.close_device()
        raise


def _compile(
    request: Request, plan: Plan | None, memory: int | str | None, host_memory: int | str | None
) -> CompiledStep:
    plan = request.translate(plan or keep())

    def leaner() -> tuple[int, int | None]:
        try:
            return LEAST_WORKSPACE_LIMIT, request.with_least_workspace().program(plan).reserved_bytes
        except PlanError:
            return LEAST_WORKSPACE_LIMIT, None

    budget = request.device_budget(memory)
    host_budget = None if host_memory is None else parse_bytes(host_memory, what="host_memory")
    program = request.program(plan)
    process = request.process()
    bound = process is not None and budget == process.slab_bytes
    require_fit(program, budget, host_budget, leaner, process.text() if process is not None and bound else "")
    return make_step(request, plan, program, budget)


def make_step(request: Request, plan: Plan, program: Program, memory: int | None) -> CompiledStep:
    """The step that runs a program of a request on its device, if it has one. ``memory``: the budget of a pool in bytes."""
    made = CompiledStep if request.ranks is None else ParallelStep
    return made(request, plan, program, memory)
