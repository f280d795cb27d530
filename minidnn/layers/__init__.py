"""All layers, and the public Graph that offers them as methods. To add one, read ``base`` first."""

from minidnn.layers.activation import ReLU, Tanh
from minidnn.layers.base import Aux, Call, Layer, ParameterSpec, Shapes
from minidnn.layers.builder import Graph
from minidnn.layers.conv import Conv2d
from minidnn.layers.dropout import Dropout
from minidnn.layers.linear import Linear
from minidnn.layers.loss import SoftmaxCrossEntropy
from minidnn.layers.lrn import LRN
from minidnn.layers.merge import Add, Concat, Flatten
from minidnn.layers.norm import BatchNorm
from minidnn.layers.pooling import AvgPool, GlobalAvgPool, MaxPool, SubSample

__all__ = [
    "LRN", "Add", "Aux", "AvgPool", "BatchNorm", "Call", "Concat", "Conv2d", "Dropout", "Flatten", "GlobalAvgPool",
    "Graph", "Layer", "Linear", "MaxPool", "ParameterSpec", "ReLU", "Shapes", "SoftmaxCrossEntropy", "SubSample",
    "Tanh",
]  # fmt: skip
