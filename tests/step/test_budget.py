"""A budget is obeyed to the byte or refused before anything is allocated, in a sentence that helps (cases C1, C2, C6, T5)."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import minidnn
import models
from minidnn.device.emulated import EmulatedDevice
from minidnn.errors import UserError
from minidnn.layers import Graph
from minidnn.pool_executor import PoolExecutor
from minidnn.step import CompiledStep
from tests.step import nets

BLOCK = 512


class Witness(EmulatedDevice):
    """An emulated device that remembers what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[tuple[int, int]] = []

    def open(self, reserved_bytes: int, host_bytes: int) -> None:
        self.opened.append((reserved_bytes, host_bytes))
        super().open(reserved_bytes, host_bytes)


def refusal(graph: Graph, **options: Any) -> minidnn.DoesNotFit:
    """The refusal of a compilation; nothing was asked of the device."""
    device = Witness()
    with pytest.raises(minidnn.DoesNotFit) as caught:
        minidnn.compile(graph, device=device, **options)
    assert device.opened == []
    return caught.value


def needed(graph: Graph, **options: Any) -> CompiledStep:
    """The same step, planned only and without a budget."""
    return minidnn.compile(graph, device=None, **options)


# -- to the byte ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("plan", [minidnn.keep(), minidnn.naive()], ids=lambda plan: plan.policy)
@pytest.mark.parametrize("options", [{}, {"tail": 2}, {"accumulate": 2, "tail": 1}], ids=str)
def test_a_budget_of_the_reserved_bytes_runs_and_one_block_less_is_refused(
    plan: minidnn.Plan, options: dict[str, Any]
) -> None:
    graph = nets.residual()
    reserved = needed(graph, plan=plan, **options).profile.reserved_bytes
    device = Witness()
    step = minidnn.compile(graph, plan, device=device, memory=reserved, **options)
    assert [asked for asked, _ in device.opened] == [reserved]
    nets.train(step, 2)
    step.evaluate(nets.batch(graph)[0])
    device.synchronize()
    assert device.touched_bytes() <= reserved
    for short in (BLOCK, 1):
        error = refusal(graph, plan=plan, memory=reserved - short, **options)
        assert error.minimum_bytes == reserved
        assert f"short by {short} B" in str(error)


def test_the_minimum_of_any_refusal_runs_when_it_is_passed_back() -> None:
    graph = nets.dense()
    requests: list[dict[str, Any]] = [
        {"memory": "1KiB"},
        {"memory": 1, "plan": minidnn.naive()},
        {"memory": "9%", "tail": 1},
    ]
    for options in requests:
        minimum = refusal(graph, **options).minimum_bytes
        step = minidnn.compile(graph, **{**options, "memory": minimum})
        nets.train(step, 2)
        step.close()
        refusal(graph, **{**options, "memory": minimum - BLOCK})


@pytest.mark.parametrize("plan", [minidnn.keep(), minidnn.naive()], ids=lambda plan: plan.policy)
@pytest.mark.parametrize("percent", [100, 80, 60])
def test_a_limit_is_hard_it_is_obeyed_or_refused(percent: int, plan: minidnn.Plan) -> None:
    graph = nets.dropout()
    limit = needed(graph).profile.reserved_bytes * percent // 100
    device = Witness()
    try:
        step = minidnn.compile(graph, plan, device=device, memory=f"{percent}%")
    except minidnn.DoesNotFit as error:
        assert device.opened == []
        assert limit < error.minimum_bytes
    else:
        nets.train(step, 3)
        assert device.opened[0][0] <= limit
        assert device.touched_bytes() <= limit
    fits = needed(graph, plan=plan).profile.reserved_bytes <= limit
    assert fits == bool(device.opened) == (percent == 100 and plan.policy == "keep")


@pytest.mark.parametrize("percent", [100, 80])
def test_the_pool_never_holds_more_than_the_limit(percent: int) -> None:
    graph = nets.residual()
    plan = needed(graph)
    limit = plan.profile.reserved_bytes * percent // 100
    try:
        executor = PoolExecutor(plan.program, EmulatedDevice(), plan.gpu, "fp32", limit)
    except minidnn.DoesNotFit as refusal:
        assert percent < 100 or refusal.minimum_bytes > limit
        executor = PoolExecutor(plan.program, EmulatedDevice(), plan.gpu, "fp32", refusal.minimum_bytes)
        limit = refusal.minimum_bytes
    for _ in range(2):
        executor.run("train")
    assert executor.pool.peak_held_bytes <= limit


