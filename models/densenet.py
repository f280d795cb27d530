"""DenseNet (Huang et al. 2017, "Densely connected convolutional networks"), the BC variant: torchvision's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from minidnn.graph import Tensor
from minidnn.layers import Graph

BLOCKS = {121: (6, 12, 24, 16)}
"""Depth -> dense layers in each block."""

GROWTH, BOTTLENECK, STEM = 32, 4, 64
"""Channels a dense layer adds, how many times that its 1x1 convolution has, and channels of the stem."""


def densenet(g: Graph, x: Tensor, classes: int, *, blocks: Sequence[int]) -> Tensor:
    """torchvision's ``densenet121`` for blocks (6, 12, 24, 16): 7,978,856 parameters with 1000 classes.

    A block's features grow by concatenation, two at a time: each dense layer reads all of them, so their bytes grow with the
    square of its length. No dropout, and none of torchvision's ``memory_efficient``: what is recomputed, the plan says.
    """
    x = _conv(g, x, STEM, 7, "features.conv0", stride=2)
    x = g.max_pool(_norm_relu(g, x, "features.norm0", "features.relu0"), 3, 2, 1, name="features.pool0")
    for number, layers in enumerate(blocks, 1):
        for layer in range(1, layers + 1):
            x = _dense(g, x, f"features.denseblock{number}.denselayer{layer}")
        if number < len(blocks):
            name = f"features.transition{number}"
            x = _conv(g, _norm_relu(g, x, f"{name}.norm", f"{name}.relu"), x.shape[3] // 2, 1, f"{name}.conv")
            x = g.avg_pool(x, 2, name=f"{name}.pool")
    x = g.global_avg_pool(_norm_relu(g, x, "features.norm5", "features.relu5"), name="avgpool")
    # PyTorch's default weight, but a bias of zeros
    return g.linear(x, classes, init=f"uniform:{1 / math.sqrt(x.shape[1])!r}", name="classifier")


def _dense(g: Graph, x: Tensor, name: str) -> Tensor:
    """x beside the ``GROWTH`` channels made of it."""
    y = _conv(g, _norm_relu(g, x, f"{name}.norm1", f"{name}.relu1"), BOTTLENECK * GROWTH, 1, f"{name}.conv1")
    y = _conv(g, _norm_relu(g, y, f"{name}.norm2", f"{name}.relu2"), GROWTH, 3, f"{name}.conv2")
    return g.concat(x, y, name=f"{name}.concat")


def _norm_relu(g: Graph, x: Tensor, norm: str, relu: str) -> Tensor:
    return g.relu(g.batch_norm(x, name=norm), name=relu)


def _conv(g: Graph, x: Tensor, channels: int, kernel: int, name: str, *, stride: int = 1) -> Tensor:
    """Convolution without bias that keeps the extent (divided by the stride), He et al.'s start by fan-in."""
    std = math.sqrt(2 / (x.shape[3] * kernel**2))
    return g.conv2d(x, channels, kernel, stride, kernel // 2, init=f"normal_{std!r}", name=name)
