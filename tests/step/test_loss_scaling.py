"""Dynamic loss scaling, on the emulated device under a precision that asks for it in fp32, where powers of two cost no bit."""

import numpy as np
import pytest

import minidnn
from minidnn.precision import PRECISIONS
from minidnn.scalars import INITIAL_SCALE, Scaling
from minidnn.schedule.plan import Decision, Plan, PlanError, Reuse
from minidnn.state import LOSS_SCALING

BATCH = 4


@pytest.fixture
def scaled(monkeypatch):
    monkeypatch.setitem(PRECISIONS, "fp32", PRECISIONS["fp32"]._replace(scaled=True))


def compiled(plan=None, **how):
    g = minidnn.Graph()
    x, y = g.input((BATCH, 6, 6, 3)), g.label((BATCH,))
    h = g.relu(g.conv2d(g.relu(g.conv2d(x, 4, 3, bias=True)), 4, 3))
    g.softmax_cross_entropy(g.linear(g.flatten(h), 5), y)
    return minidnn.compile(g, plan, **{"optimizer": minidnn.SGD(lr=0.1, momentum=0.9)} | how)


def batches(count):
    rng = np.random.default_rng(2)
    return [(rng.standard_normal((BATCH, 6, 6, 3), np.float32), rng.integers(0, 5, BATCH)) for _ in range(count)]


def train(step, data):
    losses = [step.run(x, y).loss for x, y in data]
    return losses, step.state_dict(), {k: v for k, v in step.optimizer_state_dict().items() if k != LOSS_SCALING}


def same(one, other):
    assert one[0] == other[0]
    for mine, theirs in zip(one[1:], other[1:], strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)


@pytest.mark.parametrize(
    "how", [{}, {"accumulate": 2}, {"optimizer": minidnn.Adam(lr=0.01)}], ids=["", "accumulate", "adam"]
)
def test_a_scale_that_is_a_power_of_two_changes_no_bit(monkeypatch, how):
    plain = train(compiled(**how), batches(4))
    monkeypatch.setitem(PRECISIONS, "fp32", PRECISIONS["fp32"]._replace(scaled=True))
    step = compiled(**how)
    same(train(step, batches(4)), plain)
    x, y = batches(1)[0]
    expected = compiled(**how)
    expected.load_state_dict(step.state_dict())
    for name, gradient in step.gradients(x, y).items():
        assert float(np.abs(gradient).max()) < 10, f"the gradient of {name} is handed out scaled"


def test_a_step_that_overflows_changes_nothing_but_the_scale(scaled):
    step, data = compiled(), batches(3)
    train(step, data[:1])
    optimizer = step.optimizer_state_dict()
    optimizer[LOSS_SCALING] = np.array([3e38, 5, 1, 0], np.float32)
    step.load_optimizer_state_dict(optimizer)
    before = step.state_dict(), step.optimizer_state_dict()
    assert np.isfinite(step.run(data[1][0] * 100, data[1][1]).loss)
    for old, new in zip(before, (step.state_dict(), step.optimizer_state_dict()), strict=True):
        for name in old:
            if name not in (LOSS_SCALING, "optimizer.step", "optimizer.updates"):
                np.testing.assert_array_equal(new[name], old[name], err_msg=name)
    scaling = step.optimizer_state_dict()[LOSS_SCALING]
    assert scaling[Scaling.SCALE] == np.float32(3e38) / 2 and list(scaling[1:]) == [0, 1, 1]
    optimizer = step.optimizer_state_dict() | {LOSS_SCALING: np.array([INITIAL_SCALE, 0, 1, 1], np.float32)}
    step.load_optimizer_state_dict(optimizer)
    step.run(*data[2])
    assert any((step.state_dict()[name] != before[0][name]).any() for name in before[0]), "the next step trains again"


def test_the_scale_doubles_after_good_steps(scaled):
    step = compiled()
    optimizer = step.optimizer_state_dict()
    optimizer[LOSS_SCALING] = np.array([4.0, 1999, 1, 0], np.float32)
    step.load_optimizer_state_dict(optimizer)
    train(step, batches(1))
    assert list(step.optimizer_state_dict()[LOSS_SCALING]) == [8, 0, 1, 0]


def test_training_goes_on_bit_for_bit_from_a_saved_state(scaled):
    step, data = compiled(), batches(4)
    train(step, data[:2])
    saved = step.state_dict(), step.optimizer_state_dict()
    assert saved[1][LOSS_SCALING][Scaling.GOOD] == 2
    other = compiled()
    other.load_state_dict(saved[0])
    other.load_optimizer_state_dict(saved[1])
    same(train(other, data[2:]), train(step, data[2:]))
    assert list(other.optimizer_state_dict()[LOSS_SCALING]) == list(step.optimizer_state_dict()[LOSS_SCALING])


@pytest.mark.parametrize(
    "plan",
    [
        minidnn.naive(),
        Plan({"relu1": Decision.OFFLOAD, "relu2": Decision.RECOMPUTE}),
        Plan(streamed=("*",), group_bytes=1),
    ],
    ids=["naive", "moving", "streamed"],
)
def test_every_plan_has_the_bits_of_keep_and_the_bytes_predicted(scaled, plan):
    data = batches(3)
    step = compiled(plan)
    same(train(step, data), train(compiled(), data))
    step.verify(*data[0])
    assert step.measured.peak_bytes == step.profile.peak_bytes


def test_layerwise_update_is_refused_by_name(scaled):
    assert compiled().profile.peak_bytes > 0  # automatic: off
    with pytest.raises(PlanError, match="loss scaling"):
        compiled(Plan(reuse=Reuse(layerwise_update=True)))


def test_half_precision_is_planned_with_it():
    import layup

    step = layup.compile(compiled().graph, device=None, precision="fp16")
    kernels = [row.kernel for row in step.program["train"].rows]
    assert kernels.index("scale_loss") < kernels.index("check_finite") < kernels.index("adapt_scale")