def test_a_percentage_is_of_what_keep_reserves_whatever_the_plan() -> None:
    graph = nets.residual()
    keep, naive = needed(graph).profile.reserved_bytes, needed(graph, plan=minidnn.naive()).profile.reserved_bytes
    assert keep < naive
    assert f"the budget is {int(keep * 0.6)} B" in str(refusal(graph, memory="60%"))
    assert f"the budget is {keep} B" in str(refusal(graph, plan=minidnn.naive(), memory="100%"))
    minidnn.compile(graph, minidnn.naive(), device=None, memory="100000%")


def test_pinned_host_memory_has_a_budget_of_its_own() -> None:
    graph = nets.chain()
    host = needed(graph).profile.host_bytes
    device = Witness()
    minidnn.compile(graph, device=device, host_memory=host)
    assert device.opened[0][1] == host
    error = refusal(graph, host_memory=host - BLOCK)
    assert error.minimum_host_bytes == host
    assert "pinned host memory" in str(error) and f"--host-memory {host}" in str(error)


# -- what a refusal says ----------------------------------------------------------------------------------------------
def test_a_refusal_names_row_layers_shortage_minimum_and_three_ways_out() -> None:
    graph = models.build("resnet20", batch=16)
    plan = needed(graph)
    budget = plan.profile.reserved_bytes // 2
    error = refusal(graph, memory=budget)
    text = str(error)
    assert "\n" not in text
    assert f"needs {plan.profile.reserved_bytes} B" in text and f"budget is {budget} B" in text
    assert f"short by {plan.profile.reserved_bytes - budget} B" in text
    assert error.row in text and re.fullmatch(r"row \d+, [A-Z_]+ \S+", error.row)
    assert error.row.split()[-1] in {node.name for node in graph.nodes}
    assert "of schedule 'train'" in text
    largest = [r for r in plan.program.largest.profile.residents_at_peak if r.layer][:3]
    for resident in largest:
        assert f"{resident.layer} {resident.role}" in text
    assert len(error.residents) >= 10 and error.residents[0][1] >= error.residents[9][1]
    assert sum(nbytes for _, nbytes in error.residents) == plan.program.largest.profile.peak_bytes
    assert error.minimum_bytes == plan.profile.reserved_bytes
    for flag in ("--memory", "--policy", "a batch below 16", "--workspace-limit"):
        assert flag in text
    json.dumps([error.minimum_bytes, error.minimum_host_bytes, error.row, error.residents])


def test_a_smaller_workspace_is_offered_with_the_bytes_that_it_takes_and_never_taken() -> None:
    graph = models.build("resnet20", batch=16)
    lean = needed(graph, workspace_limit=1).profile.reserved_bytes
    text = str(refusal(graph, memory=lean))
    offer = re.search(r"--workspace-limit (\d+) \((.*?): would fit", text)
    assert offer is not None
    step = minidnn.compile(graph, device=None, memory=lean, workspace_limit=int(offer[1]))
    assert step.profile.reserved_bytes <= lean
    assert step.recipe.hash != needed(graph).recipe.hash
    assert "would fit" not in str(refusal(graph, memory=lean - BLOCK))


@pytest.mark.parametrize("size", ["", "4 apples", "-1GiB", "1.5.2MB", "GiB", "%", "ten", "0", 0, -5, "0.1", "1e6"])
@pytest.mark.parametrize("what", ["memory", "host_memory", "workspace_limit"])
def test_a_malformed_size_is_refused_with_its_value(what: str, size: int | str) -> None:
    options: dict[str, Any] = {what: size}
    with pytest.raises(UserError, match=f"{what}=.*{re.escape(str(size))}"):
        needed(nets.chain(), **options)


@pytest.mark.parametrize("what", ["host_memory", "workspace_limit"])
def test_only_the_device_budget_can_be_a_percentage(what: str) -> None:
    with pytest.raises(UserError, match=f"{what}='60%' is no size"):
        needed(nets.chain(), **{what: "60%"})


def test_sizes_are_read_in_binary_and_decimal_units_and_as_numbers() -> None:
    graph = nets.chain()
    for size, nbytes in (("1KiB", 1024), ("2kb", 2000), ("1.5 KiB", 1536), ("700", 700), (" 900b ", 900), (3, 3)):
        assert f"the budget is {nbytes} B" in str(refusal(graph, memory=size))


# -- without a device -------------------------------------------------------------------------------------------------
def test_planning_without_a_device_gives_the_numbers_of_the_later_run() -> None:
    graph = nets.dropout()
    planned = needed(graph, tail=2)
    step = minidnn.compile(graph, tail=2)
    step.verify(*nets.batch(graph))
    assert planned.profile == step.profile
    assert planned.profile.peak_bytes == step.measured.peak_bytes
    assert planned.program["train"].dump() == step.program["train"].dump()
    for use in (
        lambda: planned.run(*nets.batch(graph)),
        lambda: planned.evaluate(nets.batch(graph)[0]),
        planned.state_dict,
    ):
        with pytest.raises(UserError, match="this step has no device"):
            use()
