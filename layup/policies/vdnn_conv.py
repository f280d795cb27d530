"""vdnn_conv: vDNN-conv, the inputs of convolutions go to the host.

The paper: as vDNN-all, but only for convolutional layers, whose long run time hides the copy best. What we do: OFFLOAD for
every unit that a convolution reads; all else is kept. In a net with batch norm, what batch norm reads is therefore kept,
though it is a convolution's output. Left out: see ``vdnn``.

Source: Rhu et al. 2016 (MICRO), "vDNN: virtualized deep neural networks for scalable, memory-efficient neural network design".
"""

from __future__ import annotations

from layup.context import Context
from layup.policies.shared import one_layer_ahead
from minidnn.schedule.plan import Decision, Plan

KNOB = False


def plans(context: Context) -> list[Plan]:
    """The one plan that offloads the inputs of convolutions."""
    costs = context.costs
    root = costs.analysis.root
    read = {root[tensor].name for node in costs.nodes if node.layer.kind == "conv2d" for tensor in node.inputs}
    decisions = [
        Decision.OFFLOAD if any(costs.keys[k].name in read for k in unit.keys) and unit.stored else Decision.KEEP
        for unit in costs.units
    ]
    return [one_layer_ahead(costs, decisions, "vdnn_conv")]
