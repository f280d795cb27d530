"""The recipe of a graph on a CUDA device: its fusions and, for every convolution direction, cuDNN's engine and workspace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minidnn.fuse import FUSIONS, check_fusions, fuse
from minidnn.graph import Node
from minidnn.kernels.cudnn import Convolution
from minidnn.layers import Graph
from minidnn.precision import Precision
from minidnn.schedule.analysis import Analysis
from minidnn.schedule.recipe import Engine, Recipe

if TYPE_CHECKING:
    from minidnn.device.cuda import CudaDevice

CUDA_ACCUMULATING = ("channel_sum",)
"""CUDA kernels that can add into an existing weight gradient: cuDNN's cannot."""

UNBOUNDED = 1 << 30
"""Bytes of workspace of one convolution where no limit is given."""


def default_fusions(precision: Precision) -> tuple[str, ...]:
    """The fusions that pay on a GPU. In true fp32 the convolutions with an epilogue are slower than those without."""
    return tuple(name for name in FUSIONS if precision.name != "fp32" or name != "conv_bias_relu")


def cuda_recipe(
    graph: Graph, precision: Precision, workspace_limit: int | None, deterministic: bool,
    fusions: Sequence[str] | None = None, *, device: CudaDevice, tune: bool = False,
) -> Recipe:  # fmt: skip
    """Ask cuDNN's heuristics for every direction of every convolution, or (``tune``) measure which engine is fastest.

    Looks at no budget. Measuring takes seconds and may choose differently every time: keep the recipe it gives.
    ``device`` must have been made for the same precision and determinism; it keeps the plans it builds. ``fusions`` None:
    those of ``default_fusions``. Evaluation, which runs unfused, has its engines from the heuristics.
    """
    fusions = default_fusions(precision) if fusions is None else check_fusions(fusions)
    limit = UNBOUNDED if workspace_limit is None else workspace_limit
    engines: dict[str, Engine] = {}
    for trains, nodes in ((True, fuse(graph, fusions).graph.nodes), (False, graph.nodes)):
        choose = device.tune_engine if tune and trains else device.select_engine
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
    return Recipe(precision.name, "cuda", engines, CUDA_ACCUMULATING, workspace_limit, deterministic, tuple(fusions))


def _problem(node: Node, direction: str, attrs: dict[str, tuple[int, int]], precision: Precision) -> Convolution:
    x, y, weight = node.inputs[0].shape, node.output.shape, node.parameter("weight").shape
    return Convolution(direction, x, y, weight, attrs["stride"], attrs["padding"], attrs["dilation"], precision.compute)
