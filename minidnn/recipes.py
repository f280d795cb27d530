"""Make the recipe of a graph: for every convolution direction, the engine that a backend chooses. Looks at no budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidnn.fuse import check_fusions, fuse
from minidnn.graph import Node
from minidnn.kernels import numpy_kernels
from minidnn.layers import Graph
from minidnn.precision import Precision
from minidnn.schedule.analysis import Analysis
from minidnn.schedule.recipe import Engine, Recipe
from minidnn.spec import ITEM_BYTES

NUMPY_ACCUMULATING = ("channel_sum", "conv2d_backward_weight", "linear_backward_weight")
"""NumPy kernels that can add into an existing weight gradient."""


def numpy_recipe(
    graph: Graph,
    precision: Precision,
    workspace_limit: int | None,
    deterministic: bool,
    fusions: Sequence[str] = (),
) -> Recipe:
    """The recipe of the NumPy kernels: im2col in chunks of images whose columns stay under ``workspace_limit`` bytes.

    ``fusions``: none by default, since on a CPU they gain little; for the same rows as on a GPU name its fusions.
    """
    engines: dict[str, Engine] = {}
    for node in (*graph.nodes, *fuse(graph, fusions).graph.nodes):
        shapes = Analysis.shapes(node)
        calls = (*node.layer.forward(shapes), *node.layer.backward_weight(shapes))
        if node.output.requires_grad and node.inputs[0].requires_grad and any(call.engine for call in calls):
            calls += node.layer.backward_data(shapes, 0)
        for call in calls:
            if call.engine and call.kernel.startswith("conv2d"):  # a matrix product is BLAS's: nothing to choose
                key = f"{node.name}:{call.engine}"
                engines[key] = _numpy_engine(node, call.engine, dict(call.attrs), precision, workspace_limit)
    made = check_fusions(fusions)
    return Recipe(
        precision=precision.name, backend="numpy", engines=engines, accumulating=NUMPY_ACCUMULATING,
        workspace_limit=workspace_limit, deterministic=deterministic, fusions=made,
    )  # fmt: skip


def _numpy_engine(node: Node, direction: str, attrs: dict[str, Any], precision: Precision, limit: int | None) -> Engine:
    weight = node.parameter("weight")
    return numpy_kernels.select_engine(
        direction,
        node.inputs[0].shape,
        node.output.shape,
        weight.shape,
        itemsize=ITEM_BYTES[precision.compute],
        workspace_limit=limit,
        **attrs,
    )
