"""naive: every value and every layer's workspace alive for the whole step.

What Caffe does: a data and a diff blob for each top of each layer, a workspace for each convolution, all gradients until
one update. What we do: the same, by switching every reuse of the plan off. Left out: Caffe's own in-place layers, and its
three streams and cuDNN handles for each convolution, which take memory outside the slab.

Source: Jia et al. 2014, "Caffe: convolutional architecture for fast feature embedding"; BVLC Caffe,
``src/caffe/layers/cudnn_conv_layer.cpp``.
"""

from __future__ import annotations

from layup.context import Context
from minidnn.schedule.plan import Plan
from minidnn.schedule.plan import naive as naive_plan

KNOB = False


def plans(context: Context) -> list[Plan]:
    """The one plan without any reuse."""
    return [naive_plan()]
