"""Three training steps beside PyTorch in the same process: weights, statistics and evaluation are the same afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minidnn
import models
from minidnn.layers import Graph
from tests.golden import ours, rule

torch: Any = pytest.importorskip("torch", reason="PyTorch is the reference here and is not installed")
from tests.golden import torch_nets  # noqa: E402  (needs torch)

nn: Any = torch.nn

STEPS = 3
SEED = 5


def graph(*body: Callable[[Graph, Any], Any], image_size: int, batch: int) -> Graph:
    """Layers one after the other, under a linear head called ``fc``."""
    g = Graph()
    h, y = g.input((batch, image_size, image_size, rule.CHANNELS)), g.label((batch,))
    for layer in body:
        h = layer(g, h)
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(h), rule.CLASSES, name="fc"), y)
    return g


# -- small nets, on both sides ----------------------------------------------------------------------------------------
def lenet() -> tuple[Graph, Any]:
    """A map of 4 x 4 is flattened into ip1."""
    theirs = nn.Sequential()
    theirs.add_module("conv1", nn.Conv2d(3, 20, 5))
    theirs.add_module("pool1", nn.MaxPool2d(2))
    theirs.add_module("conv2", nn.Conv2d(20, 50, 5))
    theirs.add_module("pool2", nn.MaxPool2d(2))
    theirs.add_module("flatten", nn.Flatten())
    theirs.add_module("ip1", nn.Linear(50 * 4 * 4, 500))
    theirs.add_module("relu1", nn.ReLU())
    theirs.add_module("ip2", nn.Linear(500, rule.CLASSES))
    return models.build("lenet", batch=8, classes=rule.CLASSES), theirs


def residual() -> tuple[Graph, Any]:
    """Units of ResNet on small maps, from torch_nets."""
    theirs = nn.Sequential()
    theirs.add_module("unit1", torch_nets.Residual(3, 6, 1))
    theirs.add_module("unit2", torch_nets.Residual(6, 6, 1))
    theirs.add_module("unit3", torch_nets.Residual(6, 9, 2))
    theirs.add_module("avgpool", torch_nets.GlobalAverage())
    theirs.add_module("fc", nn.Linear(9, rule.CLASSES))

    def unit(number: int, channels: int, stride: int) -> Callable[[Graph, Any], Any]:
        def add(g: Graph, x: Any) -> Any:
            name = f"unit{number}"
            y = g.conv2d(x, channels, 3, stride, 1, name=f"{name}.conv1")
            y = g.conv2d(g.relu(g.batch_norm(y, name=f"{name}.bn1")), channels, 3, 1, 1, name=f"{name}.conv2")
            y = g.batch_norm(y, name=f"{name}.bn2")
            if x.shape != y.shape:
                x = g.conv2d(x, channels, 1, stride, name=f"{name}.downsample.0")
                x = g.batch_norm(x, name=f"{name}.downsample.1")
            return g.relu(g.add(y, x))

        return add

    return graph(unit(1, 6, 1), unit(2, 6, 1), unit(3, 9, 2), image_size=10, batch=8), theirs


class Concatenated(nn.Module):  # type: ignore[misc]  # torch is Any here
    """Batch norm without momentum, four branches side by side: grouped and dilated convolution, padded pools, LRN, tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8, momentum=None)
        self.grouped = nn.Conv2d(8, 6, 3, padding=2, dilation=2, groups=2)
        self.narrow = nn.Conv2d(8, 3, (1, 3), padding=(0, 1))
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.fc = nn.Linear(25, rule.CLASSES)

    def forward(self, x: Any) -> Any:
        h = self.bn(self.stem(x))
        branches = [
            torch.relu(self.grouped(h)),
            nn.functional.local_response_norm(h, 5, alpha=0.5, beta=0.75, k=1.0),
            1.7159 * torch.tanh(2 / 3 * self.narrow(h)),
            nn.functional.avg_pool2d(h, 3, 1, 1),
        ]
        return self.fc(self.pool(torch.cat(branches, 1)).mean((2, 3)))


