"""What the protocol check trains and how it compares: nets, steps on both devices, distances."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import minidnn
from minidnn.cuda_recipes import cuda_recipe
from minidnn.device.cuda import CudaDevice
from minidnn.device.emulated import EmulatedDevice
from minidnn.precision import precision as find_precision
from minidnn.schedule.plan import Plan

BATCH, CLASSES, STEPS = 16, 10, 4
OPTIMIZERS = {
    "momentum": minidnn.SGD(lr=0.05, momentum=0.9, weight_decay=1e-4),
    "nesterov": minidnn.SGD(lr=0.05, momentum=0.9, nesterov=True),
    "sgd": minidnn.SGD(lr=0.05, weight_decay=1e-4),
    "adam": minidnn.Adam(lr=1e-3, weight_decay=1e-4),
}
MOMENTUM = OPTIMIZERS["momentum"]

Batch = tuple[Any, Any]
State = dict[str, Any]


# -- nets ---------------------------------------------------------------------------------------------------------------
def chain(pool: str = "global", batch: int = BATCH) -> minidnn.Graph:
    """conv, BN, ReLU twice, so that the second one has a data gradient, then Linear and the loss."""
    g = minidnn.Graph()
    x = g.input((batch, 12, 12, 8))
    h = g.relu(g.batch_norm(g.conv2d(x, 16, 3, padding=1, name="conv1")))
    h = g.relu(g.batch_norm(g.conv2d(h, 32, 3, stride=2, padding=1, name="conv2")))
    h = g.global_avg_pool(h) if pool == "global" else g.flatten(g.max_pool(h, 2))
    g.softmax_cross_entropy(g.linear(h, CLASSES, name="fc"), g.label((batch,)))
    return g


def every_layer() -> minidnn.Graph:
    """One layer of each kind, on extents that no vector access divides, with a skip, a concat and grouped convolution."""
    g = minidnn.Graph()
    x = g.input((BATCH, 17, 13, 3))
    h = g.lrn(g.relu(g.conv2d(x, 12, 5, stride=2, padding=2, bias=True)), size=5, alpha=0.1)
    h = g.max_pool(h, 3, stride=2, padding=1)
    left = g.tanh(g.conv2d(h, 9, 3, padding=2, dilation=2, groups=3))
    right = g.avg_pool(h, 3, stride=1, padding=1)
    h = g.concat(left, right)
    h = g.add(h, g.relu(g.batch_norm(g.conv2d(h, 21, 1))))
    h = g.flatten(g.tanh(g.subsample(h, 2)))
    h = g.dropout(g.relu(g.linear(h, 31)), 0.4)
    g.softmax_cross_entropy(g.linear(h, CLASSES), g.label((BATCH,)), smoothing=0.1)
    return g


# -- running ------------------------------------------------------------------------------------------------------------
def batches(graph: minidnn.Graph, seed: int, count: int = STEPS) -> list[Batch]:
    """Random batches for a graph."""
    rng = np.random.default_rng(seed)
    shape = graph.inputs[0].shape
    return [(rng.standard_normal(shape, np.float32), rng.integers(0, CLASSES, shape[0])) for _ in range(count)]


def emulated(graph: minidnn.Graph, seed: int, optimizer: Any = MOMENTUM) -> minidnn.CompiledStep:
    """The step on NumPy."""
    return minidnn.compile(graph, optimizer=optimizer, device=EmulatedDevice(), seed=seed)


@contextmanager
def on_gpu(graph: minidnn.Graph, args: argparse.Namespace, *, optimizer: Any = MOMENTUM, precision: str = "fp32",
           plan: Plan | None = None, refuse: Sequence[str] = (),
           tune: bool = False, capture: str = "off") -> Iterator[minidnn.CompiledStep]:  # fmt: skip
    """The step on the GPU, with the recipe that cuDNN's heuristics, or a measurement, give."""
    device = CudaDevice(args.device, precision=precision, refuse=refuse)
    try:
        recipe = cuda_recipe(graph, find_precision(precision), args.workspace_limit, True, device=device, tune=tune)
        step = minidnn.compile(
            graph,
            plan,
            optimizer=optimizer,
            device=device,
            precision=precision,
            recipe=recipe,
            seed=args.seed,
            capture=capture,
        )
        yield step
        step.close()
    finally:
        device.close()


def train(step: minidnn.CompiledStep, data: Sequence[Batch]) -> State:
    """Losses and the whole state after some steps. The host runs ahead: losses are read at the end."""
    results = [step.run(x, y) for x, y in data]
    losses = np.array([result.loss for result in results])
    return {"losses": losses, **step.state_dict(), **step.optimizer_state_dict()}


# -- comparing ----------------------------------------------------------------------------------------------------------
def distance(a: Any, b: Any) -> float:
    """The relative distance ||a - b|| / ||b||, in double."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    scale = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) / scale if scale else float(np.linalg.norm(a))


def furthest(found: State, expected: State) -> dict[str, Any]:
    """The largest relative distance of any tensor, and which."""
    assert found.keys() == expected.keys(), f"names differ: {sorted(found.keys() ^ expected.keys())}"
    errors = {name: distance(found[name], expected[name]) for name in expected}
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return {"error": errors[worst], "tensor": worst, "tensors": len(errors)}


def within(result: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """Pass if the error is below the tolerance; NaN never passes."""
    return {"passed": bool(result["error"] < tolerance), "tolerance": tolerance, **result}


def equal(found: State, expected: State) -> dict[str, Any]:
    """Pass if every tensor is equal to the bit."""
    assert found.keys() == expected.keys()
    differing = [name for name in expected if not np.array_equal(found[name], expected[name], equal_nan=True)]
    return {"passed": not differing and all(np.isfinite(v).all() for v in found.values()), "differing": differing}
