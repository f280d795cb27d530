"""The report: every byte of the counter is a rectangle's and a category's, and all figures are the engine's own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

import layup
import minidnn
import models
from layup.report import (
    compare,
    read_data,
    render,
    report_data,
    spaces,
    timeline,
    view,
    waterfall,
    waterfall_text,
    write_report,
)
from layup.report.bill import layer_bills
from minidnn.graph import Tensor
from minidnn.layers import Graph
from minidnn.schedule.instruction import DEVICE, HOST, Op
from minidnn.schedule.plan import Decision, Plan, Reuse, keep, naive
from minidnn.schedule.simulate import live_curve, row_seconds, total_footprint
from minidnn.step import CompiledStep

PLAN = Plan(
    {"conv1": Decision.RECOMPUTE, "relu1": Decision.RECOMPUTE, "relu2": Decision.OFFLOAD, "conv4": Decision.OFFLOAD},
    policy="mine",
    lag=3,
)
REASONS = {"relu1": "recompute: cheap", "relu2": "offload: hidden"}


class Reasons:
    """A planner's reasons, without a planner."""

    reasons = REASONS


def net(batch: int = 4) -> Graph:
    """conv-bn-relu, then two residual blocks."""
    g = Graph()
    x, y = g.input((batch, 16, 16, 3)), g.label((batch,))

    def norm(of: Tensor, number: int) -> Tensor:
        return g.batch_norm(g.conv2d(of, 16, 3, padding=1, name=f"conv{number}"), name=f"bn{number}")

    h = g.relu(norm(x, 1), name="relu1")
    for number in (2, 4):
        inner = g.relu(norm(h, number), name=f"relu{number}")
        h = g.relu(g.add(norm(inner, number + 1), h, name=f"add{number}"), name=f"out{number}")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(h), 10, name="fc"), y)
    return g


def compiled(plan: Plan | None = None, **more: Any) -> CompiledStep:
    return minidnn.compile(net(), plan, device=None, profile="v100", **more)


@pytest.fixture(scope="module")
def step() -> CompiledStep:
    """A step that offloads, recomputes and takes a smaller last batch."""
    return compiled(PLAN, tail=2)


@pytest.fixture(scope="module")
def data(step: CompiledStep) -> dict[str, Any]:
    """Its report, through JSON."""
    made = report_data(step, planned=Reasons(), waterfall=(), memory=step.profile.reserved_bytes + 512)
    loaded: dict[str, Any] = json.loads(json.dumps(made))
    return loaded


# -- bytes ------------------------------------------------------------------------------------------------------------


def spread(pairs: list[int], count: int) -> list[int]:
    """``event, blocks`` pairs as one value for each event."""
    values, level, at = [], 0, dict(zip(pairs[::2], pairs[1::2], strict=True))
    for event in range(count):
        level = at.get(event, level)
        values.append(level)
    return values


def unexplained(shown: dict[str, Any], name: str) -> tuple[int, int]:
    """Largest difference at any event, in blocks: of counter and rectangles, of counter and categories."""
    space, buffers = shown["spaces"][name], shown["buffers"]
    count = len(space["at"])
    change = [0] * (count + 1)
    for host, blocks, born, died in zip(*(buffers[k] for k in ("host", "blocks", "born", "died")), strict=True):
        if host == (name == "pinned"):
            change[born] += blocks
            change[died] -= blocks
    categories = [spread(pairs, count) for pairs in space["categories"].values()]
    rest, worst, worst_category = spread(space["merged"], count), 0, 0
    live = 0
    for event, counter in enumerate(space["counter"]):
        live += change[event]
        worst = max(worst, abs(counter - live - rest[event]))
        worst_category = max(worst_category, abs(counter - sum(series[event] for series in categories)))
    return worst, worst_category


@pytest.mark.parametrize("shown", ["plan", "naive"])
@pytest.mark.parametrize("space", ["device", "pinned"])
def test_rectangles_and_categories_sum_to_the_counter_at_every_event(
    data: dict[str, Any], shown: str, space: str
) -> None:
    assert unexplained(data["views"][shown], space) == (0, 0)


