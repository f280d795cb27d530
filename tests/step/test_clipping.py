"""Clipping by the global norm: PyTorch's numbers, no other bits than the plan promises, and what it goes with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import layup
import minidnn
from minidnn.precision import PRECISIONS
from minidnn.scalars import Scaling
from minidnn.schedule.plan import Decision, Plan, PlanError, Reuse
from minidnn.state import LOSS_SCALING
from tests.step import nets

CLIP = 0.5  # of norms between 0.7 and 2
MOVING = Plan({"stem.relu": Decision.OFFLOAD, "unit0.relu1": Decision.RECOMPUTE, "unit0.relu2": Decision.OFFLOAD})


def norm_of(gradients: dict[str, Any]) -> float:
    return float(np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in gradients.values())))


def trained(plan: Plan | None = None, steps: int = 4, **how: Any) -> tuple[list[float], dict[str, Any]]:
    step = minidnn.compile(nets.residual(), plan, nets.MOMENTUM, **{"clip_grad_norm": CLIP} | how)
    losses = nets.train(step, steps)
    return losses, nets.state(step)


def same(one: Any, other: Any, apart: tuple[str, ...] = ()) -> None:
    assert one[0] == other[0]
    named = ({k: v for k, v in state.items() if k not in apart} for state in (one[1], other[1]))
    assert nets.differing(*named) == []


# -- the numbers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("accumulate", [1, 2])
def test_three_updates_with_momentum_follow_the_definition(accumulate: int) -> None:
    graph, lr, momentum = nets.chain(), 0.1, 0.9
    step = minidnn.compile(
        graph, optimizer=minidnn.SGD(lr, momentum), precision="fp64", clip_grad_norm=CLIP, accumulate=accumulate
    )
    weights = step.state_dict()
    velocity = {name: np.zeros_like(w) for name, w in weights.items()}
    factors = []
    for update in range(3):
        parts = [nets.batch(graph, seed=accumulate * update + i) for i in range(accumulate)]
        alone = [step.gradients(*part) for part in parts]
        mean = {name: np.mean([g[name] for g in alone], axis=0) for name in weights}
        factors.append(min(1.0, CLIP / (norm_of(mean) + 1e-6)))
        for name in weights:
            velocity[name] = momentum * velocity[name] + factors[-1] * mean[name]
            weights[name] = weights[name] - lr * velocity[name]
        for part in parts:
            step.run(*part)
        for name, ours in step.state_dict().items():
            np.testing.assert_allclose(ours, weights[name], rtol=0, atol=1e-13, err_msg=f"{name}, update {update}")
    assert max(factors) < 0.9, "nothing was clipped"


def test_three_updates_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is the reference here and is not installed")
    step = minidnn.compile(nets.chain(), optimizer=nets.MOMENTUM, precision="fp64", clip_grad_norm=CLIP)
    weights = {name: torch.nn.Parameter(torch.from_numpy(w)) for name, w in step.state_dict().items()}
    m = nets.MOMENTUM
    theirs = torch.optim.SGD(list(weights.values()), m.lr, m.momentum, weight_decay=m.weight_decay)
    for seed in range(3):
        x, y = nets.batch(step.graph, seed)
        for name, gradient in step.gradients(x, y).items():
            weights[name].grad = torch.from_numpy(gradient)
        assert float(torch.nn.utils.clip_grad_norm_(list(weights.values()), CLIP)) > CLIP
        theirs.step()
        step.run(x, y)
    for name, ours in step.state_dict().items():
        np.testing.assert_allclose(ours, weights[name].detach().numpy(), rtol=0, atol=1e-13, err_msg=name)


def test_a_gradient_within_the_bound_keeps_every_bit() -> None:
    off = Plan(reuse=Reuse(layerwise_update=False))
    same(trained(clip_grad_norm=1e6), trained(off, clip_grad_norm=None))


# -- other plans, allocators, precisions ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("plan", "how"),
    [
        (MOVING, {}),
        (Plan(streamed=("*",), group_bytes=1), {}),
        (minidnn.naive(), {}),
        (MOVING, {"allocator": "pool"}),
        (MOVING, {"accumulate": 2}),
    ],
    ids=["moving", "streamed", "naive", "pool", "accumulate"],
)
def test_every_plan_has_the_bits_of_keep_and_the_bytes_predicted(plan: Plan, how: Any) -> None:
    found = trained(plan, **how)
    same(found, trained(accumulate=how.get("accumulate", 1)))
    assert nets.differing(found[1], trained(clip_grad_norm=None, accumulate=how.get("accumulate", 1))[1])
    step = minidnn.compile(nets.residual(), plan, nets.MOMENTUM, clip_grad_norm=CLIP, **how)
    step.verify(*nets.batch(step.graph))
    assert step.measured.peak_bytes == step.profile.peak_bytes


def test_a_scaled_loss_is_clipped_by_the_norm_of_the_unscaled_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained()
    monkeypatch.setitem(PRECISIONS, "fp32", PRECISIONS["fp32"]._replace(scaled=True))
    same(trained(), plain, apart=(LOSS_SCALING,))


def test_a_step_that_overflows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRECISIONS, "fp32", PRECISIONS["fp32"]._replace(scaled=True))
    step = minidnn.compile(nets.chain(), optimizer=nets.MOMENTUM, clip_grad_norm=CLIP)
    nets.train(step, 1)
    step.load_optimizer_state_dict(step.optimizer_state_dict() | {LOSS_SCALING: np.array([3e38, 5, 1, 0], np.float32)})
    before = nets.state(step)
    x, y = nets.batch(step.graph, seed=1)
    step.run(x * 100, y)
    changed = nets.differing(before, nets.state(step))
    assert set(changed) == {LOSS_SCALING, "optimizer.step", "optimizer.updates"}
    assert step.optimizer_state_dict()[LOSS_SCALING][Scaling.SKIPPED] == 1


def test_it_is_one_row_before_the_update_and_none_without_it() -> None:
    kernels = {}
    for precision in ("fp32", "fp16"):
        step = layup.compile(nets.residual(16, 4), "85%", device=None, precision=precision, clip_grad_norm=CLIP)
        kernels[precision] = [row.kernel for row in step.program["train"].rows if row.kernel]
        assert step.plan.decisions and kernels[precision].count("clip_scale") == 1
    assert kernels["fp32"][-2:] == ["clip_scale", "update_all"]
    found = [name for name in kernels["fp16"] if name in ("check_finite", "adapt_scale", "clip_scale", "update_all")]
    assert found[:3] == ["check_finite", "adapt_scale", "clip_scale"] and set(found[3:]) == {"update_all"}
    rows = minidnn.compile(nets.residual(), device=None).program["train"].rows
    assert not any(row.kernel == "clip_scale" for row in rows)


# -- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_what_is_no_norm_is_refused_by_value(value: float) -> None:
    for compiled in (minidnn.compile, layup.compile):
        with pytest.raises(minidnn.UserError, match=f"clip_grad_norm={value!r} is no finite norm above 0"):
            compiled(nets.chain(), clip_grad_norm=value, device=None)


@pytest.mark.parametrize("strategy", ["all_reduce", "ring", "ring_delayed", "master_slave", "tree"])
def test_a_strategy_beside_it_is_refused_by_name(strategy: str) -> None:
    with pytest.raises(minidnn.UserError, match=f"clip_grad_norm=1 .* strategy {strategy}: the norm is over the whole"):
        minidnn.compile(nets.chain(), clip_grad_norm=1, strategy=strategy, device=None)


def test_a_plan_that_asks_for_layer_wise_update_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"layerwise_update cannot be combined with clip_grad_norm=0\.5"):
        trained(Plan(reuse=Reuse(layerwise_update=True)))
