"""Fused layers train as the layers they stand for, under every plan, and change bits only with the recipe."""

import numpy as np
import pytest

import minidnn
from minidnn.fuse import FUSIONS
from minidnn.precision import precision
from minidnn.recipes import numpy_recipe
from minidnn.schedule.plan import Decision, Plan

BATCH, CLASSES = 3, 4
PLANS = {
    "naive": minidnn.naive(),
    "offload": Decision.OFFLOAD,
    "recompute": Decision.RECOMPUTE,
}


def net(batch=BATCH):
    """Every fusion: at a fork, on an input without gradient, with the skip on either side, and one that must not be made."""
    g = minidnn.Graph()
    x, y = g.input((batch, 6, 5, 3)), g.label((batch,))
    h = g.relu(g.conv2d(x, 4, 3, padding=1, bias=True, name="stem"), name="stem.relu")
    for number, swapped in enumerate((False, True)):
        b = g.relu(g.batch_norm(g.conv2d(h, 4, 3, padding=1), name=f"bn{number}"))
        b = g.batch_norm(g.conv2d(b, 4, 1), name=f"end{number}")
        h = g.relu(g.add(h, b) if swapped else g.add(b, h), name=f"out{number}")
    seen = g.batch_norm(g.conv2d(h, 4, 1, bias=True), name="seen")  # read twice: not fused
    h = g.dropout(g.add(g.relu(seen), seen), 0.3)
    g.softmax_cross_entropy(g.linear(g.flatten(h), CLASSES), y)
    return g


def recipe(fusions, kind="fp32", limit=None, graph=None):
    return numpy_recipe(graph or net(), precision(kind), limit, True, fusions)


def data(count=1, batch=BATCH):
    rng = np.random.default_rng(1)
    return [(rng.standard_normal((batch, 6, 5, 3), np.float32), rng.integers(0, CLASSES, batch)) for _ in range(count)]


def train(step, batches):
    losses = [step.run(x, y).loss for x, y in batches]
    return losses, {**step.state_dict(), **step.optimizer_state_dict()}


def compiled(fusions, plan=None, **how):
    how = {"optimizer": minidnn.SGD(lr=0.05, momentum=0.9), "seed": 3} | how
    return minidnn.compile(net(), plan, fusions=fusions, **how)


@pytest.mark.parametrize("fusions", [*[(name,) for name in FUSIONS], FUSIONS], ids=str)
def test_a_fused_step_computes_the_gradients_of_the_layers_it_stands_for(fusions):
    x, y = data()[0]
    expected = compiled((), precision="fp64").gradients(x, y)
    step = compiled(fusions, precision="fp64")
    kernels = {row.kernel for row in step.program["train"].rows}
    assert any(k.startswith(("conv2d_relu", "batch_norm_relu", "batch_norm_add_relu")) for k in kernels)
    found = step.gradients(x, y)
    assert list(found) == list(expected)
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-9, atol=1e-12, err_msg=name)


def test_training_evaluation_and_accumulation_agree_with_the_unfused_step():
    batches = data(4)
    for accumulate in (1, 2):
        one = compiled((), accumulate=accumulate, precision="fp64")
        other = compiled(FUSIONS, accumulate=accumulate, precision="fp64")
        (losses, state), (fused_losses, fused_state) = train(one, batches), train(other, batches)
        np.testing.assert_allclose(fused_losses, losses, rtol=1e-9)
        for name, array in state.items():
            np.testing.assert_allclose(fused_state[name], array, rtol=1e-8, atol=1e-11, err_msg=name)
        np.testing.assert_allclose(other.evaluate(batches[0][0]), one.evaluate(batches[0][0]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_has_the_bits_of_keep(name):
    batches = data(3)
    keep = compiled(FUSIONS)
    wish = PLANS[name]
    units = [
        r.target for r in keep.program["train"].rows if r.op.value == "FORWARD" and r.kernel.endswith("relu_forward")
    ]
    units += ["bn0", "end0", "bn1", "end1", "stem"]
    plan = wish if isinstance(wish, Plan) else Plan(dict.fromkeys(dict.fromkeys(units), wish), memory_centric=True)
    step = compiled(FUSIONS, plan)
    (losses, state), (expected_losses, expected) = train(step, batches), train(keep, batches)
    assert losses == expected_losses
    for key, array in expected.items():
        np.testing.assert_array_equal(state[key], array, err_msg=key)


def test_what_is_predicted_is_what_is_measured():
    for plan in (minidnn.keep(), minidnn.naive(), Plan({"out0": Decision.OFFLOAD, "bn1": Decision.RECOMPUTE})):
        step = compiled(FUSIONS, plan)
        step.verify(*data()[0])
        assert step.measured.peak_bytes == step.profile.peak_bytes


def test_the_gradient_behind_a_relu_takes_no_bytes_of_its_own_and_no_pass():
    """In place over dy: neither a ReLU's backward row nor a buffer; naive, which has no reuse, needs the buffer."""
    rows = compiled(FUSIONS).program["train"].rows
    masked = [row for row in rows if row.kernel == "batch_norm_add_relu_backward_weight"]
    assert masked and all(row.writes[2].buffer is row.reads[0].buffer for row in masked)
    naive = [r for r in compiled(FUSIONS, minidnn.naive()).program["train"].rows if r.kernel == masked[0].kernel]
    assert all(row.writes[2].buffer is not row.reads[0].buffer for row in naive)


def test_a_tail_batch_is_fused_with_the_same_dropout():
    batches = [*data(1), *data(1, BATCH - 1)]
    one, other = compiled((), tail=BATCH - 1, precision="fp64"), compiled(FUSIONS, tail=BATCH - 1, precision="fp64")
    np.testing.assert_allclose(train(other, batches)[0], train(one, batches)[0], rtol=1e-9)
