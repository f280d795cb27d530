"""Prepare: from the arguments of ``compile`` to a Request: check them, open the device, fix the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minidnn import profiles
from minidnn.budget import parse_bytes, process_room
from minidnn.combinations import check_capture, check_device, check_recipe, check_strategy, check_values
from minidnn.device.base import Device
from minidnn.device.emulated import EmulatedDevice
from minidnn.errors import UserError
from minidnn.fuse import fuse
from minidnn.layers import Graph
from minidnn.optim import SGD, Optimizer
from minidnn.parallel.communicator import Communicator
from minidnn.parallel.gpus import on_device
from minidnn.parallel.inprocess import InProcess
from minidnn.precision import Precision
from minidnn.precision import precision as find_precision
from minidnn.request import Request, make_recipe
from minidnn.schedule.ranks import Ranks, Strategy
from minidnn.schedule.recipe import Recipe

DEFAULT_OPTIMIZER = SGD(lr=0.1, momentum=0.9, weight_decay=1e-4)


def prepare(
    graph: Graph, optimizer: Optimizer = DEFAULT_OPTIMIZER, device: str | Device | None = "emulated",
    profile: str | profiles.Profile = "h200", precision: str = "fp32", recipe: Recipe | None = None, seed: int = 0,
    deterministic: bool = True, allocator: str = "slab", tail: int | None = None, accumulate: int = 1,
    workspace_limit: int | str | None = None, strategy: str | Strategy | None = None,
    communicator: Communicator | None = None, capture: str = "auto", fusions: Sequence[str] | None = None,
    process_memory: int | str | None = None, clip_grad_norm: float | None = None,
) -> Request:  # fmt: skip
    """Check a request and fix its recipe. The arguments are those of ``minidnn.compile``.

    A device that is named is opened: the caller closes it. Raises UserError for what cannot be done as asked, in one
    sentence; then nothing is left open.
    """
    graph.check()
    kind, batch = find_precision(precision), graph.inputs[0].shape[0]
    check_values(batch, tail, accumulate, allocator, capture, clip_grad_norm)
    if recipe is not None:
        check_recipe(recipe, precision, fusions)
        deterministic = recipe.deterministic
    ranks = None
    if strategy is not None or communicator is not None:
        communicator = communicator or InProcess.group(1)[0]
        chosen = _strategy(strategy, device)
        check_strategy(chosen, accumulate, allocator, clip_grad_norm)
        ranks = Ranks(communicator.rank, communicator.size, chosen, batch, tail)
        if chosen.delayed and optimizer is DEFAULT_OPTIMIZER:
            optimizer = replace(DEFAULT_OPTIMIZER, nesterov=True)
        graph = graph.with_batch(ranks.local(batch))
        # As many as in a whole batch, it may be: all ranks have the same schedules, since they verify them together.
        tail = None if tail is None else ranks.local(tail)
    whole_process = None if process_memory is None else parse_bytes(process_memory, what="process_memory")
    limit = None if workspace_limit is None else parse_bytes(workspace_limit, what="workspace_limit")
    gpu = profiles.load(profile)
    opened = _open(device, kind, deterministic)
    try:
        communicator = None if communicator is None else on_device(communicator, opened)
        check_capture(capture, allocator, device, opened)
        check_device(device, opened, process_memory, recipe)
        if recipe is None:
            room = None if whole_process is None else process_room(opened, whole_process)
            recipe = make_recipe(graph, kind, limit, deterministic, fusions, opened, room=room)
            if ranks is not None and communicator and hasattr(opened, "select_engine") and batch % ranks.size == 0:
                # Each has measured which engines are fastest: they need not have found the same.
                recipe = Recipe.from_json(communicator.exchange(recipe.to_json())[0])
        fused = fuse(graph, recipe.fusions).graph
        tail_graph = tail_recipe = None
        if tail is not None:
            tail_graph, limits = fused.with_batch(tail), (recipe.workspace_limit, recipe.deterministic, recipe.fusions)
            tail_recipe = make_recipe(graph.with_batch(tail), kind, *limits, opened, tune=False)
    except BaseException:
        if opened is not None and isinstance(device, str):
            opened.close()
        raise
    return Request(
        source=graph, graph=fused, tail_graph=tail_graph, optimizer=optimizer, precision=kind, gpu=gpu, recipe=recipe,
        tail_recipe=tail_recipe, accumulate=accumulate, seed=seed, allocator=allocator, device=opened, ranks=ranks,
        communicator=communicator, capture=capture, process_memory=whole_process, clip_grad_norm=clip_grad_norm,
        owns_device=isinstance(device, str),
    )  # fmt: skip


def _strategy(wish: str | Strategy | None, device: str | Device | None) -> Strategy:
    """The strategy asked for; if it does not say how, by NCCL where that is possible."""
    if wish is None:
        raise UserError("a communicator without a strategy: name one, for example strategy='ring_delayed'")
    strategy = Strategy.parse(wish)
    if strategy.implementation is not None:
        return strategy
    where = device if isinstance(device, str) else getattr(device, "name", "")
    fast = where.startswith("cuda") and not strategy.rooted
    return replace(strategy, implementation="nccl" if fast else "steps")


def _open(device: str | Device | None, precision: Precision, deterministic: bool) -> Device | None:
    """The device of a name; a device object, or none, as it is. Raises UserError for one without the precision."""
    if isinstance(device, str) and device.startswith("cuda"):
        from minidnn.device.cuda import open_device

        return open_device(device, precision.name, deterministic)
    if isinstance(device, str) and device != "emulated":
        raise UserError(f"device={device!r} is unknown; use 'cuda:0', 'emulated', or None to plan without arrays")
    opened = EmulatedDevice() if isinstance(device, str) else device
    on_numpy = precision.compute in ("float32", "float64") and precision.name != "tf32"  # which is of tensor cores
    if isinstance(opened, EmulatedDevice) and not on_numpy:
        raise UserError(
            f"precision {precision.name} needs a GPU: device='cuda:0'; on the emulated device use fp32, or device=None to "
            "plan only"
        )
    return opened
