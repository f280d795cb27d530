"""VGG (Simonyan & Zisserman 2015), configurations A, B, D, E, with and without batch norm: torchvision's."""

from __future__ import annotations

from minidnn.graph import Tensor
from minidnn.layers import Graph

STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Depth -> convolutions in each stage; a max pool ends a stage."""

WIDTHS = (64, 128, 256, 512, 512)


def vgg(g: Graph, x: Tensor, classes: int, *, depth: int, norm: bool) -> Tensor:
    """Five stages of 3 x 3 convolutions with bias, three linear layers. ``norm``: batch norm after each convolution."""
    index = 0
    for count, width in zip(STAGES[depth], WIDTHS, strict=True):
        for _ in range(count):
            x = g.conv2d(x, width, 3, padding=1, bias=True, name=f"features.{index}")
            if norm:
                x = g.batch_norm(x, name=f"features.{index + 1}")
            index += 3 if norm else 2
            x = g.relu(x, name=f"features.{index - 1}")
        x = g.max_pool(x, 2, name=f"features.{index}")
        index += 1
    x = g.flatten(x, name="flatten")
    for index in (0, 3):
        x = g.linear(x, 4096, init="normal_0.01", name=f"classifier.{index}")
        x = g.dropout(g.relu(x, name=f"classifier.{index + 1}"), name=f"classifier.{index + 2}")
    return g.linear(x, classes, init="normal_0.01", name="classifier.6")
