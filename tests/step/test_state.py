"""What is saved is all there is: loading it continues a training bit for bit (cases D3, D6), and a bad file changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minidnn
from minidnn.errors import UserError
from minidnn.layers import Graph
from minidnn.optim import SGD, Adam, Optimizer
from tests.step import nets

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(lr=0.05, weight_decay=1e-3),
    "momentum": nets.MOMENTUM,
    "nesterov": SGD(lr=0.05, momentum=0.9, nesterov=True),
    "adam": Adam(lr=2e-3, weight_decay=1e-3),
}


def restored(step: minidnn.CompiledStep, **options: Any) -> minidnn.CompiledStep:
    """A step that has gone another way, and then takes the state of ``step``."""
    other = minidnn.compile(step.graph, optimizer=step.optimizer, seed=step.seed, **options)
    nets.train(other, 1, first=99)
    other.load_state_dict(step.state_dict())
    other.load_optimizer_state_dict(step.optimizer_state_dict())
    return other


# -- resuming ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [nets.dropout, nets.residual], ids=["dropout", "residual"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_four_steps_and_four_after_a_restart_are_eight(optimizer: str, make: Callable[[], Graph]) -> None:
    straight, first = (minidnn.compile(make(), optimizer=OPTIMIZERS[optimizer], seed=3) for _ in range(2))
    losses = nets.train(straight, 8)
    assert nets.train(first, 4) == losses[:4]
    second = restored(first)
    assert nets.differing(nets.state(first), nets.state(second)) == []
    assert nets.train(second, 4, first=4) == losses[4:]
    assert nets.differing(nets.state(second), nets.state(straight)) == []
    assert (second.steps, second.updates) == (8, 8)


def test_a_restart_under_another_plan_and_allocator_continues_bit_for_bit() -> None:
    straight = minidnn.compile(nets.dropout(), optimizer=OPTIMIZERS["adam"])
    losses = nets.train(straight, 8)
    for options in ({"plan": minidnn.naive()}, {"allocator": "pool"}):
        first = minidnn.compile(nets.dropout(), optimizer=OPTIMIZERS["adam"])
        nets.train(first, 4)
        second = restored(first, **options)
        assert nets.train(second, 4, first=4) == losses[4:]
        assert nets.differing(nets.state(second), nets.state(straight)) == []


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_restart_between_a_tail_batch_and_an_accumulation_group_continues_bit_for_bit(optimizer: str) -> None:
    options: dict[str, Any] = {"tail": 2, "accumulate": 2}

    def epoch(step: minidnn.CompiledStep, seed: int) -> list[float]:
        whole = nets.train(step, 3, first=10 * seed)  # one group, and the first half of another, which the tail closes
        return [*whole, step.run(*nets.batch(step.graph, seed=seed, samples=2)).loss]

    straight, first = (minidnn.compile(nets.dropout(), optimizer=OPTIMIZERS[optimizer], **options) for _ in range(2))
    losses = [epoch(straight, seed) for seed in range(4)]
    assert [epoch(first, seed) for seed in range(2)] == losses[:2]
    second = restored(first, **options)
    assert [epoch(second, seed) for seed in range(2, 4)] == losses[2:]
    assert nets.differing(nets.state(second), nets.state(straight)) == []
    assert (second.steps, second.updates) == (16, 8)


def test_inside_an_accumulation_group_there_is_no_optimizer_state_to_save() -> None:
    step = minidnn.compile(nets.chain(), accumulate=3)
    nets.train(step, 2)
    with pytest.raises(UserError, match="2 of 3 micro-batches are accumulated; save after the update"):
        step.optimizer_state_dict()
    nets.train(step, 1)
    assert step.optimizer_state_dict()["optimizer.updates"] == 1


# -- updates ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updating_layer_by_layer_or_all_at_the_end_gives_identical_weights_after_ten_steps(optimizer: str) -> None:
    states = []
    for layerwise in (True, False):
        plan = minidnn.Plan(reuse=minidnn.Reuse(layerwise_update=layerwise))
        step = minidnn.compile(nets.dropout(), plan, OPTIMIZERS[optimizer])
        nets.train(step, 10)
        states.append(nets.state(step))
    assert nets.differing(*states) == []


@pytest.mark.parametrize("make", [nets.dense, nets.residual], ids=["dense", "residual"])
def test_a_learning_rate_is_that_of_its_step_and_not_of_the_schedule(make: Callable[[], Graph]) -> None:
    varied, fixed = (minidnn.compile(make(), optimizer=SGD(lr=lr)) for lr in (0.5, 0.01))
    for number in range(3):
        varied.run(*nets.batch(varied.graph, seed=number), lr=0.01)
    nets.train(fixed, 3)
    assert nets.differing(nets.state(varied), nets.state(fixed)) == []
    before = varied.state_dict()
    varied.run(*nets.batch(varied.graph), lr=0.0)
    weights = {
        name: array for name, array in varied.state_dict().items() if "running" not in name and "tracked" not in name
    }
    assert nets.differing(weights, {name: before[name] for name in weights}) == []


@pytest.mark.parametrize("make", nets.NETS.values(), ids=list(nets.NETS))
def test_a_tail_batch_trains_like_a_step_of_its_size(make: Callable[..., Graph]) -> None:
    tail, small = (
        minidnn.compile(make(), optimizer=nets.MOMENTUM, tail=2),
        minidnn.compile(make(2), optimizer=nets.MOMENTUM),
    )
    for number in range(2):
        x, y = nets.batch(tail.graph, seed=number, samples=2)
        assert tail.run(x, y).loss == small.run(x, y).loss
    assert nets.differing(nets.state(tail), nets.state(small)) == []


@pytest.mark.parametrize("make", [nets.chain, nets.dense], ids=["without batch norm", "with"])
def test_accumulated_micro_batches_leave_the_mean_of_their_gradients(make: Callable[..., Graph]) -> None:
    start = minidnn.compile(make(), optimizer=SGD(lr=0.0))
    batches = [nets.batch(start.graph, seed=number) for number in range(2)] + [
        nets.batch(start.graph, seed=2, samples=2)
    ]
    weights = [6, 6, 2]
    single = [minidnn.compile(make(len(x)), optimizer=SGD(lr=0.0)).gradients(x, y) for x, y in batches]
    step = minidnn.compile(make(), optimizer=SGD(lr=1.0), tail=2, accumulate=3)
    before = step.state_dict()
    for x, y in batches:
        step.run(x, y)
    assert (step.steps, step.updates) == (3, 1)
    after = step.state_dict()
    for name in single[0]:
        mean = sum(w * g[name].astype(np.float64) for w, g in zip(weights, single, strict=True)) / sum(weights)
        np.testing.assert_allclose(before[name] - after[name], mean, rtol=1e-3, atol=2e-6, err_msg=name)


def test_update_true_closes_a_group_early_and_weighs_the_samples_it_has_seen() -> None:
    early, exact = minidnn.compile(nets.chain(), accumulate=4), minidnn.compile(nets.chain(), accumulate=2)
    for number in range(2):
        early.run(*nets.batch(early.graph, seed=number), update=number == 1)
        exact.run(*nets.batch(exact.graph, seed=number))
    assert early.updates == exact.updates == 1
    for name, array in exact.state_dict().items():
        np.testing.assert_allclose(early.state_dict()[name], array, rtol=1e-6, err_msg=name)


# -- what a file holds ------------------------------------------------------------------------------------------------
def test_a_state_has_torchvisions_names_and_layouts() -> None:
    step = minidnn.compile(nets.dropout(), optimizer=OPTIMIZERS["adam"])
    nets.train(step, 1)
    state, optimizer = step.state_dict(), step.optimizer_state_dict()
    shapes = {name: array.shape for name, array in state.items()}
    assert shapes["conv0.weight"] == (6, 3, 3, 3) and shapes["fc1.weight"] == (10, 24)
    for slot in ("exp_avg", "exp_avg_sq"):
        prefix = f"optimizer.{slot}."
        assert {n.removeprefix(prefix): a.shape for n, a in optimizer.items() if n.startswith(prefix)} == shapes
    trained = minidnn.compile(nets.residual())
    nets.train(trained, 3)
    norm = trained.state_dict()
    assert [n for n in norm if n.startswith("stem.bn.")] == [
        f"stem.bn.{key}" for key in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    ]
    assert norm["stem.bn.num_batches_tracked"].shape == () and norm["stem.bn.num_batches_tracked"].dtype == np.int64
    assert norm["stem.bn.num_batches_tracked"] == 3
    assert (norm["stem.bn.running_mean"] != 0).all() and (norm["stem.bn.running_var"] != 1).all()


def test_columns_behind_a_flattened_map_are_in_channel_height_width_order_in_a_state() -> None:
    g = Graph()
    x, y = g.input((2, 2, 3, 4)), g.label((2,))
    g.softmax_cross_entropy(g.linear(g.flatten(g.conv2d(x, 4, 1, name="conv")), 2, bias=False, name="fc"), y)
    step = minidnn.compile(g, optimizer=nets.MOMENTUM)
    identity = np.eye(4, dtype=np.float32).reshape(4, 4, 1, 1)
    rows = np.random.default_rng(0).standard_normal((2, 4, 2, 3)).astype(np.float32)
    step.load_state_dict({"conv.weight": identity, "fc.weight": rows.reshape(2, 24)})
    images = np.random.default_rng(1).standard_normal((5, 2, 3, 4)).astype(np.float32)
    expected = np.einsum("nhwc,kchw->nk", images, rows)
    np.testing.assert_allclose(step.evaluate(images), expected, rtol=1e-5, atol=1e-5)
    gradient = step.gradients(images[:2], np.array([0, 1]))["fc.weight"]
    step.run(images[:2], np.array([0, 1]), lr=0.0)
    momentum = step.optimizer_state_dict()["optimizer.momentum.fc.weight"]
    np.testing.assert_allclose(momentum, gradient + 1e-3 * rows.reshape(2, 24), rtol=1e-4, atol=1e-6)


def test_what_a_state_holds_is_a_copy() -> None:
    step = minidnn.compile(nets.residual())
    state = step.state_dict()
    kept = {name: array.copy() for name, array in state.items()}
    nets.train(step, 2)
    assert nets.differing(state, kept) == []
    for array in state.values():
        array[...] = 0
    assert nets.differing(step.state_dict(), state) != []


def test_the_same_seed_makes_the_same_weights_and_another_seed_others() -> None:
    first, same, other = (minidnn.compile(nets.dropout(), seed=seed).state_dict() for seed in (5, 5, 6))
    assert nets.differing(first, same) == []
    assert {"conv.weight", "conv0.weight", "fc1.weight", "fc1.bias", "fc2.weight"} <= set(nets.differing(first, other))


# -- refusals ---------------------------------------------------------------------------------------------------------
Mend = Callable[[dict[str, Any]], object]
BAD: dict[str, tuple[Mend, str]] = {
    "missing": (lambda s: s.pop("fc.bias"), "lacks 'fc.bias'"),
    "two missing": (lambda s: (s.pop("fc.bias"), s.pop("fc.weight")), "lacks 'fc.weight' and 1 more"),
    "unexpected": (lambda s: s.update({"fc.biass": np.zeros(4)}), "has 'fc.biass'.*did you mean.*fc.bias"),
    "other shape": (
        lambda s: s.update({"fc.weight": np.zeros((4, 143), np.float32)}),
        r"'fc.weight' has shape \(4, 143\).*wants \(4, 144\)",
    ),
    "our layout": (
        lambda s: s.update({"conv.weight": np.zeros((4, 3, 3, 2), np.float32)}),
        r"'conv.weight' has shape \(4, 3, 3, 2\).*wants \(4, 2, 3, 3\)",
    ),
    "scalar": (lambda s: s.update({"fc.bias": np.float32(0)}), r"'fc.bias' has shape \(\).*wants \(4,\)"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_state_that_does_not_fit_is_named_and_nothing_is_written(bad: str) -> None:
    mend, sentence = BAD[bad]
    step, donor = (minidnn.compile(nets.chain(), optimizer=nets.MOMENTUM, seed=seed) for seed in (0, 1))
    nets.train(step, 2)
    nets.train(donor, 2, first=5)
    before = nets.state(step)
    weights = donor.state_dict()
    mend(weights)
    with pytest.raises(UserError, match=sentence):
        step.load_state_dict(weights)
    prefix = "optimizer.momentum."
    slots = {n.removeprefix(prefix): a for n, a in donor.optimizer_state_dict().items() if n.startswith(prefix)}
    mend(slots)
    saved = {prefix + name: array for name, array in slots.items()}
    counters: dict[str, Any] = {"optimizer.step": np.int64(7), "optimizer.updates": np.int64(7)}
    with pytest.raises(UserError, match=re.sub("'(fc|conv)", rf"'{prefix}\1", sentence)):
        step.load_optimizer_state_dict({**saved, **counters})
    assert nets.differing(before, nets.state(step)) == []
    assert (step.steps, step.updates) == (2, 2)


@pytest.mark.parametrize("counter", ["optimizer.step", "optimizer.updates"])
def test_optimizer_state_without_its_counters_is_refused(counter: str) -> None:
    step = minidnn.compile(nets.chain(), optimizer=OPTIMIZERS["adam"])
    state = step.optimizer_state_dict()
    del state[counter]
    with pytest.raises(UserError, match=f"lacks '{counter}'"):
        step.load_optimizer_state_dict(state)


def test_the_state_of_another_optimizer_is_refused_by_name() -> None:
    sgd, adam = (minidnn.compile(nets.chain(), optimizer=OPTIMIZERS[name]) for name in ("momentum", "adam"))
    with pytest.raises(UserError, match=r"lacks 'optimizer.exp_avg\..*has 'optimizer.momentum\."):
        adam.load_optimizer_state_dict(sgd.optimizer_state_dict())


def test_a_closed_step_says_so() -> None:
    step = minidnn.compile(nets.chain())
    step.close()
    step.close()
    with pytest.raises(UserError, match="no device"):
        step.run(*nets.batch(step.graph))
