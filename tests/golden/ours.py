"""Our side of a golden test: the net of ``models`` without its dropout, and a look at its activations."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

import models
from minidnn import CompiledStep
from minidnn.layers import Dropout, Graph
from minidnn.schedule.instruction import Op, Value
from tests.golden import rule


def build(case: rule.Case) -> Graph:
    """The net, with every dropout's share set to 0: masks are each framework's own."""
    graph = models.build(case.model, batch=rule.BATCH, image_size=case.image_size, classes=rule.CLASSES)
    for node in graph.nodes:
        if isinstance(node.layer, Dropout):
            node.layer = Dropout(0.0)
    return graph


def set_parameters(step: CompiledStep, seed: int) -> None:
    """Give every parameter and running statistic its value by the rule."""
    step.load_state_dict({name: rule.parameter(seed, name, a.shape) for name, a in step.state_dict().items()})


def activations(step: CompiledStep) -> dict[str, NDArray[Any]]:
    """Every layer's output in the last ``gradients`` run, images as (N, C, H, W), by the name of its node.

    Only after a run under plan ``naive``: nothing then gives its bytes away before the end of the step.
    """
    schedule = step.program["gradients"]
    written: dict[str, Value] = {v.name: v for row in schedule.rows if row.op is Op.FORWARD for v in row.writes}
    found = {}
    for node in step.graph.nodes:
        if node.name in written:  # an alias has no value of its own
            array = step.executor.view(written[node.name], schedule.offsets)
            found[node.name] = array.transpose(0, 3, 1, 2) if array.ndim == 4 else array
    return found