def test_a_missing_or_a_longer_rectangle_is_noticed(data: dict[str, Any]) -> None:
    for column, change in (("blocks", -1), ("died", 1)):
        shown = json.loads(json.dumps(data["views"]["plan"]))
        index = shown["buffers"]["host"].index(0) + 20
        shown["buffers"][column][index] += change
        assert unexplained(shown, "device")[0] > 0


def test_the_counter_is_the_engines_curve_and_starts_before_the_first_weight(
    step: CompiledStep, data: dict[str, Any]
) -> None:
    schedule, persistent = step.program["train"], step.program.persistent
    for name, space, fixed in (("device", DEVICE, persistent.buffers), ("pinned", HOST, persistent.host_buffers)):
        events = [i for i, row in enumerate(schedule.rows) if row.buffer is not None and row.buffer.space == space]
        curve = live_curve(schedule.rows, total_footprint(fixed, space), space=space)
        counter = [blocks * data["block"] for blocks in data["views"]["plan"]["spaces"][name]["counter"]]
        assert counter[len(fixed) :] == [curve[i] for i in events]
        assert counter[0] == fixed[0].footprint  # the first event: nothing was alive before
        assert max(counter) == (schedule.profile.peak_bytes if space == DEVICE else schedule.profile.host_peak_bytes)


def test_rectangles_lie_in_the_slab_and_never_on_each_other(data: dict[str, Any]) -> None:
    for shown in data["views"].values():
        columns = [shown["buffers"][k] for k in ("host", "offset", "blocks", "born", "died")]
        boxes = list(zip(*columns, strict=True))
        for space, limit in ((0, shown["reserved_bytes"]), (1, shown["host_bytes"])):
            mine = sorted(box[1:] for box in boxes if box[0] == space)
            assert max(offset + blocks for offset, blocks, _, _ in mine) * data["block"] <= limit
            for i, (offset, blocks, born, died) in enumerate(mine):
                for other in mine[i + 1 :]:
                    if other[0] >= offset + blocks:
                        break
                    assert died <= other[2] or other[3] <= born


