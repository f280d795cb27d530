"""LeNet: Caffe's variant for MNIST, and LeNet-5 of 1998."""

from __future__ import annotations

from minidnn.graph import Tensor
from minidnn.layers import Graph

INIT = "uniform_fan_in"


def lenet(g: Graph, x: Tensor, classes: int) -> Tensor:
    """Caffe's ``examples/mnist/lenet``: 431,080 parameters on 28 x 28 x 1 with 10 classes. Only ip1 has a ReLU."""
    x = g.conv2d(x, 20, 5, bias=True, init=INIT, name="conv1")
    x = g.max_pool(x, 2, name="pool1")
    x = g.conv2d(x, 50, 5, bias=True, init=INIT, name="conv2")
    x = g.flatten(g.max_pool(x, 2, name="pool2"), name="flatten")
    x = g.relu(g.linear(x, 500, name="ip1"), name="relu1")
    return g.linear(x, classes, name="ip2")


def lenet5(g: Graph, x: Tensor, classes: int) -> Tensor:
    """LeNet-5 (LeCun et al. 1998, section II-B): scaled tanh, trainable sub-sampling; pads images below 32 x 32 by 2.

    61,750 parameters with 1 channel and 10 classes. Two departures: C3 sees all six maps, not the paper's sparse table,
    and the output is linear with softmax, not radial basis functions.
    """
    x = g.tanh(g.conv2d(x, 6, 5, padding=2 if x.shape[1] < 32 else 0, bias=True, init=INIT, name="c1"), name="c1.tanh")
    x = g.tanh(g.subsample(x, 2, name="s2"), name="s2.tanh")
    x = g.tanh(g.conv2d(x, 16, 5, bias=True, init=INIT, name="c3"), name="c3.tanh")
    x = g.tanh(g.subsample(x, 2, name="s4"), name="s4.tanh")
    x = g.tanh(g.conv2d(x, 120, 5, bias=True, init=INIT, name="c5"), name="c5.tanh")
    x = g.tanh(g.linear(g.flatten(x, name="flatten"), 84, name="f6"), name="f6.tanh")
    return g.linear(x, classes, name="output")
