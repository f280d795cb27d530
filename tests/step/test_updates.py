"""What an update makes of gradients: the optimizers, accumulation over micro-batches, and layer-wise update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import minidnn
from minidnn.layers import Graph
from minidnn.optim import Optimizer
from minidnn.schedule.plan import PlanError

State = dict[str, NDArray[Any]]

CLASSES = 5
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": minidnn.SGD(lr=0.1),
    "sgd, decay": minidnn.SGD(lr=0.1, weight_decay=0.05),
    "momentum": minidnn.SGD(lr=0.1, momentum=0.9),
    "momentum, decay": minidnn.SGD(lr=0.1, momentum=0.9, weight_decay=0.05),
    "nesterov, decay": minidnn.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
    "adam": minidnn.Adam(lr=0.01),
    "adam, decay": minidnn.Adam(lr=0.01, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.05),
}


def plain(batch: int) -> Graph:
    """No batch norm: what a sample contributes does not depend on its company."""
    g = Graph()
    x, y = g.input((batch, 6, 6, 3)), g.label((batch,))
    h = g.relu(g.conv2d(x, 6, 3, padding=1, bias=True, name="conv1"))
    h = g.relu(g.add(g.conv2d(h, 6, 3, padding=1, name="conv2"), h))
    h = g.tanh(g.linear(g.flatten(g.max_pool(h, 2)), 12, name="fc1"))
    g.softmax_cross_entropy(g.linear(h, CLASSES, name="fc2"), y)
    return g


def normalised(batch: int) -> Graph:
    """Batch norm, whose data gradient reads its weights, a skip, and dropout."""
    g = Graph()
    x, y = g.input((batch, 6, 6, 3)), g.label((batch,))
    h = g.relu(g.batch_norm(g.conv2d(x, 6, 3, padding=1)))
    h = g.relu(g.add(g.batch_norm(g.conv2d(h, 6, 3, padding=1)), h))
    h = g.dropout(g.subsample(h, 2), 0.2)
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(h), CLASSES), y)
    return g


def batches(sizes: Sequence[int], seed: int = 0) -> list[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((n, 6, 6, 3)).astype(np.float32), rng.integers(0, CLASSES, n)) for n in sizes]


# -- optimizers -------------------------------------------------------------------------------------------------------
def expected_update(optimizer: Optimizer, w: Any, g: Any, memory: list[Any], number: int, lr: float) -> Any:
    """One update by the papers' formulas, out of place. ``memory`` holds the velocity, or Adam's two moments."""
    g = g + optimizer.attrs["weight_decay"] * w
    if isinstance(optimizer, minidnn.Adam):
        (b1, b2), (m, v) = optimizer.betas, memory
        memory[:] = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        first, second = memory[0] / (1 - b1**number), memory[1] / (1 - b2**number)
        return w - lr * first / (np.sqrt(second) + optimizer.eps)
    assert isinstance(optimizer, minidnn.SGD)
    memory[0] = optimizer.momentum * memory[0] + g
    return w - lr * (g + optimizer.momentum * memory[0] if optimizer.nesterov else memory[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_updates_follow_the_formula(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    step = minidnn.compile(plain(4), optimizer=optimizer, precision="fp64")
    weights = step.state_dict()
    memory = {key: [np.zeros_like(w), np.zeros_like(w)] for key, w in weights.items()}
    for number, (x, y) in enumerate(batches([4] * 5), 1):
        lr = optimizer.lr / number  # given to run: the rate is data
        for key, gradient in step.gradients(x, y).items():
            weights[key] = expected_update(optimizer, weights[key], gradient, memory[key], number, lr)
        step.run(x, y, lr=lr)
        for key, ours in step.state_dict().items():
            np.testing.assert_allclose(ours, weights[key], rtol=0, atol=1e-13, err_msg=f"{key} after update {number}")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_updates_are_those_of_torch(name: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the reference here and is not installed")
    optimizer = OPTIMIZERS[name]
    step = minidnn.compile(plain(4), optimizer=optimizer, precision="fp64")
    weights = {key: torch.nn.Parameter(torch.from_numpy(w)) for key, w in step.state_dict().items()}
    if isinstance(optimizer, minidnn.SGD):
        settings = {field: getattr(optimizer, field) for field in ("lr", "momentum", "nesterov", "weight_decay")}
        theirs = torch.optim.SGD(list(weights.values()), **settings)
    else:
        assert isinstance(optimizer, minidnn.Adam)
        settings = {field: getattr(optimizer, field) for field in ("lr", "betas", "eps", "weight_decay")}
        theirs = torch.optim.Adam(list(weights.values()), **settings)
    for x, y in batches([4] * 5):
        for key, gradient in step.gradients(x, y).items():
            weights[key].grad = torch.from_numpy(gradient)
        theirs.step()
        step.run(x, y)
    for key, ours in step.state_dict().items():
        np.testing.assert_allclose(ours, weights[key].detach().numpy(), rtol=0, atol=1e-13, err_msg=key)


# -- accumulation -----------------------------------------------------------------------------------------------------
# Adam divides by the size of the gradient, so where a gradient is all rounding a small eps would show rounding alone.
ACCUMULATED: dict[str, Optimizer] = {
    "momentum": minidnn.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3),
    "nesterov": minidnn.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adam": minidnn.Adam(lr=0.01, eps=1e-3),
}
GROUPS = {
    "8 x 4 = 32": ([8, 8, 8, 8], 4),
    "8 + 8 + 8 + 5 = 29": ([8, 8, 8, 5], 4),
    "8 + 5 = 13, closed early by the tail": ([8, 5], 4),
    "5 alone": ([5], 4),
}


@pytest.mark.parametrize("optimizer", ACCUMULATED.values(), ids=list(ACCUMULATED))
@pytest.mark.parametrize("group", GROUPS)
def test_updates_from_micro_batches_are_those_of_the_joined_batch(group: str, optimizer: Optimizer) -> None:
    sizes, accumulate = GROUPS[group]
    # The joined steps: whole groups of 32, then the group under test, so that it follows updates of another size.
    plans = [[8, 8, 8, 8], sizes, sizes]
    joined_whole = minidnn.compile(plain(32), optimizer=optimizer)
    joined = minidnn.compile(plain(sum(sizes)), optimizer=optimizer)
    step = minidnn.compile(plain(8), optimizer=optimizer, accumulate=accumulate, tail=5)
    for number, micro in enumerate(plans):
        parts = batches(micro, seed=number)
        x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        whole = joined if len(x) == joined.batch else joined_whole
        losses = [step.run(*part).loss for part in parts]
        assert whole.run(x, y).loss == pytest.approx(np.average(losses, weights=micro), abs=1e-6)
        for other in (joined, joined_whole):
            if other is not whole:
                other.load_state_dict(whole.state_dict())
                other.load_optimizer_state_dict(whole.optimizer_state_dict())
    assert step.updates == 3
    expected = joined.state_dict()
    start = minidnn.compile(plain(8)).state_dict()
    for name, ours in step.state_dict().items():
        np.testing.assert_allclose(ours, expected[name], rtol=0, atol=1e-6, err_msg=name)
        assert np.abs(ours - start[name]).max() > 1e-3, f"{name} has not moved"


def test_a_weight_does_not_move_inside_a_group() -> None:
    step = minidnn.compile(plain(8), optimizer=ACCUMULATED["nesterov"], accumulate=3)
    before = step.state_dict()
    for part in batches([8, 8]):
        step.run(*part)
    assert all(np.array_equal(before[name], w) for name, w in step.state_dict().items())


def test_batch_norm_s_data_gradient_reads_the_sums_of_its_own_micro_batch_not_the_accumulated_ones() -> None:
    """An update over a group is the mean of the gradients that each micro-batch has alone."""
    step = minidnn.compile(normalised(4), optimizer=minidnn.SGD(lr=1.0), precision="fp64", accumulate=3)
    before, parts = step.state_dict(), batches([4, 4, 4])
    alone = []
    for number, part in enumerate(parts):
        step.steps = number  # so that dropout's masks are those of the group
        alone.append(step.gradients(*part))
    step.steps = 0
    for part in parts:
        step.run(*part)
    after = step.state_dict()
    for name in alone[0]:
        mean = sum(gradients[name] for gradients in alone) / len(alone)
        np.testing.assert_allclose(before[name] - after[name], mean, rtol=0, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("look", ["gradients", "evaluate"])
def test_looking_inside_a_group_leaves_its_accumulated_gradients_alone(look: str) -> None:
    first, second, other = batches([8, 8, 8])
    weights = []
    for looks in (False, True):
        step = minidnn.compile(plain(8), optimizer=minidnn.SGD(lr=0.1), accumulate=2)
        step.run(*first)
        if looks:
            _ = step.gradients(*other) if look == "gradients" else step.evaluate(other[0])
        step.run(*second)
        weights.append(step.state_dict())
    assert all(np.array_equal(weights[0][name], w) for name, w in weights[1].items())


def test_layer_wise_update_asked_for_beside_accumulation_is_refused_by_name() -> None:
    plan = minidnn.Plan(reuse=minidnn.Reuse(layerwise_update=True))
    with pytest.raises(PlanError, match=r"layerwise_update .*accumul"):
        minidnn.compile(plain(8), plan, accumulate=4)
    minidnn.compile(plain(8), plan)  # alone it is fine


# -- layer-wise update ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", [minidnn.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3), minidnn.Adam(lr=0.01)])
def test_layer_wise_update_changes_no_bit_of_weights_state_or_loss(optimizer: Optimizer) -> None:
    on = minidnn.Plan(reuse=minidnn.Reuse(layerwise_update=True))
    off = minidnn.Plan(reuse=replace(on.reuse, layerwise_update=False))
    steps = [minidnn.compile(normalised(4), plan, optimizer) for plan in (on, off, minidnn.naive())]
    for x, y in batches([4] * 10):
        losses = {step.run(x, y).loss for step in steps}
        assert len(losses) == 1
    first, *others = [{**step.state_dict(), **step.optimizer_state_dict()} for step in steps]
    for other in others:
        assert all(np.array_equal(first[name], array) for name, array in other.items())