@pytest.mark.parametrize("most", [1, 40])
def test_what_is_not_drawn_one_by_one_is_still_counted(
    step: CompiledStep, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(spaces, "MOST_RECTANGLES", most)
    monkeypatch.setattr(view, "MOST_TOUCHES", 10)
    shown = report_data(step, waterfall=())["views"]["plan"]
    assert unexplained(shown, "device") == unexplained(shown, "pinned") == (0, 0)
    drawn, left_out = len(shown["buffers"]["name"]), shown["merged"]["buffers"]
    fixed = len(step.program.persistent.buffers) + len(step.program.persistent.host_buffers)
    assert drawn <= most + fixed and left_out > 0 and shown["merged"]["byte_rows"] > 0
    assert drawn + left_out == fixed + sum(row.op is Op.ALLOC for row in step.program["train"].rows)
    assert "touches" not in shown


def test_a_buffer_is_named_after_the_value_that_it_holds_last_and_whose_decision_it_is(data: dict[str, Any]) -> None:
    """conv3 is overwritten by bn3, the sum and out2, which is kept: the rectangle must not be conv3's."""
    shown, text = data["views"]["plan"], data["strings"]
    buffers = shown["buffers"]
    index = next(i for i, n in enumerate(buffers["name"]) if text[n] == "out2")
    assert [text[n] for n in buffers["holds"][index]] == ["bn3", "add2", "out2"]
    assert text[buffers["layer"][index]] == "out2"
    decisions = {text[n]: data["decisions"][d] for n, d in zip(buffers["name"], buffers["decision"], strict=True)}
    assert (decisions["out2"], decisions["relu2"], decisions["relu1"]) == ("keep", "offload", "recompute")


# -- time -------------------------------------------------------------------------------------------------------------


def test_the_steady_step_takes_the_predicted_time(step: CompiledStep) -> None:
    rows = step.program["train"].rows
    times = timeline.steady_times(rows, step.gpu, "fp32")
    assert max(end for _, end in times) == round(step.profile.step_seconds * 1e9)
    assert min(start for start, _ in times) < 0  # the next batch comes in while the step before goes on


def test_every_wait_that_is_drawn_is_kept_and_crosses_streams(step: CompiledStep, data: dict[str, Any]) -> None:
    shown = data["views"]["plan"]
    rows, flat = shown["rows"], shown["waits"]
    waits = list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
    assert {lag for _, _, lag in waits} == {0, 1}
    for row, waited, lag in waits:
        assert rows["stream"][row] != rows["stream"][waited]
        ended = rows["start"][waited] + rows["duration"][waited] - lag * shown["step_ns"]
        assert rows["start"][row] >= ended - 2  # rounded to whole nanoseconds


# -- the bill and the waterfall ---------------------------------------------------------------------------------------


def test_the_bill_is_what_the_rows_of_the_plan_cost(step: CompiledStep) -> None:
    bills = {bill.name: bill for bill in layer_bills(step, REASONS)}
    rows = step.program["train"].rows

    def total(*ops: Op) -> float:
        return sum(row_seconds(row, step.gpu, "fp32") for row in rows if row.op in ops)

    assert sum(b.forward_seconds for b in bills.values()) == pytest.approx(total(Op.FORWARD))
    assert sum(b.backward_seconds for b in bills.values()) == pytest.approx(
        total(Op.BACKWARD_DATA, Op.BACKWARD_WEIGHT, Op.ADD)
    )
    assert sum(b.recompute_seconds for b in bills.values()) == pytest.approx(total(Op.RECOMPUTE)) != 0
    assert sum(b.copy_seconds for b in bills.values()) == pytest.approx(total(Op.OFFLOAD, Op.PREFETCH)) != 0
    assert bills["relu2"].moved_bytes == 4 * 16 * 16 * 16 * 4
    assert (bills["bn1"].decided_by, bills["bn1"].decision, bills["bn1"].reason) == (
        "relu1",
        "recompute",
        "recompute: cheap",
    )


def test_each_bar_of_the_waterfall_is_a_plan_of_its_own_as_the_engine_compiles_it(step: CompiledStep) -> None:
    stages = waterfall(step)
    assert [s.name for s in stages if s.used] == [
        "naive", "lifetimes", "in-place", "workspace", "gradient window", "layer-wise update", "offload", "recompute",
    ]  # fmt: skip
    for stage in stages:
        alone = compiled(stage.plan, tail=2).profile
        assert (stage.peak_bytes, stage.reserved_bytes, stage.host_bytes, stage.step_seconds) == (
            alone.peak_bytes, alone.reserved_bytes, alone.host_bytes, alone.step_seconds,
        )  # fmt: skip
    assert stages[0].plan.reuse == naive().reuse and stages[5].plan.reuse == keep().reuse
    assert (
        stages[0].reserved_bytes > stages[5].reserved_bytes > stages[-1].reserved_bytes == step.profile.reserved_bytes
    )
    assert set(stages[6].plan.decisions.values()) == {Decision.OFFLOAD} and stages[-1].plan == step.plan


def test_known_plans_are_not_compiled_again(step: CompiledStep) -> None:
    profile = replace(step.profile, reserved_bytes=12345)
    stages = waterfall(step, [(naive(), profile), (keep(), profile)])
    assert [s.name for s in stages if s.reserved_bytes == 12345] == ["naive", "layer-wise update"]


def test_a_technique_that_the_plan_does_without_is_named_and_changes_nothing() -> None:
    stages = waterfall(compiled(accumulate=2))
    assert [s.name for s in stages if not s.used] == ["layer-wise update", "offload", "recompute", "streaming"]
    assert len({s.reserved_bytes for s in stages[4:]}) == 1
    stages = waterfall(compiled(Plan(reuse=Reuse(in_place=False))))
    assert [s.name for s in stages if not s.used] == ["in-place", "offload", "recompute", "streaming"]
    lines = waterfall_text(stages).splitlines()
    assert len(lines) == 1 + len(stages) and lines[3].split() == ["+", "in-place", "not", "used"]


def test_streamed_parameters_are_the_last_bar() -> None:
    step = compiled(Plan(streamed=("*",), group_bytes=1 << 16))
    stages = waterfall(step)
    assert stages[-1].used and stages[-1].reserved_bytes == step.profile.reserved_bytes < stages[-2].reserved_bytes
    data = report_data(step, waterfall=stages)
    assert unexplained(data["views"]["plan"], "device") == unexplained(data["views"]["plan"], "pinned") == (0, 0)


def test_another_plan_is_built_for_the_very_same_request() -> None:
    for options in ({"tail": 3}, {"accumulate": 2}, {"precision": "fp16"}, {"fusions": ("batch_norm_relu",)}):
        step = compiled(**options)
        assert step.request.program(step.plan).prediction == step.profile


# -- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_holds_all_it_shows_and_asks_for_nothing(step: CompiledStep, tmp_path: Any) -> None:
    path = tmp_path / "report.html"
    write_report(path, step, waterfall=(), title="</script><b>&amp; <!-- net")
    html = path.read_text(encoding="utf-8")
    assert read_data(html)["title"] == "</script><b>&amp; <!-- net"
    assert html.count("</script>") == 2  # of the data and of the script
    references = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]*)""", html)
    assert references == ["data:,"]
    assert not re.search(r"https?:|\bfetch\(|XMLHttpRequest|import\(|@import|url\(", html)
    assert "default-src 'none'" in html


def test_much_data_is_packed_and_read_back(data: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from layup.report import document

    plain = render(data)
    assert read_data(plain) == data and '"categories"' in plain
    monkeypatch.setattr(document, "MOST_PLAIN", 1000)
    packed = render(data)
    assert read_data(packed) == data and '"categories"' not in packed and len(packed) < len(plain)


def test_the_report_of_resnet152_stays_small() -> None:
    step = minidnn.compile(models.build("resnet152", batch=32), device=None)
    data = report_data(step, waterfall=())
    assert len(render(data).encode()) < 2_500_000  # 5 MB are allowed
    assert unexplained(data["views"]["plan"], "device") == unexplained(data["views"]["naive"], "device") == (0, 0)


def test_figures_of_the_report_are_those_of_the_step(step: CompiledStep, data: dict[str, Any]) -> None:
    profile = step.profile
    assert data["peak_bytes"] == profile.peak_bytes and data["reserved_bytes"] == profile.reserved_bytes
    assert data["host_bytes"] == profile.host_bytes and data["memory_bytes"] == profile.reserved_bytes + 512
    assert data["measured_peak_bytes"] is None and data["plan"] == step.plan.to_json()
    assert data["offloaded_bytes"] > 0 < data["recompute_fraction"] < 1
    assert data["views"]["naive"]["peak_bytes"] == compiled(naive(), tail=2).program["train"].profile.peak_bytes


# -- comparing policies -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def comparison() -> layup.report.Comparison:
    """All policies."""
    request = minidnn.prepare.prepare(net(32), device=None, profile="k40")
    return compare(layup.Context(request))


def test_each_row_of_a_comparison_is_what_compiling_gives(comparison: layup.report.Comparison) -> None:
    """C15: device and host peak stand in one table."""
    for row in [row for row in comparison.rows if row.policy in ("auto", "vdnn")][::3]:
        graph = net(32)
        if not row.fits:
            assert row[3:] == (None,) * 5
            with pytest.raises(minidnn.DoesNotFit):
                layup.plan(graph, row.memory_bytes, row.policy, device=None, profile="k40")
            continue
        profile = layup.compile(graph, row.memory_bytes, row.policy, device=None, profile="k40").profile
        assert (row.peak_bytes, row.reserved_bytes, row.host_bytes, row.step_seconds) == (
            profile.peak_bytes, profile.reserved_bytes, profile.host_bytes, profile.step_seconds,
        )  # fmt: skip
        assert row.reserved_bytes is not None and row.reserved_bytes <= row.memory_bytes


def test_auto_fits_down_to_the_minimum_and_is_never_slower(comparison: layup.report.Comparison) -> None:
    auto = {row.memory_bytes: row for row in comparison.rows if row.policy == "auto"}
    for row in comparison.rows:
        best = auto[row.memory_bytes]
        assert best.fits == (row.memory_bytes >= comparison.minimum_bytes)
        if row.fits:
            assert best.step_seconds is not None and row.step_seconds is not None
            assert best.step_seconds <= row.step_seconds
    assert comparison.minimum_bytes in auto and comparison.keep_bytes in auto


def test_a_comparison_as_text_names_what_fits_and_what_does_not(comparison: layup.report.Comparison) -> None:
    text = layup.report.comparison_text(comparison)
    assert text.count("budget ") == len({row.memory_bytes for row in comparison.rows})
    assert "(100.0 % of keep)" in text and text.count("the smallest that runs") == 1
    assert "does not fit: naive" in text
