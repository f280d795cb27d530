"""One loss scale for all ranks: the same decisions as one process makes, the same bits everywhere, with every strategy."""

import numpy as np
import pytest

import minidnn
from minidnn.device.emulated import EmulatedDevice
from minidnn.parallel.inprocess import InProcess, run_ranks
from minidnn.precision import PRECISIONS, Precision
from minidnn.scalars import INITIAL_SCALE, Scaling
from minidnn.schedule.ranks import STRATEGIES
from minidnn.schedule.verify import verify
from minidnn.state import LOSS_SCALING
from tests.step import nets

EVERY = (*STRATEGIES, "ring:nccl", "all_reduce:nccl", "ring_delayed:nccl")


@pytest.fixture
def scaled(monkeypatch):
    """fp32 with a scaled loss: powers of two cost no bit there."""
    monkeypatch.setitem(PRECISIONS, "fp32", PRECISIONS["fp32"]._replace(scaled=True))


def trained(strategy, ranks, scaling=None, steps=5, large=None, net=nets.chain, **options):
    """State of every rank; ``scaling``: where it begins; ``large``: the sample of each batch that overflows first."""
    graph = net(6)

    def work(communicator):
        device = EmulatedDevice(seed=communicator.rank)
        how = {"strategy": strategy, "communicator": communicator} if strategy else {}
        step = minidnn.compile(graph, optimizer=nets.MOMENTUM, tail=2, device=device, **how, **options)
        if scaling is not None:
            step.load_optimizer_state_dict(step.optimizer_state_dict() | {LOSS_SCALING: np.asarray(scaling)})
        for number in range(steps):
            x, y = nets.batch(graph, number)
            if large is not None:
                x[large] *= 50
            step.run(x, y)
        step.run(*nets.batch(graph, 99, 2))
        return nets.state(step)

    return run_ranks(ranks, work)


def without_scale(state):
    return {name: array for name, array in state.items() if name != LOSS_SCALING}


@pytest.mark.parametrize("strategy", EVERY)
def test_a_scale_that_changes_on_the_way_changes_no_bit(monkeypatch, strategy):
    """It doubles after the next update: in ``ring_delayed`` while a gradient made with the smaller one is on its way."""
    plain = trained(strategy, 3)
    monkeypatch.setitem(PRECISIONS, "fp32", PRECISIONS["fp32"]._replace(scaled=True))
    states = trained(strategy, 3, [4.0, 1999, 1, 0])
    for state in states:
        assert list(state[LOSS_SCALING][: Scaling.FINITE]) == [8.0, 5] and state[LOSS_SCALING][Scaling.SKIPPED] == 0
        assert nets.differing(without_scale(state), plain[0]) == []


@pytest.mark.parametrize(("strategy", "large"), [(name, (0, 3, 5)[i % 3]) for i, name in enumerate(EVERY)])
def test_what_one_rank_sees_all_skip_and_decide_as_one_process_does(scaled, strategy, large):
    """One sample overflows, whichever rank has it; the scale falls until it does not."""
    first, *others = trained(strategy, 3, [2.0**124, 0, 1, 0], steps=9, large=large)
    assert all(nets.differing(first, other) == [] for other in others)
    one = "ring_delayed" if strategy.startswith("ring_delayed") else None
    (alone,) = trained(one, 1, [2.0**124, 0, 1, 0], steps=9, large=large)
    assert list(first[LOSS_SCALING]) == list(alone[LOSS_SCALING])
    skipped = first[LOSS_SCALING][Scaling.SKIPPED]
    assert 1 <= skipped <= 8, "the case shall skip some updates and make others"
    for name, value in alone.items():
        if name != LOSS_SCALING:
            np.testing.assert_allclose(first[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_skipped_update_of_the_delayed_ring_changes_neither_weights_nor_momentum(scaled):
    begin = trained("ring_delayed", 2, steps=0)[0]
    graph = nets.chain(6)

    def work(communicator):
        step = minidnn.compile(
            graph, strategy="ring_delayed", communicator=communicator, optimizer=nets.MOMENTUM, tail=2
        )
        step.run(*nets.batch(graph, 99, 2))
        step.agree()
        step.load_optimizer_state_dict(step.optimizer_state_dict() | {LOSS_SCALING: np.float32([3e38, 7, 1, 0])})
        for number in range(3):
            step.run(nets.batch(graph, number)[0] * 100, nets.batch(graph, number)[1])
        return nets.state(step)

    for state in run_ranks(2, work):
        same = {n: a for n, a in state.items() if n not in (LOSS_SCALING, "optimizer.step", "optimizer.updates")}
        assert nets.differing(same, {n: begin[n] for n in same}) == []
        assert list(state[LOSS_SCALING]) == [np.float32(3e38) / 8, 0, 1, 3]


@pytest.mark.parametrize("strategy", EVERY)
def test_schedules_are_clean_and_their_memory_is_as_predicted(scaled, strategy):
    graph = nets.residual(6)

    def work(communicator):
        step = minidnn.compile(graph, strategy=strategy, communicator=communicator, tail=3)
        step.verify(*nets.batch(graph, 1))
        for schedule in step.program.schedules.values():
            previous = step.program[schedule.previous].rows
            assert verify(schedule.rows, schedule.offsets, previous=previous) == [], schedule.name
        return step.measured.peak_bytes == step.profile.peak_bytes

    assert all(run_ranks(2, work))


def test_accumulated_gradients_are_judged_once(scaled):
    plain, *_ = trained("ring", 2, [2.0**124, 0, 1, 0], large=0, accumulate=2)
    alone, *_ = trained(None, 1, [2.0**124, 0, 1, 0], large=0, accumulate=2)
    assert list(plain[LOSS_SCALING]) == list(alone[LOSS_SCALING])


def test_the_scale_is_saved_and_goes_on_with_any_number_of_ranks(scaled):
    saved = trained("ring", 3, [64.0, 1, 1, 0])[0]
    optimizer = {k: v for k, v in saved.items() if k.startswith("optimizer.")}

    def work(communicator):
        step = minidnn.compile(nets.chain(6), strategy="tree", communicator=communicator, optimizer=nets.MOMENTUM)
        assert step.optimizer_state_dict()[LOSS_SCALING][Scaling.SCALE] == INITIAL_SCALE
        step.load_optimizer_state_dict(optimizer)
        return step.optimizer_state_dict()

    assert all(nets.differing(state, optimizer) == [] for state in run_ranks(2, work))


@pytest.mark.parametrize("strategy", EVERY)
def test_parameters_of_two_types_are_judged_together(monkeypatch, strategy):
    """As in fp16, where batch norm's are wider: here weights of 32 bits with a master copy of 64."""
    monkeypatch.setitem(PRECISIONS, "fp32", Precision("fp32", "float32", "float64", True, scaled=True))
    first, *others = trained(strategy, 2, [2.0**132, 0, 1, 0], steps=8, net=nets.residual)
    assert all(nets.differing(first, other) == [] for other in others)
    assert first["stem.weight"].dtype == np.float64 and 1 <= first[LOSS_SCALING][Scaling.SKIPPED] <= 7


def test_a_ring_of_one_and_a_root_need_no_votes():
    for strategy, ranks, votes in (("ring", 1, False), ("ring", 2, True), ("all_reduce", 2, False), ("tree", 2, False)):
        step = minidnn.compile(
            nets.chain(6), strategy=strategy, communicator=InProcess.group(ranks)[0], device=None, precision="fp16"
        )
        counted = [
            row for row in step.program["train"].rows if (row.target, row.kernel) == ("loss scale", "relu_backward")
        ]
        assert len(counted) == votes
