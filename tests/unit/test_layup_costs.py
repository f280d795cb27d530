"""Costs, classes and policies: prices are the simulator's, rules are the papers', plans are plain data."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

import layup
import minidnn
import models
from layup.chain import chain
from layup.checkpoints import checkpoints, crossing
from layup.classify import COMPUTE_SENSITIVE, STRUCTURAL, TRANSFER_SENSITIVE, classify, table
from layup.context import Context
from layup.evaluate import Candidate, evaluate
from layup.policies import POLICIES, find
from minidnn.errors import UserError
from minidnn.layers import Graph
from minidnn.prepare import prepare
from minidnn.profiles import Profile, load
from minidnn.schedule.instruction import COMPUTE, Op
from minidnn.schedule.plan import Decision, Plan
from minidnn.schedule.timing import row_key, row_seconds
from tests.step import nets

NAMES = {"keep", "naive", "vdnn", "vdnn_conv", "sqrt_n", "superneurons", "superneurons_memory", "layup", "auto"}


def context(graph: Graph, **same: object) -> Context:
    return Context(prepare(graph, minidnn.SGD(lr=0.1, momentum=0.9), device=None, **same))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def resnet() -> Context:
    return context(models.build("resnet20", batch=16), profile="k40")


# -- costs ------------------------------------------------------------------------------------------------------------
def test_costs_of_all_layers_add_up_to_the_simulated_step(resnet: Context) -> None:
    step = evaluate(resnet, Plan())
    costs = resnet.costs
    total = costs.input_seconds + sum(layer.forward_seconds + layer.backward_seconds for layer in costs.layers)
    assert total == pytest.approx(costs.step_seconds, rel=1e-12)
    assert step.step_seconds == pytest.approx(costs.step_seconds, rel=1e-9)
    assert costs.peak_bytes == step.peak_bytes


def test_recompute_seconds_are_those_of_the_recompute_rows(resnet: Context) -> None:
    names = [unit.name for unit in resnet.costs.units if unit.stored]
    rows = resnet.rows(Plan(dict.fromkeys(names, Decision.RECOMPUTE)))
    gpu = resnet.request.gpu
    remade: dict[str, float] = {}
    for row in rows:
        if row.op is Op.RECOMPUTE:
            remade[row.target] = remade.get(row.target, 0.0) + row_seconds(row, gpu, "fp32")
    assert len(remade) > 60
    for layer in resnet.costs.layers:
        if layer.name in remade:
            assert layer.recompute_seconds == pytest.approx(remade[layer.name], rel=1e-12), layer.name


def test_batch_norm_is_recomputed_without_its_statistics(resnet: Context) -> None:
    costs = {layer.name: layer for layer in resnet.costs.layers}
    assert costs["bn1"].recompute_seconds < 0.7 * costs["bn1"].forward_seconds
    assert costs["conv1"].recompute_seconds == costs["conv1"].forward_seconds


def test_stored_bytes_are_what_some_backward_reads(resnet: Context) -> None:
    layers = {layer.name: layer for layer in resnet.costs.layers}
    plane = 16 * 32 * 32 * 16 * 4
    assert layers["conv1"].stored_bytes == plane  # batch norm reads it
    assert layers["bn1"].stored_bytes == 0  # ReLU overwrites it and reads its own output
    assert layers["relu"].stored_bytes == plane
    assert layers["layer1.0.add"].stored_bytes == 0
    units = {unit.name: unit for unit in resnet.costs.units}
    assert units["relu"].layers == ("bn1", "relu")
    assert units["layer1.0.relu_1"].layers == ("layer1.0.bn2", "layer1.0.add", "layer1.0.relu_1")


def test_a_measured_row_reaches_cost_and_prediction_alike() -> None:
    graph = nets.plain(2)
    plain = context(graph)
    row = next(row for row in plain.rows(Plan()) if row.op is Op.FORWARD and row.target == "conv1")
    gpu = load("h200")
    fields = {name: getattr(gpu, name) for name in Profile.__slots__}  # type: ignore[attr-defined]
    measured = Profile(**{**fields, "rows": {row_key(row): 1.0}})
    slow = context(graph, profile=measured)
    cost = next(layer for layer in slow.costs.layers if layer.name == "conv1")
    assert cost.forward_seconds == 1.0 and cost.recompute_seconds == 1.0
    assert evaluate(slow, Plan()).step_seconds > 1.0
    assert layup.plan(graph, cost=measured, device=None).profile.step_seconds > 1.0


@pytest.mark.parametrize("name", ["vgg11_bn", "googlenet", "alexnet_2012"])
def test_estimated_bytes_are_those_of_the_rows_within_three_percent(name: str) -> None:
    """They only rank candidates; but a planner whose ranking is off would look at the wrong ones."""
    size = 67 if name == "alexnet_2012" else 32
    here = context(models.build(name, batch=4, image_size=size, classes=10))
    candidates = chain(here)
    assert len(candidates) > 3
    for plan, found in candidates[:: max(1, len(candidates) // 6)]:
        assert Candidate(here, plan).peaks[0] == pytest.approx(found.peak_bytes, rel=0.03)


# -- classes ----------------------------------------------------------------------------------------------------------
def test_the_rule_adds_up_forward_time_since_the_last_offload() -> None:
    costs = context(nets.plain(6, batch=64, channels=64, size=32), profile="k40").costs
    rows = [row for row in classify(costs) if row.layer == row.unit]
    since = 0.0
    for row in rows:
        unit = next(unit for unit in costs.units if unit.name == row.layer)
        since += unit.forward_seconds
        assert row.since == pytest.approx(since) and row.ratio == pytest.approx(unit.offload_seconds / since)
        if row.kind_of_cost == COMPUTE_SENSITIVE:
            assert row.ratio < 1.0
            since = 0.0
        elif row.kind_of_cost == TRANSFER_SENSITIVE:
            assert row.ratio >= 1.0
    assert {row.kind_of_cost for row in rows} >= {COMPUTE_SENSITIVE, STRUCTURAL}


def test_a_faster_link_moves_layers_to_the_compute_sensitive_side(resnet: Context) -> None:
    gpu = load("k40")
    fields = {name: getattr(gpu, name) for name in Profile.__slots__}  # type: ignore[attr-defined]

    def sensitive(factor: float) -> int:
        faster = {key: value * factor for key, value in fields.items() if "h2d" in key or "d2h" in key}
        costs = context(models.build("resnet20", batch=16), profile=Profile(**{**fields, **faster})).costs
        return sum(row.kind_of_cost == COMPUTE_SENSITIVE for row in classify(costs))

    assert sensitive(0.01) < sensitive(1.0) < sensitive(100.0)


def test_with_theta_at_most_one_all_copies_hide_in_the_forward_pass(resnet: Context) -> None:
    for theta in (0.5, 1.0):
        units = {row.unit for row in classify(resnet.costs, theta) if row.kind_of_cost == COMPUTE_SENSITIVE}
        moved = sum(unit.offload_seconds for unit in resnet.costs.units if unit.name in units)
        assert moved <= theta * sum(resnet.costs.forward_seconds)


def test_the_table_has_a_line_a_layer_and_says_where_the_readings_of_theta_differ(resnet: Context) -> None:
    rows = classify(resnet.costs)
    text = table(rows)
    assert len(text.splitlines()) == 1 + len(resnet.costs.layers)
    assert re.search(r"^bn1 .*in place, see relu$", text, re.MULTILINE)
    differing = [row for row in rows if row.layer == row.unit and len(set(row.at_thetas)) > 1]
    assert differing and all(f"{row.at_thetas[1]} at 2" in text for row in differing)


# -- checkpoints ------------------------------------------------------------------------------------------------------
def test_one_value_crosses_between_residual_units_and_two_inside(resnet: Context) -> None:
    costs = resnet.costs
    cuts = {
        unit.name: [costs.keys[k].name for k in cut] for unit, cut in zip(costs.units, crossing(costs), strict=True)
    }
    assert cuts["layer1.0.relu_1"] == ["layer1.0.relu_1"]
    assert cuts["layer1.1.conv1"] == ["layer1.0.relu_1", "layer1.1.conv1"]


def test_checkpoints_bound_the_bytes_between_them_and_cut_where_little_crosses(resnet: Context) -> None:
    costs = resnet.costs
    for parts in (2, 3):
        limit = sum(unit.footprint for unit in costs.units) / parts
        chosen = checkpoints(costs, limit)
        names = {costs.units[i].name for i in chosen}
        assert names and all(re.fullmatch(r"layer\d\.\d\.relu_1|relu|conv1", name) for name in names), names
        size = 0
        for unit in costs.units:
            size = 0 if unit.number in chosen else size + unit.footprint
            assert size <= 1.5 * limit


# -- policies ---------------------------------------------------------------------------------------------------------
def test_the_registry_has_every_policy_and_suggests_the_nearest() -> None:
    assert set(POLICIES) == NAMES
    assert all("Source:" in policy.fidelity for policy in POLICIES.values())
    with pytest.raises(UserError, match=r"unknown policy 'vdn'; did you mean vdnn"):
        find("vdn")
    with pytest.raises(UserError, match="superneurons"):
        layup.plan(nets.plain(1), policy="superneuron", device=None)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_plans_of_a_policy_survive_a_file_and_name_units_alone(name: str, resnet: Context) -> None:
    plans = POLICIES[name].plans(resnet)
    assert len(plans) > 1 if POLICIES[name].knob else len(plans) == 1
    ends = {unit.name for unit in resnet.costs.units}
    for plan in plans:
        assert plan.policy == name and set(plan.decisions) <= ends
        again = Plan.from_json(plan.to_json())
        assert again == plan
        assert Decision.KEEP not in plan.decisions.values()


def decided(name: str, here: Context) -> dict[str, Decision]:
    return dict(POLICIES[name].plans(here)[0].decisions)


def test_vdnn_offloads_all_that_is_stored_and_vdnn_conv_what_convolutions_read(resnet: Context) -> None:
    stored = {unit.name for unit in resnet.costs.units if unit.stored}
    assert decided("vdnn", resnet) == dict.fromkeys(stored, Decision.OFFLOAD)
    conv = decided("vdnn_conv", resnet)
    assert set(conv) < stored and set(conv.values()) == {Decision.OFFLOAD}
    assert "relu" in conv and "conv1" not in conv  # conv1's output is read by batch norm alone


def test_superneurons_goes_by_layer_type(resnet: Context) -> None:
    found = decided("superneurons", resnet)
    for unit in resnet.costs.units:
        if "conv2d" in unit.kinds:
            assert found[unit.name] is Decision.OFFLOAD
        elif "add" in unit.kinds:
            assert unit.name not in found
    assert found["layer1.0.relu"] is Decision.RECOMPUTE
    assert "relu" not in found  # a fork
    memory = POLICIES["superneurons_memory"].plans(resnet)[0]
    assert memory.memory_centric and dict(memory.decisions) == found


def test_sqrt_n_keeps_checkpoints_and_recomputes_the_rest(resnet: Context) -> None:
    for plan in POLICIES["sqrt_n"].plans(resnet):
        assert set(plan.decisions.values()) == {Decision.RECOMPUTE}
    kept = [len(resnet.costs.units) - len(plan.decisions) for plan in POLICIES["sqrt_n"].plans(resnet)]
    assert kept[0] < len(resnet.costs.units) / 4 < kept[-1]


def test_layup_offloads_the_compute_sensitive_and_what_reaches_across_a_checkpoint(resnet: Context) -> None:
    found = decided("layup", resnet)
    costs = resnet.costs
    for row in classify(costs):
        if row.layer == row.unit and row.kind_of_cost == COMPUTE_SENSITIVE and row.layer in found:
            assert found[row.layer] is Decision.OFFLOAD
    for unit, cut in zip(costs.units, crossing(costs), strict=True):
        if found.get(unit.name) is Decision.OFFLOAD:
            kinds = {row.layer: row.kind_of_cost for row in classify(costs)}
            if kinds[unit.name] == COMPUTE_SENSITIVE:
                for k in cut:
                    name = costs.units[costs.keys[k].unit].name
                    assert found.get(name, Decision.OFFLOAD) is Decision.OFFLOAD


def test_a_theta_of_two_never_offloads_fewer_bytes(resnet: Context) -> None:
    two = Context(resnet.request, theta=2.0)

    def offloaded(here: Context) -> int:
        return sum(row.op is Op.OFFLOAD for row in here.rows(POLICIES["layup"].plans(here)[0]))

    assert offloaded(two) >= offloaded(resnet) > 0


def test_the_lag_of_layup_is_one_segment() -> None:
    """A device copy leaves when the next offloaded unit has been computed."""
    here = context(nets.plain(8, batch=64, channels=64, size=32), profile="k40")
    plan = POLICIES["layup"].plans(here)[0]
    ends = [unit.name for unit in here.costs.units if plan.decision(unit.name) is Decision.OFFLOAD]
    assert len(ends) >= 4
    rows = [row for row in here.rows(plan) if row.op not in (Op.ALLOC, Op.FREE)]
    for name, following in pairwise(ends):
        leaves = next(i for i, row in enumerate(rows) if row.op is Op.OFFLOAD and row.target == name)
        before = [row for row in rows[:leaves] if row.stream == COMPUTE and row.op is Op.FORWARD]
        assert before[-1].target == following
