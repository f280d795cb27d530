"""What differs in nets of thousands of layers, shown in small ones: few plans are timed, parameters travel, a stack is placed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import minidnn
import models
from layup import planner as planner_module
from layup.context import Context
from layup.planner import Planner
from layup.policies import POLICIES
from minidnn.layers import Graph
from minidnn.prepare import prepare
from minidnn.schedule import placement
from minidnn.schedule.instruction import COMPUTE, Op
from minidnn.schedule.plan import Plan
from tests.step import nets

MOMENTUM = minidnn.SGD(lr=0.1, momentum=0.9)


def context(graph: Graph, gpu: str, streamed: bool = False) -> Context:
    return Context(prepare(graph, MOMENTUM, device=None, profile=gpu), streamed=("*",) if streamed else ())


def wide_chain() -> Graph:
    return nets.plain(24, batch=2, channels=128, size=4)


@pytest.mark.parametrize("large", [False, True], ids=["all_timed", "few_timed"])
@pytest.mark.parametrize(
    ("graph", "gpu", "streamed"),
    [
        (lambda: models.build("resnet20", batch=8, image_size=16), "h200", False),
        (lambda: nets.dense(8, units=4), "k40", False),
        (lambda: nets.residual(8, units=4), "k40", True),
        (wide_chain, "h200", True),
    ],
    ids=["resnet20", "dense", "residual_streamed", "chain_streamed"],
)
def test_auto_is_never_slower_than_what_another_policy_selects_and_runs_in_every_budget_from_its_minimum(
    graph: Callable[[], Graph], gpu: str, streamed: bool, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where estimates choose what is timed: the other policies' own choices are always compared."""
    if large:
        monkeypatch.setattr(planner_module, "_LARGE", 0)
        monkeypatch.setattr(planner_module, "_TRIALS", 0)
    here = context(graph(), gpu, streamed)
    auto, others = Planner(here), [Planner(here, name) for name in POLICIES if name != "auto"]
    smallest = auto.smallest()
    assert smallest is not None
    low, high = smallest.program.reserved_bytes, auto.keep.program.reserved_bytes
    compared = 0
    for memory in [low + (high - low) * i // 7 for i in range(8)]:
        chosen = auto.select(memory)
        assert chosen is not None and chosen.program.reserved_bytes <= memory
        for other in others:
            rival = other.select(memory)
            assert rival is None or chosen.seconds <= rival.seconds * (1 + 1e-9), (memory, rival.plan.policy)
            compared += rival is not None
    assert compared >= 8


def test_an_estimate_that_hides_a_plan_refuses_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every budget from the minimum on succeeds, even if all estimates are a half too high."""
    monkeypatch.setattr(planner_module, "_LARGE", 0)
    here = context(nets.residual(8, units=4), "k40")
    auto = Planner(here)
    smallest = auto.smallest()
    assert smallest is not None
    least = smallest.program.reserved_bytes
    for candidate in auto.candidates:
        if candidate.guess is not None:
            candidate.guess = candidate.guess._replace(peak_bytes=candidate.guess.peak_bytes * 3 // 2)
    for memory in (least, least + 512, least * 11 // 10):
        chosen = auto.select(memory)
        assert chosen is not None and chosen.program.reserved_bytes <= memory


def test_no_row_takes_the_bytes_of_streamed_parameters_while_they_are_being_stored() -> None:
    """Else computation waits for the copy at once: a STORE is listed after the visit of the next group."""
    plan = Plan(streamed=("*",), group_bytes=1 << 20)
    rows = minidnn.compile(wide_chain(), plan, MOMENTUM, device=None).program["train"].rows
    stores = [i for i, row in enumerate(rows) if row.op is Op.STORE]
    groups = [rows[i].target for i in stores]
    assert len(stores) > 8 and len(set(groups)) == len(groups)
    for i in stores[:-1]:
        device = rows[i].reads[0].buffer
        used = [k for k in range(i) if rows[k].stream == COMPUTE and any(v.buffer is device for v in rows[k].writes)]
        between = [row for row in rows[used[-1] + 1 : i] if row.op is Op.UPDATE]
        assert between and all(v.buffer is not device for row in between for v in row.writes), rows[i].target


@pytest.mark.parametrize("policy", ["vdnn", "sqrt_n"])
def test_copies_in_flight_cost_a_deep_net_half_as_many_holes_in_a_stack_of_their_own(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as few pairs placed everywhere at once as a net of thousands of layers has: one stack alone loses a tenth and more."""
    monkeypatch.setattr(placement, "_PAIRS", 5000)
    here = context(models.build("resnet", batch=16, image_size=64, blocks=(3, 8, 30, 3)), "h200", streamed=True)
    plans = POLICIES[policy].plans(here)
    rows = here.rows(here.complete(plans[len(plans) // 2]))
    placed = placement.place(rows)
    monkeypatch.setattr(placement, "_POOR", 1)
    alone = placement.place(rows)
    assert alone.fragmentation > alone.peak // 12
    assert placed.fragmentation < alone.fragmentation // 2
