"""Small nets that reach every path of the engine, batches for them, and a comparison of states to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidnn.device.base import Device
from minidnn.layers import Graph
from minidnn.optim import SGD
from minidnn.schedule.program import Program
from minidnn.step import CompiledStep

Arrays = Mapping[str, NDArray[Any]]

CLASSES = 4
MOMENTUM = SGD(lr=0.05, momentum=0.9, weight_decay=1e-3)


def chain(batch: int = 6) -> Graph:
    """Three layers: convolution, ReLU, linear."""
    g = Graph()
    x, y = g.input((batch, 6, 6, 2)), g.label((batch,))
    x = g.relu(g.conv2d(x, 4, 3, padding=1, name="conv"), name="relu")
    g.softmax_cross_entropy(g.linear(g.flatten(x, name="flatten"), CLASSES, name="fc"), y)
    return g


def plain(layers: int, batch: int = 8, channels: int = 8, size: int = 8) -> Graph:
    """Convolution and ReLU over and over, all of one size."""
    g = Graph()
    x, y = g.input((batch, size, size, 3)), g.label((batch,))
    for i in range(layers):
        x = g.relu(g.conv2d(x, channels, 3, padding=1, name=f"conv{i}"), name=f"relu{i}")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(x, name="pool"), 10, name="fc"), y)
    return g


def residual(batch: int = 6, units: int = 1) -> Graph:
    """Residual units between a stem and a head: in-place layers, an aliased gradient, an ADD for each."""
    g = Graph()
    x, y = g.input((batch, 6, 6, 2)), g.label((batch,))
    x = g.relu(g.batch_norm(g.conv2d(x, 4, 3, padding=1, name="stem"), name="stem.bn"), name="stem.relu")
    for unit in (f"unit{number}" for number in range(units)):
        h = g.batch_norm(g.conv2d(x, 4, 3, padding=1, name=f"{unit}.conv1"), name=f"{unit}.bn1")
        h = g.conv2d(g.relu(h, name=f"{unit}.relu1"), 4, 3, padding=1, name=f"{unit}.conv2")
        h = g.batch_norm(h, name=f"{unit}.bn2")
        x = g.relu(g.add(h, x, name=f"{unit}.add"), name=f"{unit}.relu2")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(x, name="pool"), CLASSES, name="fc"), y)
    return g


def dense(batch: int = 6, units: int = 2) -> Graph:
    """Units that each stand beside what they have read: many contributions to one gradient."""
    g = Graph()
    x, y = g.input((batch, 6, 6, 2)), g.label((batch,))
    x = g.conv2d(x, 4, 3, padding=1, bias=True, name="stem")
    for unit in range(units):
        h = g.relu(g.batch_norm(x, name=f"bn{unit}"), name=f"relu{unit}")
        x = g.concat(x, g.conv2d(h, 3, 3, padding=1, name=f"conv{unit}"), name=f"concat{unit}")
    x = g.avg_pool(g.relu(x, name="last"), 2, name="pool")
    g.softmax_cross_entropy(g.linear(g.flatten(x, name="flatten"), CLASSES, name="fc"), y, smoothing=0.1)
    return g


def dropout(batch: int = 6, units: int = 1) -> Graph:
    """Pools, LRN, groups, dropout, and two linear layers behind a flattened map."""
    g = Graph()
    x, y = g.input((batch, 8, 8, 2)), g.label((batch,))
    x = g.lrn(g.relu(g.conv2d(x, 6, 3, padding=1, bias=True, name="conv"), name="relu"), name="lrn")
    x = g.max_pool(x, 3, 2, 1, name="pool")
    for unit in range(units):
        x = g.relu(g.conv2d(x, 6, 3, padding=1, groups=2, name=f"conv{unit}"), name=f"relu{unit}")
        x = g.dropout(x, 0.2, name=f"drop{unit}")
    x = g.flatten(g.max_pool(x, 2, name="last_pool"), name="flatten")
    x = g.dropout(g.relu(g.linear(x, 10, name="fc1"), name="fc1.relu"), 0.5, name="fc1.drop")
    g.softmax_cross_entropy(g.linear(x, CLASSES, name="fc2"), y)
    return g


NETS: dict[str, Callable[..., Graph]] = {"chain": chain, "residual": residual, "dense": dense, "dropout": dropout}


def batch(graph: Graph, seed: int = 0, samples: int | None = None) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Random pixels and labels for a graph, or for another number of samples of its shape."""
    rng = np.random.default_rng(seed)
    n = graph.inputs[0].shape[0] if samples is None else samples
    classes = graph.logits.shape[-1]
    x = rng.standard_normal((n, *graph.inputs[0].shape[1:]), np.float32)
    return x, rng.integers(0, classes, n)


def state(step: CompiledStep) -> dict[str, NDArray[Any]]:
    """All that a training leaves: parameters, running statistics, optimizer state and its counters."""
    return {**step.state_dict(), **step.optimizer_state_dict()}


def differing(a: Arrays, b: Arrays) -> list[str]:
    """Names whose bits differ. NaN equals NaN of the same bits, and 0 does not equal -0."""
    assert a.keys() == b.keys()
    return [name for name in a if np.asarray(a[name]).tobytes() != np.asarray(b[name]).tobytes()]


def rebuilt(step: CompiledStep, program: Program, device: Device | None, memory: int | None = None) -> CompiledStep:
    """The same step with other rows or on another device."""
    return CompiledStep(replace(step.request, device=device), step.plan, program, memory)


def train(step: CompiledStep, steps: int, *, first: int = 0) -> list[float]:
    """Run training steps on batches ``first`` .. and return the losses, all read at the end: two steps are in flight."""
    results = [step.run(*batch(step.graph, seed=number)) for number in range(first, first + steps)]
    return [result.loss for result in results]
