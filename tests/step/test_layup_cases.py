"""What went wrong elsewhere with recomputation and offloading, as tests. Identifiers are those of the collected cases."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import layup
import minidnn
from minidnn.device.emulated import EmulatedDevice
from minidnn.kernels import numpy_kernels
from minidnn.layers import BatchNorm, Graph
from minidnn.pool_executor import PoolExecutor
from minidnn.schedule.instruction import Instruction, Op
from minidnn.schedule.plan import Decision, Plan, PlanError
from minidnn.schedule.simulate import total_footprint
from minidnn.step import CompiledStep
from tests.step import nets

OPTIMIZER = nets.MOMENTUM


def tiny(momentum: float | None = 0.1, dropout: float = 0.5) -> Graph:
    """Convolution, batch norm, ReLU, twice, and dropout."""
    g = Graph()
    x, y = g.input((4, 8, 8, 3)), g.label((4,))
    for i in (1, 2):
        x = g.batch_norm(g.conv2d(x, 8, 3, padding=1, name=f"conv{i}"), momentum=momentum, name=f"bn{i}")
        x = g.relu(x, name=f"relu{i}")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(g.dropout(x, dropout), name="pool"), nets.CLASSES, name="fc"), y)
    return g


def everything(graph: Graph, decision: Decision, **same: Any) -> Plan:
    """One decision for every unit."""
    units = layup.plan(graph, device=None).context.costs.units
    names = [unit.name for unit in units if unit.name != graph.nodes[-1].name]
    return Plan(dict.fromkeys(names, decision), **same)


def recompute(graph: Graph) -> Plan:
    return everything(graph, Decision.RECOMPUTE)


def trained(graph: Graph, plan: Plan, steps: int = 3, **same: Any) -> CompiledStep:
    step = minidnn.compile(graph, plan, OPTIMIZER, **same)
    nets.train(step, steps)
    return step


def rows_of(graph: Graph, plan: Plan, **same: Any) -> tuple[Instruction, ...]:
    return minidnn.compile(graph, plan, OPTIMIZER, device=None, **same).program["train"].rows


# -- A: recomputation changes nothing ---------------------------------------------------------------------------------
def test_a1_running_statistics_advance_once_a_step_when_batch_norm_is_recomputed() -> None:
    keep, again = trained(tiny(), minidnn.keep()), trained(tiny(), recompute(tiny()))
    for name, array in keep.state_dict().items():
        assert again.state_dict()[name].tobytes() == array.tobytes(), name
    assert [int(again.state_dict()[f"bn{i}.num_batches_tracked"]) for i in (1, 2)] == [3, 3]
    assert any(row.op is Op.RECOMPUTE and row.target == "bn1" for row in again.program["train"].rows)


@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
def test_a2_any_momentum_of_the_running_statistics_is_exact(momentum: float | None) -> None:
    keep, again = (trained(tiny(momentum), plan) for plan in (minidnn.keep(), recompute(tiny())))
    assert nets.differing(nets.state(keep), nets.state(again)) == []


def test_a3_recomputing_is_a_row_of_its_own_that_issues_the_layers_recompute_and_nothing_else() -> None:
    graph = tiny()
    rows = rows_of(graph, recompute(graph))
    by_op = {op: {(row.target, row.kernel) for row in rows if row.op is op} for op in (Op.FORWARD, Op.RECOMPUTE)}
    for node in graph.nodes:
        shapes = layup.plan(graph, device=None).context.analysis.shapes(node)
        kernels = {kernel for target, kernel in by_op[Op.RECOMPUTE] if target == node.name}
        assert kernels <= {call.kernel for call in node.layer.recompute(shapes)}
        if isinstance(node.layer, BatchNorm):
            assert kernels == {"batch_norm_apply"}
            assert {k for t, k in by_op[Op.FORWARD] if t == node.name} > kernels
    assert by_op[Op.RECOMPUTE] < by_op[Op.FORWARD]


def test_a4_a_recomputed_dropout_draws_the_mask_of_its_forward() -> None:
    graph = tiny()
    assert any(row.kernel == "dropout" and row.op is Op.RECOMPUTE for row in rows_of(graph, recompute(graph)))
    losses = [nets.train(minidnn.compile(tiny(), plan, OPTIMIZER), 20) for plan in (minidnn.keep(), recompute(graph))]
    assert losses[0] == losses[1] and len(set(losses[0])) == 20


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32", "fp64"])
def test_a5_a6_a7_a_recomputed_value_has_shape_and_type_of_the_first(precision: str) -> None:
    """The type of every value is fixed when the step is lowered; no context can change it between the passes."""
    graph = nets.residual(units=2)
    rows = rows_of(graph, recompute(graph), precision=precision)
    first: dict[str, Any] = {}
    again = 0
    for row in rows:
        for value in row.writes:
            if row.op is Op.FORWARD:
                first[value.name] = value.spec
            elif row.op is Op.RECOMPUTE:
                assert value.spec == first[value.name], value.name
                again += 1
        if row.op is Op.RECOMPUTE:
            same = [r for r in rows if r.op is Op.FORWARD and (r.target, r.kernel) == (row.target, row.kernel)]
            assert [v.spec for v in row.reads] == [v.spec for v in same[0].reads]
    assert again > 10


def test_a8_an_in_place_relu_at_the_end_of_a_recomputed_segment_loses_no_gradient() -> None:
    graph = nets.residual(units=2)
    for last in ("stem.relu", "unit0.relu1", "unit0.relu2"):
        plan = Plan({"stem": Decision.RECOMPUTE, last: Decision.RECOMPUTE})
        gradients = [
            minidnn.compile(graph, given, OPTIMIZER).gradients(*nets.batch(graph)) for given in (minidnn.keep(), plan)
        ]
        assert nets.differing(*gradients) == []
        assert all(np.abs(g).max() > 0 for name, g in gradients[1].items() if name.startswith("stem"))
    with pytest.raises(PlanError, match=r"'stem.bn', but 'stem.relu' overwrites that layer in place"):
        minidnn.compile(graph, Plan({"stem.bn": Decision.RECOMPUTE}), device=None)


def twice_read(batch: int = 4) -> Graph:
    """A ReLU whose input has a second reader, and two ReLUs in a row: neither may overwrite what somebody reads later."""
    g = Graph()
    x, y = g.input((batch, 6, 6, 2)), g.label((batch,))
    h = g.conv2d(x, 4, 3, padding=1, name="conv1")
    h = g.add(g.relu(h, name="early"), h, name="add")
    h = g.relu(g.relu(g.conv2d(h, 4, 3, padding=1, name="conv2"), name="one"), name="two")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(h), nets.CLASSES, name="fc"), y)
    return g


@pytest.mark.parametrize("decision", list(Decision))
def test_a9_in_place_layers_overwrite_nothing_that_is_read_again(decision: Decision) -> None:
    """Against a reference that computes every value into its own bytes."""
    graph = twice_read()
    alone = Plan(reuse=minidnn.Reuse(in_place=False, lifetimes=False, gradient_window=False))
    batch = nets.batch(graph)
    wanted = minidnn.compile(graph, alone, OPTIMIZER, precision="fp64").gradients(*batch)
    found = minidnn.compile(graph, everything(graph, decision), OPTIMIZER, precision="fp64").gradients(*batch)
    assert nets.differing(wanted, found) == []


def test_a10_the_first_layer_learns_under_recomputation_and_the_batch_gets_no_gradient() -> None:
    graph = tiny()
    plan = Plan({"conv1": Decision.RECOMPUTE, "relu1": Decision.RECOMPUTE})
    before = minidnn.compile(tiny(), plan, OPTIMIZER).state_dict()["conv1.weight"]
    keep, again = (trained(tiny(), given, 1).state_dict()["conv1.weight"] for given in (minidnn.keep(), plan))
    assert np.abs(again - before).max() > 0 and again.tobytes() == keep.tobytes()
    rows = rows_of(graph, plan)
    assert not any(value.name == "d_x" for row in rows for value in row.writes)
    assert not any(row.op is Op.BACKWARD_DATA and row.target == "conv1" for row in rows)


# -- B: offloading -----------------------------------------------------------------------------------------------------
def test_b6_within_a_host_budget_auto_trains_and_moves_no_more() -> None:
    graph = nets.residual(16, units=4)
    step = layup.compile(graph, "75%", host_memory="24KiB", optimizer=OPTIMIZER)
    assert step.plan.decisions and step.profile.host_bytes <= 24 << 10
    keep = minidnn.compile(graph, optimizer=OPTIMIZER)
    assert nets.train(step, 3) == nets.train(keep, 3)
    with pytest.raises(minidnn.DoesNotFit, match="pinned host memory"):
        layup.compile(graph, policy="vdnn", host_memory="24KiB", optimizer=OPTIMIZER)


class Failing(ModuleType):
    """The NumPy kernels, of which call number ``at`` fails."""

    def __init__(self) -> None:
        super().__init__("kernels")
        self.at = -1
        self.calls = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        kernel = getattr(numpy_kernels, name)

        def call(*operands: NDArray[Any], **attrs: Any) -> None:
            self.calls += 1
            if self.calls == self.at:
                raise RuntimeError("the device has failed")
            kernel(*operands, **attrs)

        return call


@pytest.mark.parametrize("allocator", ["slab", "pool"])
def test_b7_a_failure_in_the_middle_of_backward_leaves_nothing_behind(allocator: str) -> None:
    graph = nets.residual()
    plan = layup.plan(graph, policy="vdnn", device=None).plan
    fresh = minidnn.compile(graph, plan, OPTIMIZER)
    nets.train(fresh, 1)
    calls = sum(bool(row.kernel) for row in fresh.program["train"].rows)
    kernels = Failing()
    step = minidnn.compile(graph, plan, OPTIMIZER, device=EmulatedDevice(kernels=kernels), allocator=allocator)
    start, optimizer = step.state_dict(), step.optimizer_state_dict()
    for at in range(calls // 3, calls, 5):
        kernels.calls, kernels.at = 0, at
        with pytest.raises(RuntimeError, match="the device has failed"):
            _ = step.run(*nets.batch(graph)).loss
            step.executor.device.synchronize()
        kernels.at = -1
        if isinstance(step.executor, PoolExecutor):
            assert step.executor.pool.used_bytes == total_footprint(step.program.persistent.buffers)
        step.load_state_dict(start)
        step.load_optimizer_state_dict(optimizer)
        nets.train(step, 1)
        assert nets.differing(nets.state(fresh), nets.state(step)) == [], at


@pytest.mark.parametrize("policy", ["auto", "layup", "vdnn", "superneurons", "superneurons_memory", "sqrt_n"])
def test_b13_c1_no_step_exceeds_the_budget_however_long_the_run(policy: str) -> None:
    graph = nets.residual(units=3)
    memory = layup.minimum_memory(graph, policy, optimizer=OPTIMIZER)
    step = layup.compile(graph, memory, policy, optimizer=OPTIMIZER)
    step.verify(*nets.batch(graph))
    assert step.measured.peak_bytes == step.profile.peak_bytes <= memory
    assert step.measured.reserved_bytes == step.profile.reserved_bytes <= memory
    nets.train(step, 12)
    assert step.executor.device.touched_bytes() <= memory  # type: ignore[attr-defined]


# -- D: updates and state ---------------------------------------------------------------------------------------------
def test_d1_accumulation_and_offloading_together_are_exact() -> None:
    graph = nets.residual(16, units=4)
    keep = minidnn.compile(graph, optimizer=OPTIMIZER, accumulate=3)
    planned = layup.compile(graph, "85%", optimizer=OPTIMIZER, accumulate=3)
    assert planned.plan.decisions
    assert nets.train(keep, 7) == nets.train(planned, 7)
    assert nets.differing(keep.state_dict(), planned.state_dict()) == []


def test_d2_clipping_by_the_global_norm_is_exact_under_offloading_and_layer_by_layer_it_is_refused() -> None:
    """The norm is over whole gradients: they live to one update, whatever the plan moves."""
    graph, clip = nets.residual(16, units=4), {"clip_grad_norm": 0.5}
    keep = minidnn.compile(graph, optimizer=OPTIMIZER, **clip)
    planned = layup.compile(graph, "85%", optimizer=OPTIMIZER, **clip)
    assert planned.plan.decisions
    assert nets.train(keep, 5) == nets.train(planned, 5)
    assert nets.differing(nets.state(keep), nets.state(planned)) == []
    free = trained(graph, minidnn.keep(), 5)
    assert nets.differing(free.state_dict(), keep.state_dict()), "nothing was clipped"
    per_layer = Plan(reuse=minidnn.Reuse(layerwise_update=True))
    with pytest.raises(PlanError, match=r"layerwise_update .* clip_grad_norm=0.5"):
        minidnn.compile(graph, per_layer, OPTIMIZER, **clip)


@pytest.mark.parametrize("optimizer", [OPTIMIZER, minidnn.Adam(lr=0.01)], ids=["momentum", "adam"])
def test_d5_a_state_saved_under_one_plan_goes_on_under_another(optimizer: Any) -> None:
    graph = nets.dropout()
    straight = minidnn.compile(graph, optimizer=optimizer)
    losses = nets.train(straight, 6)
    steps = [layup.compile(graph, policy=policy, optimizer=optimizer) for policy in ("vdnn", "keep", "layup")]
    seen = []
    for number, step in enumerate(steps):
        if number:
            step.load_state_dict(steps[number - 1].state_dict())
            step.load_optimizer_state_dict(steps[number - 1].optimizer_state_dict())
        seen += nets.train(step, 2, first=2 * number)
    assert seen == losses
    assert nets.differing(nets.state(straight), nets.state(steps[-1])) == []
