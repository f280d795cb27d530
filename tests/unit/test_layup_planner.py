"""The planner: never slower than another policy, monotone in the budget, near to brute force, and loud where nothing fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product

import pytest

import layup
import minidnn
import models
from layup.context import Context
from layup.evaluate import Candidate
from layup.needs import KEEP, OFFLOAD, RECOMPUTE
from layup.planned import without_effect
from layup.planner import Planner
from layup.policies import POLICIES
from layup.timed_plan import to_plan
from minidnn.errors import DoesNotFit, UserError
from minidnn.graph import Role
from minidnn.layers import Graph
from minidnn.prepare import prepare
from minidnn.profiles import Profile, load
from minidnn.schedule.instruction import HOST, Op
from minidnn.schedule.plan import Decision, Plan
from minidnn.schedule.simulate import live_curve
from tests.step import nets

MOMENTUM = minidnn.SGD(lr=0.1, momentum=0.9)
BLOCK = 512


def context(graph: Graph, host_memory: int | None = None, **same: object) -> Context:
    return Context(prepare(graph, MOMENTUM, device=None, **same), host_memory=host_memory)  # type: ignore[arg-type]


def profile(name: str, **factors: float) -> Profile:
    """A bundled profile with some of its numbers multiplied."""
    gpu = load(name)
    fields = {key: getattr(gpu, key) for key in Profile.__slots__}  # type: ignore[attr-defined]
    return Profile(**{**fields, **{key: fields[key] * factor for key, factor in factors.items()}})


def slow_link(name: str, factor: float) -> Profile:
    links = ("h2d_bandwidth", "d2h_bandwidth", "h2d_bandwidth_both", "d2h_bandwidth_both")
    return profile(name, **dict.fromkeys(links, 1 / factor))


def chain(layers: int, *, batch: int = 16, channels: int = 16, size: int = 16, norm: bool = False) -> Graph:
    g = Graph()
    x, y = g.input((batch, size, size, 3)), g.label((batch,))
    for i in range(layers):
        x = g.conv2d(x, channels, 3, padding=1, name=f"conv{i}")
        x = g.relu(g.batch_norm(x, name=f"bn{i}") if norm else x, name=f"relu{i}")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(x, name="pool"), 10, name="fc"), y)
    return g


def residual(batch: int = 16, channels: int = 32, size: int = 16) -> Graph:
    g = Graph()
    x, y = g.input((batch, size, size, 3)), g.label((batch,))
    x = g.relu(g.conv2d(x, channels, 3, padding=1, name="stem"), name="stem.relu")
    h = g.relu(g.batch_norm(g.conv2d(x, channels, 3, padding=1, name="conv1"), name="bn1"), name="relu1")
    h = g.batch_norm(g.conv2d(h, channels, 3, padding=1, name="conv2"), name="bn2")
    x = g.relu(g.add(h, x, name="add"), name="relu2")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(x, name="pool"), 10, name="fc"), y)
    return g


def pooled(batch: int = 16) -> Graph:
    g = Graph()
    x, y = g.input((batch, 32, 32, 3)), g.label((batch,))
    for i, channels in enumerate((32, 64)):
        x = g.max_pool(
            g.relu(g.conv2d(x, channels, 5, padding=2, name=f"conv{i}"), name=f"relu{i}"), 2, name=f"pool{i}"
        )
    x = g.dropout(g.relu(g.linear(g.flatten(x, name="flatten"), 100, name="fc1"), name="relu"), 0.5, name="drop")
    g.softmax_cross_entropy(g.linear(x, 10, name="fc2"), y)
    return g


def budgets(low: int, high: int, parts: int = 6) -> list[int]:
    return [low + (high - low) * i // parts for i in range(parts + 1)]


# -- the promises -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("graph", "gpu"),
    [
        (lambda: models.build("resnet20", batch=8, image_size=16), "k40"),
        (lambda: models.build("vgg11_bn", batch=8, image_size=32, classes=10), "h200"),
        (lambda: nets.dense(8, units=4), "rtx3070"),
        (lambda: nets.dropout(8, units=3), "k40"),
        (lambda: chain(10), "p100"),
    ],
    ids=["resnet20", "vgg11_bn", "dense", "dropout", "chain"],
)
def test_auto_is_never_slower_than_another_policy_and_time_never_rises_with_the_budget(
    graph: Callable[[], Graph], gpu: str
) -> None:
    here = context(graph(), profile=gpu)
    auto = Planner(here)
    others = [Planner(here, name) for name in POLICIES if name != "auto"]
    smallest = auto.smallest()
    assert smallest is not None
    low, keep = smallest.program.reserved_bytes, auto.keep.program.reserved_bytes
    naive = Planner(here, "naive").candidates[0].program.reserved_bytes
    before = float("inf")
    for memory in [*budgets(low, keep), naive]:
        chosen = auto.select(memory)
        assert chosen is not None and chosen.program.reserved_bytes <= memory
        seconds = chosen.program.prediction.step_seconds
        assert seconds <= before * (1 + 1e-9)
        before = seconds
        for other in others:
            rival = other.select(memory)
            assert rival is None or seconds <= rival.seconds * (1 + 1e-9), (memory, rival.plan.policy)
    assert all(low <= rival.program.reserved_bytes for other in others for rival in [other.smallest()] if rival)


def test_the_minimum_runs_and_one_block_less_is_refused() -> None:
    for graph in (nets.residual(8, units=3), nets.dense(8), chain(5, norm=True)):
        least = layup.minimum_memory(graph, optimizer=MOMENTUM, device=None)
        assert layup.plan(graph, least, optimizer=MOMENTUM, device=None).profile.reserved_bytes == least
        with pytest.raises(DoesNotFit) as refusal:
            layup.plan(graph, least - BLOCK, optimizer=MOMENTUM, device=None)
        assert refusal.value.minimum_bytes == least


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_minimum_of_every_policy_runs(name: str) -> None:
    graph = nets.residual(8, units=2)
    least = layup.minimum_memory(graph, name, device=None)
    assert layup.plan(graph, least, name, device=None).profile.reserved_bytes <= least
    with pytest.raises(DoesNotFit):
        layup.plan(graph, least - BLOCK, name, device=None)


@pytest.mark.parametrize("gpu", ["k40", "h200"])
@pytest.mark.parametrize(
    "graph",
    [lambda: chain(3), lambda: chain(2, norm=True), residual, pooled],
    ids=["chain", "norm", "residual", "pooled"],
)
def test_auto_is_within_five_percent_of_brute_force(graph: Callable[[], Graph], gpu: str) -> None:
    """Every plan whose lower bound leaves it a chance is run through the engine: none is faster by more."""
    here = context(graph(), profile=gpu)
    costs = here.costs
    free = [unit.number for unit in costs.units if unit.keys and unit.name != costs.nodes[-1].name]
    assert len(free) <= 8
    plans: dict[str, Candidate] = {}
    for choice in product((KEEP, OFFLOAD, RECOMPUTE), repeat=len(free)):
        decisions = [KEEP] * len(costs.units)
        for number, decision in zip(free, choice, strict=True):
            decisions[number] = decision
        for slack in (1.0, 0.5, 0.0) if OFFLOAD in choice else (1.0,):
            plan = to_plan(costs, decisions, "brute", slack)
            plans.setdefault(repr(plan), Candidate(here, plan))
    auto = Planner(here)
    smallest = auto.smallest()
    assert smallest is not None
    low, high = smallest.program.reserved_bytes, auto.keep.program.reserved_bytes
    assert low < high
    for memory in budgets(low, high, 5):
        chosen = auto.select(memory)
        assert chosen is not None
        limit = chosen.seconds / 1.05
        for rival in plans.values():
            if rival.bounds.seconds < limit and rival.runs_in(memory, float("inf")) and rival.seconds < limit:
                assert not rival.fits(memory, float("inf")), (memory, rival.plan, rival.seconds, chosen.seconds)
    for rival in plans.values():
        if rival.bounds.peak_bytes < low and rival.peaks[0] < low:
            assert rival.program.reserved_bytes >= low, rival.plan


def test_half_the_memory_costs_a_resnet50_in_half_precision_less_than_a_tenth() -> None:
    graph = models.build("resnet50", batch=128)
    half = layup.plan(graph, "50%", optimizer=MOMENTUM, device=None, precision="fp16", profile="h200")
    assert half.profile.step_seconds <= 1.1 * half.context.costs.step_seconds
    assert {Decision.OFFLOAD, Decision.RECOMPUTE} <= set(half.plan.decisions.values())


def test_planning_is_deterministic() -> None:
    first, second = (layup.plan(nets.residual(8, units=3), "80%", device=None) for _ in range(2))
    assert first.plan == second.plan and first.reasons == second.reasons


# -- what the plan is for ---------------------------------------------------------------------------------------------
def test_where_keep_fits_nothing_is_offloaded_or_recomputed() -> None:
    """The neighbours offload whatever is marked: 40 layers of 8 KiB under a loose budget moved for nothing."""
    graph = chain(40, batch=2, channels=16, size=8)
    for memory in (None, "100%", "200%", "1GiB"):
        made = layup.plan(graph, memory, device=None)
        assert made.plan.decisions == {} and not made.notices


def test_the_chain_of_auto_offloads_nothing_small_but_for_its_very_last_plan() -> None:
    *plans, last = POLICIES["auto"].plans(context(chain(40, batch=2, channels=16, size=8)))
    assert len(plans) > 3
    assert all(Decision.OFFLOAD not in plan.decisions.values() for plan in plans)
    assert Decision.OFFLOAD in last.decisions.values()


def test_with_a_slow_link_auto_recomputes_and_with_a_fast_one_it_offloads() -> None:
    def offloaded(gpu: Profile) -> int:
        made = layup.plan(chain(10, batch=64, channels=32), "60%", profile=gpu, device=None)
        return sum(decision is Decision.OFFLOAD for decision in made.plan.decisions.values())

    assert offloaded(slow_link("h200", 200)) == 0
    assert offloaded(slow_link("h200", 0.01)) > 0


def test_a_budget_bounds_every_schedule_of_the_program() -> None:
    for accumulate, tail in ((1, 3), (2, None), (3, 5)):
        graph = nets.residual(8, units=3)
        made = layup.plan(graph, "70%", device=None, accumulate=accumulate, tail=tail)
        assert all(s.profile.reserved_bytes <= made.memory for s in made.program.schedules.values())  # type: ignore[operator]
        assert made.plan.decisions


def test_streamed_parameters_leave_the_device() -> None:
    graph = chain(90, batch=2, channels=128, size=4)
    resident = layup.minimum_memory(graph, optimizer=MOMENTUM, device=None)
    made = layup.plan(graph, resident * 4 // 5, optimizer=MOMENTUM, device=None, streamed=("*",))
    assert made.plan.streamed == ("*",) and made.profile.reserved_bytes <= resident * 4 // 5
    assert made.profile.host_bytes > 2 * 4 * graph.parameter_count


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    memory = 3 << 20
    most = layup.max_batch(lambda batch: residual(batch), memory, start=2, device=None)
    assert layup.minimum_memory(residual(most), device=None) <= memory
    assert layup.minimum_memory(residual(most + 1), device=None) > memory
    assert layup.max_batch(lambda batch: residual(batch), memory, "keep", start=2, device=None) <= most
    with pytest.raises(DoesNotFit):
        layup.max_batch(lambda batch: residual(batch), 1 << 16, start=2, device=None)


# -- reasons and notices ----------------------------------------------------------------------------------------------
def test_every_decision_has_a_reason_with_its_bytes_and_milliseconds() -> None:
    made = layup.plan(models.build("resnet20", batch=32), "50%", optimizer=MOMENTUM, device=None, profile="k40")
    units = {unit.name: unit for unit in made.context.costs.units}
    assert set(made.plan.decisions) <= set(made.reasons)
    for name, reason in made.reasons.items():
        decision = made.plan.decision(name)
        assert reason.startswith(f"{decision.value}: ") and "\n" not in reason
        if decision is Decision.OFFLOAD:
            assert re.search(r"hidden under \S+|computation waits [\d.e+-]+ ms", reason), reason
            assert f"recompute would cost {units[name].recompute_seconds * 1e3:.3g} ms" in reason
        if decision is Decision.RECOMPUTE:
            assert f"recompute: {units[name].recompute_seconds * 1e3:.3g} ms for" in reason
    assert any("keeping it would exceed the budget by" in reason for reason in made.reasons.values())
    assert str(made.plan.policy) in made.text() and len(made.text().splitlines()) == 1 + len(made.reasons)


def test_what_a_plan_says_in_vain_is_said_loudly() -> None:
    graph = nets.residual(8)
    costs = context(graph).costs
    decisions = {"fc": Decision.OFFLOAD, "unit0.relu2": Decision.OFFLOAD}
    plan = Plan(decisions, lags={"unit0.conv1": 3}, memory_centric=True)
    said = "\n".join(without_effect(costs, plan))
    assert "offload of 'fc' has no effect: no backward reads what it makes" in said
    assert "memory_centric has no effect" in said and "lags of 'unit0.conv1' has no effect" in said
    assert "unit0.relu2" not in said
    nothing = layup.plan(chain(1), policy="sqrt_n", device=None)
    assert nothing.plan.decisions or any("same as keep" in notice for notice in nothing.notices)


def test_an_unknown_layer_of_a_plan_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"'unit0.relv1', which is no layer.*did you mean unit0.relu1"):
        minidnn.compile(nets.residual(8), Plan({"unit0.relv1": Decision.OFFLOAD}), device=None)


# -- refusals ---------------------------------------------------------------------------------------------------------
def bytes_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


def test_a_refusal_names_the_minimum_the_row_and_three_flags_with_their_bytes() -> None:
    graph = models.build("resnet20", batch=16, image_size=16)
    with pytest.raises(DoesNotFit) as refusal:
        layup.plan(graph, 1024, optimizer=MOMENTUM, device=None)
    error, text = refusal.value, str(refusal.value)
    assert error.exit_code == 2 and error.row in text and error.residents
    assert (
        layup.plan(graph, error.minimum_bytes, optimizer=MOMENTUM, device=None).profile.reserved_bytes
        <= error.minimum_bytes
    )
    assert f"--memory {error.minimum_bytes} " in text
    flags = re.findall(r"(--memory|-b|--workspace-limit|--opt|--policy) (\S+)[^(;]*\((?:from )?([\d.]+ \w*B)", text)
    assert len(flags) >= 3 and len({flag for flag, _, _ in flags}) >= 3, text
    batch, nbytes = next((int(value), bytes_of(size)) for flag, value, size in flags if flag == "-b")
    smaller = layup.minimum_memory(
        models.build("resnet20", batch=batch, image_size=16), optimizer=MOMENTUM, device=None
    )
    assert smaller <= nbytes * 1.01


def test_a_refused_policy_names_auto_and_what_it_takes() -> None:
    with pytest.raises(DoesNotFit, match=r"--policy auto \(from [\d.]+ [KM]iB\)"):
        layup.plan(models.build("resnet20", batch=16, image_size=16), "50%", "vdnn_conv", device=None)


def test_exhausted_pinned_memory_is_said_to_be_that_and_auto_recomputes_instead() -> None:
    """Elsewhere it is reported as device memory, and people shrink the wrong thing."""
    graph = models.build("resnet20", batch=32)
    limit = 2 << 20
    with pytest.raises(DoesNotFit, match="pinned host memory") as refusal:
        layup.plan(graph, policy="vdnn", host_memory=limit, device=None)
    needed = refusal.value.minimum_host_bytes
    assert needed > limit and layup.plan(graph, policy="vdnn", host_memory=needed, device=None)
    made = layup.plan(graph, "50%", host_memory=limit, device=None)
    assert made.profile.host_bytes <= limit
    assert Decision.RECOMPUTE in made.plan.decisions.values()
    free = layup.plan(graph, "50%", device=None)
    assert free.profile.host_bytes > limit and free.profile.step_seconds <= made.profile.step_seconds


def test_a_host_budget_below_the_batch_slots_is_refused_with_what_they_take() -> None:
    with pytest.raises(DoesNotFit, match="pinned host memory") as refusal:
        layup.plan(chain(2), host_memory=1000, device=None)
    least = refusal.value.minimum_host_bytes
    assert layup.plan(chain(2), host_memory=least, device=None).profile.host_bytes == least


@pytest.mark.parametrize(
    ("same", "message"),
    [
        ({"theta": 0.0}, "theta=0.0 must be above 0"),
        ({"plan": Plan()}, "layup makes the plan"),
        ({"memory": "many"}, "memory='many' is no size"),
        ({"host_memory": "60%"}, "host_memory='60%' is no size"),
    ],
)
def test_wrong_use_is_refused_in_a_sentence(same: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        layup.compile(chain(1), device=None, **same)  # type: ignore[arg-type]


# -- numbers ----------------------------------------------------------------------------------------------------------
def test_plan_and_compiled_step_have_the_same_numbers() -> None:
    graph = nets.residual(8, units=3)
    made = layup.plan(graph, "80%", device=None)
    step = layup.compile(graph, "80%", device=None)
    again = minidnn.compile(graph, made.plan, memory="80%", device=None)
    assert made.profile == step.profile == again.profile
    assert step.plan == made.plan and step.profile.reserved_bytes <= made.memory  # type: ignore[operator]


def test_the_offloaded_bytes_are_those_of_the_decided_activations_and_of_nothing_else() -> None:
    """An offload hook elsewhere moved parameters, too; and host bytes are reported beside the device's."""
    graph = models.build("resnet20", batch=32)
    made = layup.plan(graph, "50%", optimizer=MOMENTUM, device=None, profile="k40")
    costs = made.context.costs
    rows = made.program["train"].rows
    moved = [value for row in rows if row.op is Op.OFFLOAD for value in row.reads]
    decided = {unit.name for unit in costs.units if made.plan.decision(unit.name) is Decision.OFFLOAD}
    wanted = sum(costs.keys[k].nbytes for unit in costs.units if unit.name in decided for k in unit.keys)
    assert moved and sum(value.spec.nbytes for value in moved) == wanted
    assert {value.buffer.role for value in moved} <= {Role.ACTIVATION, Role.AUX}
    train = made.program["train"].profile
    assert train.host_peak_bytes == max(live_curve(rows, made.context.host_base_bytes, space=HOST))
    assert train.host_peak_bytes == made.context.host_base_bytes + sum(v.spec.footprint for v in moved)
