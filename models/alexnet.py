"""AlexNet: torchvision's, and the one of 2012 with local response normalisation and groups."""

from __future__ import annotations

from minidnn.graph import Tensor
from minidnn.layers import Graph
from models.blocks import conv_relu

INIT = "uniform_fan_in"


def alexnet(g: Graph, x: Tensor, classes: int) -> Tensor:
    """torchvision's ``alexnet`` (Krizhevsky 2014, "One weird trick"): 61,100,840 parameters at 224 x 224."""
    x = conv_relu(g, x, 64, 11, stride=4, padding=2, init=INIT, name="features.0", relu="features.1")
    x = g.max_pool(x, 3, 2, name="features.2")
    x = conv_relu(g, x, 192, 5, padding=2, init=INIT, name="features.3", relu="features.4")
    x = g.max_pool(x, 3, 2, name="features.5")
    for index, channels in ((6, 384), (8, 256), (10, 256)):
        name, relu = f"features.{index}", f"features.{index + 1}"
        x = conv_relu(g, x, channels, 3, padding=1, init=INIT, name=name, relu=relu)
    x = g.flatten(g.max_pool(x, 3, 2, name="features.12"), name="flatten")
    x = g.linear(g.dropout(x, name="classifier.0"), 4096, name="classifier.1")
    x = g.dropout(g.relu(x, name="classifier.2"), name="classifier.3")
    x = g.relu(g.linear(x, 4096, name="classifier.4"), name="classifier.5")
    return g.linear(x, classes, name="classifier.6")


def alexnet_2012(g: Graph, x: Tensor, classes: int) -> Tensor:
    """Krizhevsky et al. 2012 as Caffe's reference has it: 60,965,224 parameters at 227 x 227.

    The two halves of the paper's two GPUs are the groups of conv2, conv4 and conv5. LRN comes before pooling, with
    Caffe's k = 1 and alpha = 1e-4 / size (paper: k = 2, alpha = 1e-4). Convolutions start by He et al.'s rule with zero
    biases, not by the paper's N(0, 0.01) with some biases 1.
    """
    x = conv_relu(g, x, 96, 11, stride=4, name="conv1", relu="relu1")
    x = g.max_pool(g.lrn(x, name="norm1"), 3, 2, name="pool1")
    x = conv_relu(g, x, 256, 5, padding=2, groups=2, name="conv2", relu="relu2")
    x = g.max_pool(g.lrn(x, name="norm2"), 3, 2, name="pool2")
    x = conv_relu(g, x, 384, 3, padding=1, name="conv3", relu="relu3")
    x = conv_relu(g, x, 384, 3, padding=1, groups=2, name="conv4", relu="relu4")
    x = conv_relu(g, x, 256, 3, padding=1, groups=2, name="conv5", relu="relu5")
    x = g.flatten(g.max_pool(x, 3, 2, name="pool5"), name="flatten")
    for number in (6, 7):
        x = g.relu(g.linear(x, 4096, init="normal_0.01", name=f"fc{number}"), name=f"relu{number}")
        x = g.dropout(x, name=f"drop{number}")
    return g.linear(x, classes, init="normal_0.01", name="fc8")