def concat() -> tuple[Graph, Any]:
    """The same."""

    def body(g: Graph, x: Any) -> Any:
        h = g.batch_norm(g.conv2d(x, 8, 3, padding=1, bias=True, name="stem"), momentum=None, name="bn")
        branches = [
            g.relu(g.conv2d(h, 6, 3, padding=2, dilation=2, groups=2, bias=True, name="grouped")),
            g.lrn(h, 5, alpha=0.5),
            g.tanh(g.conv2d(h, 3, (1, 3), padding=(0, 1), bias=True, name="narrow")),
            g.avg_pool(h, 3, 1, 1),
        ]
        return g.max_pool(g.concat(*branches), 3, 2, ceil_mode=True)

    return graph(body, image_size=9, batch=8), Concatenated()


SMALL = {"lenet": lenet, "residual": residual, "concat": concat}


# -- the comparison ---------------------------------------------------------------------------------------------------
def compare(
    net: Graph, theirs: Any, precision: str, tolerance: float, *, lr: float, plan: minidnn.Plan | None = None
) -> None:
    """Train both from the same weights on the same batches."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    theirs = theirs.to(dtype)
    torch_nets.set_parameters(theirs, SEED)
    settings: dict[str, Any] = {"lr": lr, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}
    optimizer = torch.optim.SGD(theirs.parameters(), **settings)
    step = minidnn.compile(net, plan, minidnn.SGD(**settings), precision=precision)
    ours.set_parameters(step, SEED)
    start = step.state_dict()
    assert set(start) == set(theirs.state_dict())
    shape = net.inputs[0].shape
    for number in range(STEPS):
        rng = np.random.default_rng(number)
        x = rng.standard_normal(shape).astype(np.float32)
        y = rng.integers(0, rule.CLASSES, shape[0])
        loss = step.run(x, y).loss
        optimizer.zero_grad()
        their_loss = nn.functional.cross_entropy(theirs(torch_nets.images(x, dtype)), torch.from_numpy(y))
        their_loss.backward()
        optimizer.step()
        assert loss == pytest.approx(their_loss.item(), rel=10 * tolerance), f"loss of step {number}"
    expected = {name: value.numpy() for name, value in theirs.state_dict().items()}
    for name, value in step.state_dict().items():
        assert value.shape == expected[name].shape
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=tolerance, err_msg=name)
        assert np.abs(value - start[name]).max() > tolerance, f"{name} has hardly moved"
    with torch.no_grad():
        logits = theirs.eval()(torch_nets.images(x, dtype)).numpy()
    np.testing.assert_allclose(step.evaluate(x), logits, rtol=0, atol=1e-5 * np.abs(logits).max())
    step.close()


@pytest.mark.parametrize("plan", [minidnn.keep(), minidnn.naive()], ids=["keep", "naive"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp64", 1e-12)])
@pytest.mark.parametrize("name", SMALL)
def test_small_nets_train_as_in_torch(name: str, precision: str, tolerance: float, plan: minidnn.Plan) -> None:
    net, theirs = SMALL[name]()
    compare(net, theirs, precision, tolerance, lr=0.002 if name == "lenet" else 0.02, plan=plan)


# With the rule's weights gradients are steep, so the rates are low. Twenty batch norms over 8 values a channel multiply
# float32's rounding by thousands within three steps, in PyTorch as here: ResNet is compared in float64.
PUBLISHED = {"vgg16": ("fp32", 1e-5, 2e-4), "resnet18": ("fp64", 1e-10, 1e-3), "alexnet": ("fp32", 3e-6, 1e-4)}


@pytest.mark.parametrize("case", rule.CASES, ids=[case.model for case in rule.CASES])
def test_published_nets_train_as_in_torch(case: rule.Case) -> None:
    precision, tolerance, lr = PUBLISHED[case.model]
    compare(ours.build(case), torch_nets.build(case), precision, tolerance, lr=lr)
