"""Gradients of the whole compiled engine, in float64, against central differences of its own loss.

A layer is put between parameters: the gradients of those below it check its data gradient, its own its weight gradient.
Heads are linear on the flattened map, so that every position has another weight and no error can hide in a mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import minidnn
from minidnn.layers import Graph
from minidnn.precision import precision
from minidnn.schedule.analysis import Analysis
from minidnn.schedule.plan import Decision
from tests.step.branching import NETS, Body, random_net, residual

Array = NDArray[np.float64]
BATCH, CLASSES = 3, 4
TOLERANCE = 1e-7  # relative; measured: 1e-8 at a slope of 1e-3, where rounding of the loss is all
STEP = 2e-5  # so short that no ReLU or maximum switches on the way, with these seeds
NO_UPDATE = minidnn.SGD(lr=0.0)
PLANS = {"keep": minidnn.keep, "naive": minidnn.naive}


# -- layers -----------------------------------------------------------------------------------------------------------
def net(body: Body, size: tuple[int, int] = (6, 5), channels: int = 4, smoothing: float = 0.0) -> Graph:
    """Convolution with bias, ``body``, and a linear head on all that ``body`` leaves."""
    g = Graph()
    x, y = g.input((BATCH, *size, channels)), g.label((BATCH,))
    h = body(g, g.conv2d(x, 4, 3, padding=1, bias=True, init="uniform_fan_in", name="below"))
    logits = g.linear(g.flatten(h) if len(h.shape) == 4 else h, CLASSES, name="head")
    g.softmax_cross_entropy(logits, y, smoothing=smoothing)
    return g


LAYERS: dict[str, Body] = {
    "conv": lambda g, h: g.conv2d(h, 5, 3, padding=1),
    "conv, no padding": lambda g, h: g.conv2d(h, 3, (2, 3)),
    "conv, bias": lambda g, h: g.conv2d(h, 5, 3, padding=1, bias=True),
    "conv, stride": lambda g, h: g.conv2d(h, 5, 3, stride=2, padding=1),
    "conv, stride beyond the kernel": lambda g, h: g.conv2d(h, 5, (1, 2), stride=(2, 3)),
    "conv, dilation": lambda g, h: g.conv2d(h, 5, (3, 2), padding=(2, 1), dilation=(2, 3)),
    "conv, groups": lambda g, h: g.conv2d(h, 6, 3, padding=1, groups=2, bias=True),
    "conv, depthwise": lambda g, h: g.conv2d(h, 4, 3, padding=1, groups=4),
    "conv, 1 x 1": lambda g, h: g.conv2d(h, 7, 1, bias=True),
    "conv, all at once": lambda g, h: g.conv2d(h, 6, (3, 2), (2, 1), (2, 1), (1, 2), groups=2, bias=True),
    "linear": lambda g, h: g.linear(g.flatten(h), 6),
    "linear, no bias": lambda g, h: g.linear(g.flatten(h), 6, bias=False),
    "batch norm": lambda g, h: g.batch_norm(g.conv2d(g.tanh(h), 5, 3)),
    "batch norm, flat": lambda g, h: g.batch_norm(g.linear(g.flatten(g.tanh(h)), 6, bias=False)),
    "batch norm, large eps": lambda g, h: g.batch_norm(g.conv2d(g.tanh(h), 5, 3), eps=0.3, momentum=None),
    "relu": lambda g, h: g.relu(h),
    "tanh": lambda g, h: g.tanh(h),
    "tanh, other shape": lambda g, h: g.tanh(h, amplitude=0.7, slope=1.3),
    "max pool": lambda g, h: g.max_pool(h, 2),
    "max pool, overlapping and padded": lambda g, h: g.max_pool(h, 3, 2, 1),
    "max pool, ceil mode": lambda g, h: g.max_pool(h, (3, 2), 2, ceil_mode=True),
    "max pool, rows left over": lambda g, h: g.max_pool(h, (2, 3), (3, 2)),
    "avg pool": lambda g, h: g.avg_pool(h, 2),
    "avg pool, overlapping and padded": lambda g, h: g.avg_pool(h, 3, 2, 1),
    "global avg pool": lambda g, h: g.global_avg_pool(h),
    "global max pool": lambda g, h: g.global_max_pool(h),
    "subsample": lambda g, h: g.subsample(h, 2),
    "dropout": lambda g, h: g.dropout(h),
    "dropout, other share": lambda g, h: g.dropout(g.dropout(h, 0.2), 0.7),
    "dropout, none": lambda g, h: g.dropout(h, 0.0),
    "add": lambda g, h: g.add(g.conv2d(h, 4, 1), g.conv2d(h, 4, 3, padding=1)),
    "concat": lambda g, h: g.concat(g.conv2d(h, 3, 1), h, g.conv2d(h, 2, 1)),
    "concat, flat": lambda g, h: g.concat(g.global_avg_pool(h), g.linear(g.flatten(h), 3)),
    "flatten": lambda g, h: g.linear(g.flatten(g.flatten(g.relu(h))), 5),
    "lrn": lambda g, h: g.lrn(g.conv2d(h, 7, 1), size=5, alpha=2.0),
    "lrn, even size, other power": lambda g, h: g.lrn(g.conv2d(h, 7, 1), size=4, alpha=1.5, beta=0.6, k=2.0),
}


# -- the check --------------------------------------------------------------------------------------------------------
class Problem:
    """A compiled net, its data, and its loss and gradients as functions of the parameters alone."""

    def __init__(self, graph: Graph, plan: minidnn.Plan, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.step = minidnn.compile(graph, plan, NO_UPDATE, precision="fp64", seed=seed)
        self.x = rng.standard_normal(graph.inputs[0].shape).astype(np.float32)
        self.y = rng.integers(0, CLASSES, BATCH)
        self.state: dict[str, Any] = self.step.state_dict()
        for parameter in graph.parameters:  # no bias may sit at zero, no weight at one
            if parameter.trainable:
                array = self.state[parameter.name]
                array += 0.3 * rng.standard_normal(array.shape) / np.sqrt(array.size / len(array))
        self.rng = rng

    def _set(self, state: dict[str, Any]) -> None:
        self.step.load_state_dict(state)
        self.step.steps = 0  # the same dropout masks every time

    def gradients(self) -> dict[str, Array]:
        self._set(self.state)
        return self.step.gradients(self.x, self.y)

    def loss(self, direction: dict[str, Array], distance: float) -> float:
        self._set({**self.state, **{name: self.state[name] + distance * v for name, v in direction.items()}})
        return self.step.run(self.x, self.y).loss

    def slope(self, direction: dict[str, Array]) -> float:
        """Derivative along ``direction`` by the difference of fourth order."""
        near = self.loss(direction, STEP) - self.loss(direction, -STEP)
        far = self.loss(direction, 2 * STEP) - self.loss(direction, -2 * STEP)
        return (8 * near - far) / (12 * STEP)

    def direction(self, gradients: dict[str, Array]) -> dict[str, Array]:
        """Random, of length 1."""
        direction = {name: self.rng.standard_normal(g.shape) for name, g in gradients.items()}
        length = np.sqrt(sum(float(np.sum(v * v)) for v in direction.values()))
        return {name: v / length for name, v in direction.items()}

    def check(self, gradients: dict[str, Array]) -> None:
        """Compare the derivative along one random direction of these parameters."""
        direction = self.direction(gradients)
        expected = self.slope(direction)
        ours = sum(float(np.sum(gradients[name] * v)) for name, v in direction.items())
        assert abs(expected) > 1e-4, f"the direction in {list(gradients)} says nothing: a slope of {expected}"
        assert ours == pytest.approx(expected, rel=TOLERANCE, abs=0.0), list(gradients)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("layer", LAYERS)
def test_every_parameter_s_gradient_is_the_derivative_of_the_loss(layer: str, plan: str) -> None:
    problem = Problem(net(LAYERS[layer]), PLANS[plan]())
    gradients = problem.gradients()
    assert list(gradients) == [p.name for p in problem.step.graph.parameters if p.trainable]
    for name in gradients:
        problem.check({name: gradients[name]})


@pytest.mark.parametrize("plan", PLANS)
def test_label_smoothing_enters_loss_and_gradient_alike(plan: str) -> None:
    problem = Problem(net(LAYERS["relu"], smoothing=0.2), PLANS[plan]())
    problem.check(problem.gradients())


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NETS)
def test_gradients_add_up_over_skips_and_branches(name: str, plan: str) -> None:
    problem = Problem(net(NETS[name]), PLANS[plan](), seed=1)
    gradients = problem.gradients()
    problem.check(gradients)
    problem.check({n: g for n, g in gradients.items() if n.startswith("below")})


def plans(graph: Graph, seed: int) -> list[minidnn.Plan]:
    """All buffers of their own; everything offloaded; everything recomputed; a random decision for every in-place unit."""
    units = Analysis(graph, precision("fp64")).units()
    rng = np.random.default_rng(seed)
    drawn = {last: list(Decision)[int(rng.integers(len(Decision)))] for last in dict.fromkeys(units.values())}
    mixed = {name: drawn[last] for name, last in units.items() if name != "loss"}
    whole = [minidnn.Plan(dict.fromkeys(mixed, decision)) for decision in (Decision.OFFLOAD, Decision.RECOMPUTE)]
    return [minidnn.naive(), *whole, minidnn.Plan(mixed)]


@pytest.mark.parametrize("seed", range(10))
def test_gradients_of_random_nets_are_right_and_the_same_bits_under_any_plan(seed: int) -> None:
    graph = net(random_net(seed), size=(4, 3))
    problem = Problem(graph, minidnn.keep(), seed)
    gradients = problem.gradients()
    problem.check(gradients)
    for plan in plans(graph, seed):
        for name, other in Problem(graph, plan, seed).gradients().items():
            assert np.array_equal(gradients[name], other), (name, plan)


def test_runs_at_learning_rate_zero_move_no_parameter() -> None:
    """What all checks above rest on."""
    problem = Problem(net(residual), minidnn.keep())
    problem._set(problem.state)
    problem.step.run(problem.x, problem.y)
    after = problem.step.state_dict()
    for parameter in problem.step.graph.parameters:
        if parameter.trainable:
            assert np.array_equal(after[parameter.name], problem.state[parameter.name])
