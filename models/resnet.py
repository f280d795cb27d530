"""ResNet of any depth (He et al. 2016, "Deep residual learning"): one net, the depth is a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minidnn.graph import Tensor
from minidnn.layers import Graph
from models.blocks import conv_bn

DEEP = 64
"""Above this many units the last batch norm of each starts at zero, so that every unit starts as the identity (Goyal et
al. 2017, section 5.1): each would add its variance to the sum, and the loss of hundreds of them is not finite."""


class Unit(NamedTuple):
    """A residual unit: kernels of its convolutions, which of them has the stride, and output channels / width."""

    kernels: tuple[int, ...]
    strided: int
    expansion: int


basic = Unit((3, 3), 0, 1)
bottleneck = Unit((1, 3, 1), 1, 4)  # version 1.5: the stride is in the 3 x 3

IMAGENET = {
    18: (basic, (2, 2, 2, 2)),
    34: (basic, (3, 4, 6, 3)),
    50: (bottleneck, (3, 4, 6, 3)),
    101: (bottleneck, (3, 4, 23, 3)),
    152: (bottleneck, (3, 8, 36, 3)),
}
CIFAR = (20, 32, 44, 56, 110)


def imagenet(g: Graph, x: Tensor, classes: int, *, blocks: Sequence[int], unit: Unit) -> Tensor:
    """torchvision's ResNet: a 7 x 7 stem and a max pool, stages of width 64, 128, 256, 512."""
    x = g.relu(conv_bn(g, x, 64, 7, 2, conv="conv1", bn="bn1"), name="relu")
    x = g.max_pool(x, 3, 2, 1, name="maxpool")
    return _head(g, _stages(g, x, blocks, unit, width=64), classes)


def cifar(g: Graph, x: Tensor, classes: int, *, depth: int) -> Tensor:
    """The CIFAR nets of section 4.2: 6n + 2 layers, three stages of width 16, 32, 64.

    Shortcuts that change shape are 1 x 1 projections with batch norm (option B) where the paper pads with zeros (option
    A): 2,752 parameters more, for instance 272,474 in ResNet-20 instead of 269,722.
    """
    x = g.relu(conv_bn(g, x, 16, 3, conv="conv1", bn="bn1"), name="relu")
    return _head(g, _stages(g, x, (depth // 6,) * 3, basic, width=16), classes)


def _stages(g: Graph, x: Tensor, blocks: Sequence[int], unit: Unit, width: int) -> Tensor:
    last_init = "zeros" if sum(blocks) > DEEP else "ones"
    for stage, count in enumerate(blocks):
        for number in range(count):
            stride = 2 if stage > 0 and number == 0 else 1
            x = _residual(g, x, unit, width * 2**stage, stride, f"layer{stage + 1}.{number}", last_init)
    return x


def _residual(g: Graph, x: Tensor, unit: Unit, width: int, stride: int, name: str, last_init: str) -> Tensor:
    """relu(shortcut(x) + branch(x)), under the names torchvision gives to nodes."""
    y, last = x, len(unit.kernels) - 1
    channels = width * unit.expansion
    for i, kernel in enumerate(unit.kernels):
        y = conv_bn(
            g, y, channels if i == last else width, kernel, stride if i == unit.strided else 1,
            conv=f"{name}.conv{i + 1}", bn=f"{name}.bn{i + 1}", weight_init=last_init if i == last else "ones",
        )  # fmt: skip
        if i < last:
            y = g.relu(y, name=f"{name}.relu" + (f"_{i}" if i else ""))
    if stride != 1 or x.shape[3] != channels:
        x = conv_bn(g, x, channels, 1, stride, conv=f"{name}.downsample.0", bn=f"{name}.downsample.1")
    return g.relu(g.add(y, x, name=f"{name}.add"), name=f"{name}.relu_{last}")


def _head(g: Graph, x: Tensor, classes: int) -> Tensor:
    return g.linear(g.global_avg_pool(x, name="avgpool"), classes, name="fc")
