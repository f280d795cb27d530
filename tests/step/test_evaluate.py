"""Evaluation takes any number of samples inside the memory of training, and leaves no trace in it (case C14)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import minidnn
import models
from minidnn.errors import UserError
from minidnn.layers import Graph
from tests.step import nets

BATCH = 6


def one_position(batch: int) -> Graph:
    """Batch norm on maps of one position, and on a vector: one value a sample and channel."""
    g = Graph()
    x, y = g.input((batch, 4, 4, 3)), g.label((batch,))
    x = g.relu(g.batch_norm(g.conv2d(x, 8, 4, name="conv"), name="bn1"), name="relu")
    x = g.batch_norm(g.linear(g.flatten(x, name="flatten"), 5, name="fc1"), name="bn2")
    g.softmax_cross_entropy(g.linear(x, nets.CLASSES, name="fc2"), y)
    return g


NETS: dict[str, Callable[[int], Graph]] = {**nets.NETS, "one position": one_position}


@pytest.fixture(params=NETS)
def step(request: pytest.FixtureRequest) -> minidnn.CompiledStep:
    """A net that has been trained a little, so that its running statistics are not the initial ones."""
    step = minidnn.compile(NETS[request.param](BATCH), optimizer=nets.MOMENTUM)
    nets.train(step, 3)
    return step


@pytest.mark.parametrize("samples", [1, BATCH - 1, BATCH, 4 * BATCH + 3])
def test_any_number_of_samples_has_the_bits_of_whole_batches(step: minidnn.CompiledStep, samples: int) -> None:
    whole, _ = nets.batch(step.graph, seed=9, samples=5 * BATCH)
    reference = np.concatenate([step.evaluate(whole[at : at + BATCH]) for at in range(0, len(whole), BATCH)])
    logits = step.evaluate(whole[:samples])
    assert logits.shape == (samples, nets.CLASSES) and logits.dtype == np.float32
    assert np.isfinite(logits).all()
    assert logits.tobytes() == reference[:samples].tobytes()


def test_a_sample_has_the_logits_that_it_has_alone(step: minidnn.CompiledStep) -> None:
    x, _ = nets.batch(step.graph, seed=9, samples=2 * BATCH + 1)
    alone = np.concatenate([step.evaluate(x[i : i + 1]) for i in range(len(x))])
    # a matrix product may round another row of the batch in another order, so not to the bit
    np.testing.assert_allclose(step.evaluate(x), alone, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(step.evaluate(x[::-1])[::-1], alone, rtol=1e-5, atol=1e-6)


def test_evaluation_between_steps_changes_no_bit_of_the_training(step: minidnn.CompiledStep) -> None:
    other = minidnn.compile(step.graph, optimizer=nets.MOMENTUM)
    nets.train(other, 3)
    x, _ = nets.batch(step.graph, seed=9, samples=2 * BATCH + 1)
    losses = []
    for number in range(3, 6):
        before = nets.state(step)
        first = step.evaluate(x)
        assert nets.differing(before, nets.state(step)) == []
        assert step.evaluate(x).tobytes() == first.tobytes()
        losses += nets.train(step, 1, first=number)
    assert losses == nets.train(other, 3, first=3)
    assert nets.differing(nets.state(step), nets.state(other)) == []


def test_a_loss_that_is_read_after_an_evaluation_is_the_loss_of_its_step(step: minidnn.CompiledStep) -> None:
    other = minidnn.compile(step.graph, optimizer=nets.MOMENTUM)
    nets.train(other, 3)
    result = step.run(*nets.batch(step.graph, seed=3))
    step.evaluate(nets.batch(step.graph, seed=9, samples=4 * BATCH)[0])
    assert [result.loss] == nets.train(other, 1, first=3)


@pytest.mark.parametrize("plan", [minidnn.keep(), minidnn.naive()], ids=lambda plan: plan.policy)
def test_evaluation_needs_no_byte_more_than_training(plan: minidnn.Plan) -> None:
    graphs = [make(BATCH) for make in NETS.values()]
    graphs += [models.build(name, batch=4) for name in ("cifar_quick", "resnet20", "vgg11_bn", "alexnet", "resnet18")]
    for graph in graphs:
        step = minidnn.compile(graph, plan, device=None)
        train, evaluation = step.program["train"].profile, step.program["eval"].profile
        assert evaluation.peak_bytes <= train.peak_bytes
        assert max(evaluation.peak_bytes, evaluation.reserved_bytes) <= step.profile.reserved_bytes


def test_evaluation_keeps_memory_equal_before_and_after() -> None:
    graph = nets.residual()
    step = minidnn.compile(graph, allocator="pool")
    pool = step.executor.pool  # type: ignore[attr-defined]
    nets.train(step, 1)
    used, held = pool.used_bytes, pool.held_bytes
    for samples in (4 * BATCH, 1, 4 * BATCH + 3):
        step.evaluate(nets.batch(graph, samples=samples)[0])
        nets.train(step, 1)
        assert (pool.used_bytes, pool.held_bytes) == (used, held)


def test_evaluation_inside_an_accumulation_group_changes_nothing() -> None:
    graph = nets.dropout()
    with_it, without = (minidnn.compile(graph, optimizer=nets.MOMENTUM, accumulate=3) for _ in range(2))
    for number in range(6):
        nets.train(with_it, 1, first=number)
        with_it.evaluate(nets.batch(graph, samples=2)[0])
    nets.train(without, 6)
    assert nets.differing(nets.state(with_it), nets.state(without)) == []


def test_training_statistics_need_two_values_and_evaluation_one() -> None:
    one = one_position(2)
    step = minidnn.compile(one)
    assert np.isfinite(step.evaluate(nets.batch(one, samples=1)[0])).all()
    with pytest.raises(UserError, match=r"one value per channel.*larger batch"):
        minidnn.compile(one_position(1), device=None)
    with pytest.raises(UserError, match="one value per channel"):
        minidnn.compile(one, device=None, tail=1)


@pytest.mark.parametrize("shape", [(0, 6, 6, 2), (3, 6, 6, 3), (3, 2, 6, 6), (6, 6, 2), (3, 72)], ids=str)
def test_evaluation_refuses_other_shapes_with_the_shape_it_wants(shape: tuple[int, ...]) -> None:
    step = minidnn.compile(nets.chain())
    with pytest.raises(UserError, match=r"evaluation wants \(N, 6, 6, 2\) with N at least 1") as caught:
        step.evaluate(np.zeros(shape, np.float32))
    assert str(shape) in str(caught.value)
