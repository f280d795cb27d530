"""The recipe of a graph on a CUDA device: its fusions, and engine and workspace of every direction of a convolution or Linear."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from minidnn.fuse import FUSIONS, check_fusions, fuse
from minidnn.graph import Node
from minidnn.kernels.problem import OWN, Convolution, Problem, linear_product
from minidnn.layers import Graph, Linear
from minidnn.precision import Precision
from minidnn.precision import precision as find_precision
from minidnn.schedule.analysis import Analysis
from minidnn.schedule.recipe import Engine, Recipe

if TYPE_CHECKING:
    from minidnn.device.cuda import CudaDevice

CUDA_ACCUMULATING = ("channel_sum",)
"""CUDA kernels that can add into an existing weight gradient: cuDNN's cannot."""

MOST_NOTES = 4
"""Refusals of the libraries that are told one by one."""

UNBOUNDED, UNBOUNDED_SINGLE = 1 << 30, 3 << 29
"""Bytes of workspace of one convolution where no limit is given, and in true fp32: there the fast engines keep the transforms of
the filters, of 512 by 512 channels 1.3 GB, whatever part of the images they take at a time."""


def cuda_recipe(
    graph: Graph, precision: Precision, workspace_limit: int | None, deterministic: bool,
    fusions: Sequence[str] | None = None, *, device: CudaDevice, tune: bool = False, room: int | None = None,
) -> Recipe:  # fmt: skip
    """Ask cuDNN's heuristics for every direction of every convolution and Linear, or (``tune``) measure which engine is fastest.

    Looks at no budget but ``room``: bytes that measuring itself may take at a time. Measuring takes seconds and may choose
    differently every time: keep the recipe it gives.
    ``device`` must have been made for the same precision and determinism; it keeps the plans it builds. ``fusions`` None:
    all of them. Evaluation, which runs unfused, asks for the convolution alone where training has its bias and ReLU with it.
    """
    fusions = FUSIONS if fusions is None else check_fusions(fusions)
    unbounded = UNBOUNDED_SINGLE if precision.name == "fp32" else UNBOUNDED
    limit = unbounded if workspace_limit is None else workspace_limit
    engines: dict[str, Engine] = {}
    choose = partial(device.tune_engine, room=room) if tune else device.select_engine
    for trains, nodes in ((True, fuse(graph, fusions).graph.nodes), (False, graph.nodes)):
        for node in nodes:
            shapes = Analysis.shapes(node)
            calls = node.layer.forward(shapes)
            if trains:
                calls = (*calls, *node.layer.backward_weight(shapes))
                if node.output.requires_grad and node.inputs[0].requires_grad and any(call.engine for call in calls):
                    calls += node.layer.backward_data(shapes, 0)
            for call in calls:
                key = f"{node.name}:{call.engine}"
                if call.engine and key not in engines:
                    engines[key] = choose(_problem(node, call.engine, dict(call.attrs), precision), limit)
    return Recipe(
        precision=precision.name, backend="cuda", engines=engines, accumulating=CUDA_ACCUMULATING,
        workspace_limit=workspace_limit, deterministic=deterministic, fusions=tuple(fusions),
    )  # fmt: skip


def fallback_notes(graph: Graph, recipe: Recipe) -> tuple[str, ...]:
    """What the libraries refused, each with layer, shapes and element type, and how it is computed instead: for people."""
    if recipe.backend != "cuda":
        return ()
    precision, found = find_precision(recipe.precision), []
    for node in fuse(graph, recipe.fusions).graph.nodes:
        for direction in ("forward", "forward_relu", "backward_data", "backward_weight"):
            engine = recipe.engines.get(f"{node.name}:{direction}")
            if engine is None or not engine.name.startswith(OWN.name):
                continue
            y, weight = node.output.shape, node.parameter("weight").shape
            found.append(
                f"neither cuDNN nor cuBLAS has an engine for {direction} of {node.name!r}, x {node.inputs[0].shape}, y {y}, "
                f"weight {weight}, {precision.compute}, under the workspace limit: our own kernel computes it, which is slower"
            )
    more = len(found) - MOST_NOTES
    return (*found[:MOST_NOTES], f"and so in {more} more cases") if more > 0 else tuple(found)


def _problem(node: Node, direction: str, attrs: dict[str, tuple[int, int]], precision: Precision) -> Problem:
    x, y, weight = node.inputs[0].shape, node.output.shape, node.parameter("weight").shape
    if isinstance(node.layer, Linear):
        return linear_product(direction, x[0], x[1], y[1], precision.compute)
    return Convolution(direction, x, y, weight, attrs["stride"], attrs["padding"], attrs["dilation"], precision.compute)
