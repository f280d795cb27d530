"""GoogLeNet (Szegedy et al. 2015, "Going deeper with convolutions"), with batch norm: torchvision's."""

from __future__ import annotations

from minidnn.graph import Tensor
from minidnn.layers import Graph

INCEPTION = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""The paper's table 1: channels of 1x1, of 3x3 reduce and 3x3, of 5x5 reduce and 5x5, and of the pool projection."""


def googlenet(g: Graph, x: Tensor, classes: int) -> Tensor:
    """torchvision's ``googlenet`` without its auxiliary heads: 6,624,904 parameters with 1000 classes.

    As torchvision: batch norm after every convolution, no local response normalisation, pools that round up, dropout 0.2,
    and 3x3 convolutions in the branch the paper calls 5x5. Its ``transform_input`` is not applied: images come as they are.
    """
    x = _basic(g, x, 64, 7, stride=2, name="conv1")
    x = g.max_pool(x, 3, 2, ceil_mode=True, name="maxpool1")
    x = _basic(g, x, 64, 1, name="conv2")
    x = _basic(g, x, 192, 3, name="conv3")
    x = g.max_pool(x, 3, 2, ceil_mode=True, name="maxpool2")
    for number, widths in INCEPTION.items():
        if number in ("4a", "5a"):
            window, name = (3, "maxpool3") if number == "4a" else (2, "maxpool4")
            x = g.max_pool(x, window, 2, ceil_mode=True, name=name)
        x = _inception(g, x, widths, f"inception{number}")
    x = g.dropout(g.global_avg_pool(x, name="avgpool"), 0.2, name="dropout")
    return g.linear(x, classes, init="normal_0.01", name="fc")


def _inception(g: Graph, x: Tensor, widths: tuple[int, ...], name: str) -> Tensor:
    """Four branches that read one tensor, side by side again at the end."""
    one, reduce3, three, reduce5, five, projection = widths
    pooled = g.max_pool(x, 3, 1, 1, ceil_mode=True, name=f"{name}.branch4.0")
    branches = (
        _basic(g, x, one, 1, name=f"{name}.branch1"),
        _pair(g, x, reduce3, three, f"{name}.branch2"),
        _pair(g, x, reduce5, five, f"{name}.branch3"),
        _basic(g, pooled, projection, 1, name=f"{name}.branch4.1"),
    )
    return g.concat(*branches, name=f"{name}.concat")


def _pair(g: Graph, x: Tensor, narrow: int, wide: int, name: str) -> Tensor:
    return _basic(g, _basic(g, x, narrow, 1, name=f"{name}.0"), wide, 3, name=f"{name}.1")


def _basic(g: Graph, x: Tensor, channels: int, kernel: int, *, stride: int = 1, name: str) -> Tensor:
    """Convolution that keeps the extent (divided by the stride), batch norm, ReLU."""
    x = g.conv2d(x, channels, kernel, stride, kernel // 2, init="normal_0.01", name=f"{name}.conv")
    return g.relu(g.batch_norm(x, eps=1e-3, name=f"{name}.bn"), name=f"{name}.relu")
