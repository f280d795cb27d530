"""The recipe of a graph on a CUDA device: for every convolution direction cuDNN's engine, its knobs and its workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidnn.graph import Graph, Node
from minidnn.kernels.cudnn import Convolution
from minidnn.precision import Precision
from minidnn.schedule.analysis import Analysis
from minidnn.schedule.recipe import Engine, Recipe

if TYPE_CHECKING:
    from minidnn.device.cuda import CudaDevice

CUDA_ACCUMULATING = ("channel_sum",)
"""CUDA kernels that can add into an existing weight gradient: cuDNN's cannot."""


def cuda_recipe(
    graph: Graph, precision: Precision, workspace_limit: int | None, deterministic: bool, *, device: CudaDevice,
    tune: bool = False,
) -> Recipe:  # fmt: skip
    """Ask cuDNN's heuristics for every direction of every convolution, or (``tune``) measure which engine is fastest.

    Looks at no budget. Measuring takes seconds and may choose differently every time: keep the recipe it gives.
    ``device`` must have been made for the same precision and determinism; it keeps the plans it builds.
    """
    choose = device.tune_engine if tune else device.select_engine
    engines: dict[str, Engine] = {}
    for node in graph.nodes:
        shapes = Analysis.shapes(node)
        calls = (*node.layer.forward(shapes), *node.layer.backward_weight(shapes))
        if node.output.requires_grad and node.inputs[0].requires_grad and any(call.engine for call in calls):
            calls += node.layer.backward_data(shapes, 0)
        for call in calls:
            if call.engine:
                problem = _problem(node, call.engine, dict(call.attrs), precision)
                engines[f"{node.name}:{call.engine}"] = choose(problem, workspace_limit)
    return Recipe(precision.name, "cuda", engines, CUDA_ACCUMULATING, workspace_limit, deterministic)


def _problem(node: Node, direction: str, attrs: dict[str, tuple[int, int]], precision: Precision) -> Convolution:
    x, y, weight = node.inputs[0].shape, node.output.shape, node.parameter("weight").shape
    return Convolution(direction, x, y, weight, attrs["stride"], attrs["padding"], attrs["dilation"], precision.compute)
