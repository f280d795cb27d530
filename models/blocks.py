"""Blocks that several nets share."""

from __future__ import annotations

from minidnn.graph import Tensor
from minidnn.layers import Graph


def conv_relu(
    g: Graph, x: Tensor, channels: int, kernel: int, *, name: str, relu: str, stride: int = 1, padding: int = 0,
    groups: int = 1, init: str = "kaiming_normal_fan_out",
) -> Tensor:  # fmt: skip
    """Convolution with bias, ReLU: the nets before batch norm."""
    x = g.conv2d(x, channels, kernel, stride, padding, groups=groups, bias=True, init=init, name=name)
    return g.relu(x, name=relu)


def conv_bn(
    g: Graph, x: Tensor, channels: int, kernel: int, stride: int = 1, *, conv: str, bn: str, weight_init: str = "ones"
) -> Tensor:
    """Convolution without bias that keeps the extent (divided by the stride), batch norm."""
    x = g.conv2d(x, channels, kernel, stride, padding=kernel // 2, name=conv)
    return g.batch_norm(x, weight_init=weight_init, name=bn)
