"""cifar-quick: Caffe's small net for CIFAR-10."""

from __future__ import annotations

from minidnn.graph import Tensor
from minidnn.layers import Graph
from models.blocks import conv_relu

INIT = "uniform_fan_in"


def cifar_quick(g: Graph, x: Tensor, classes: int) -> Tensor:
    """Caffe's ``cifar10_quick``: 145,578 parameters on 32 x 32 x 3 with 10 classes.

    Its averages are taken with padding 1 where Caffe lets the last window hang over the edge: the same extents at even
    sizes, with windows that begin one pixel earlier.
    """
    x = g.conv2d(x, 32, 5, padding=2, bias=True, init=INIT, name="conv1")
    x = g.relu(g.max_pool(x, 3, 2, ceil_mode=True, name="pool1"), name="relu1")
    x = conv_relu(g, x, 32, 5, padding=2, init=INIT, name="conv2", relu="relu2")
    x = g.avg_pool(x, 3, 2, 1, name="pool2")
    x = conv_relu(g, x, 64, 5, padding=2, init=INIT, name="conv3", relu="relu3")
    x = g.flatten(g.avg_pool(x, 3, 2, 1, name="pool3"), name="flatten")
    return g.linear(g.linear(x, 64, name="ip1"), classes, name="ip2")
