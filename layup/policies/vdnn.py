"""vdnn: vDNN-all, every feature map goes to the host.

The paper: the input feature map of every layer is offloaded while that layer computes forward, and the layer ends only when
the copy has ended; backward prefetches the input of the nearest earlier layer while the present one computes. It comes with a
choice of convolution algorithms: memory-optimal, performance-optimal, or found by profiling.

What we do: OFFLOAD for every unit whose output backward needs. The device copy goes when the layers that read it have run,
and it comes back one layer ahead. A copy may run on when its layer has ended; only a reuse of its bytes waits for it.

Left out: the choice of algorithms, which is our recipe and can change bits; the batch itself, which stays on the device.

Source: Rhu et al. 2016 (MICRO), "vDNN: virtualized deep neural networks for scalable, memory-efficient neural network design".
"""

from __future__ import annotations

from layup.context import Context
from layup.policies.shared import one_layer_ahead
from minidnn.schedule.plan import Decision, Plan

KNOB = False


def plans(context: Context) -> list[Plan]:
    """The one plan that offloads all."""
    decisions = [Decision.OFFLOAD if unit.stored else Decision.KEEP for unit in context.costs.units]
    return [one_layer_ahead(context.costs, decisions, "vdnn")]
