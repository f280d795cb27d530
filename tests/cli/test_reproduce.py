"""The reproductions run, look no further than they say, and their figures are those of the planner."""

import json
import math
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import layup
import minidnn
import models
from minidnn.prepare import prepare
from tests.cli.running import refused

SCRIPTS = Path(__file__).parents[2] / "scripts" / "reproduce"
TINY_BUDGET = 140 << 20
MODULES = ("figures", "probes", "walls", "depth", "policies", "ablation", "tradeoff")


@pytest.fixture(autouse=True)
def found(monkeypatch):
    """The scripts are started from their folder, as ``python scripts/reproduce/depth.py`` does."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def rising(knee: int, slope: float, bend: float, noise: list[float]):
    """A load that rises, nearly on a line, and is 1 somewhere about ``knee``; and the n that were asked for."""
    asked = []

    def load(n: int) -> float:
        asked.append(n)
        smooth = 1 + slope * (n - knee) + bend * (math.sqrt(n) - math.sqrt(knee))
        return smooth + slope * noise[n % len(noise)] / 3

    return load, asked


@given(
    knee=st.integers(1, 900),
    slope=st.floats(1e-4, 0.2),
    bend=st.floats(0, 0.05),
    noise=st.lists(st.floats(0, 1), min_size=1, max_size=5),
    start=st.integers(1, 300),
)
def test_the_search_finds_the_greatest_that_fits_and_has_probed_the_next(knee, slope, bend, noise, start):
    load, asked = rising(knee, slope, bend, noise)
    answer = import_module("depth").search(load, 1000, start)
    if load(start) > 1:
        assert answer is None
        return
    assert load(answer) <= 1 and (answer == 1000 or load(answer + 1) > 1)
    assert {answer, answer + 1} - {1001} <= set(asked[:-2])
    assert len(set(asked)) <= 60


def test_on_a_line_the_search_probes_a_handful_of_nets():
    load, asked = rising(790, 5e-4, 0.0, [0.0])
    assert import_module("depth").search(load, 3288) == 790
    assert len(set(asked)) <= 6
    assert import_module("depth").search(lambda n: n / 1e9, 3288) == 3288  # beyond the limit nothing is said


def test_the_arithmetic_is_that_of_the_papers_depth():
    depth = import_module("depth")
    assert (depth.depth(790), depth.depth(788), depth.depth(461), depth.depth(3288)) == (2504, 2498, 1517, 9998)
    assert round(depth.parameters(790) / 1e6, 1) == 922.9
    assert depth.parameters(791) - depth.parameters(790) == 1_117_184
    assert depth.parameters(5) == models.build("resnet", batch=1, image_size=32, blocks=(6, 32, 5, 6)).parameter_count
    budgets = (11441 << 20, 12 << 30)
    found = {(w["kept"], w["reserve_bytes"], w["memory_bytes"]): w["depth"] for w in depth.arithmetic(budgets)}
    expected = {12: (2486, 2684, 2618, 2819), 8: (3716, 4013, 3917, 4214), 4: (7406, 8003, 7811, 8405)}
    for what, per_number in depth.WALLS:
        wanted = expected[per_number]
        cases = [(what, reserve, memory) for reserve in (10**9, 4 * 10**8) for memory in budgets]
        assert [found[case] for case in cases] == list(wanted)
    checkpointed = [at for (what, _, _), at in found.items() if "checkpoints" in what]
    assert sorted(checkpointed) == [2327, 2516, 3392, 3668, 6380, 6917]


def test_depth_is_where_the_planner_stops(script, tmp_path):
    options = ("--tiny", "--policies", "keep,vdnn", "--cache", "probes.json", "--json", "depth.json")
    done = script("depth", *options)
    assert done.code == 0, done.err
    result = json.loads((tmp_path / "depth.json").read_text())
    assert result["command"].startswith("python scripts/reproduce/depth.py --tiny") and result["versions"]
    assert {entry["depth"] for entry in result["published"]} == {1517, 1920, 2504}

    def least(n3: int, policy: str) -> int:
        graph = models.build("resnet", batch=16, image_size=32, blocks=(1, 1, n3, 1))
        return layup.minimum_memory(graph, policy, device=None, profile="k40")

    by_policy = {row["policy"]: row for row in result["rows"]}
    for policy, row in by_policy.items():
        assert row["depth"] == 3 * (3 + row["n3"]) + 2 and row["memory_bytes"] == TINY_BUDGET
        assert least(row["n3"], policy) == row["reserved_bytes"] <= TINY_BUDGET
        assert row["at_limit"] or TINY_BUDGET < row["needs_bytes"] <= least(row["n3"] + 1, policy)
    assert by_policy["vdnn"]["n3"] > by_policy["keep"]["n3"]
    # what is remembered says the same
    assert script("depth", *options).out == done.out


@pytest.mark.parametrize("option", ["--stream", "--whole-gradients"])
def test_where_parameters_and_gradients_live_decides_the_depth(option, script, tmp_path):
    common = ("depth", "--tiny", "--policies", "keep")
    script(*common, "--json", "plain.json")
    assert script(*common, option, "--json", "other.json").code == 0
    plain, other = (json.loads((tmp_path / f"{n}.json").read_text())["rows"][0] for n in ("plain", "other"))
    if option == "--stream":
        assert other["n3"] > plain["n3"] and other["host_bytes"] > plain["host_bytes"]
    else:
        assert other["n3"] is None or other["n3"] < plain["n3"]


def test_policies_are_compared_with_keep_of_the_same_net(script, tmp_path):
    done = script("policies", "--tiny", "--nets", "lenet:8", "--json", "p.json")
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "p.json").read_text())["rows"]
    assert {row["policy"] for row in rows} == set(layup.policies.POLICIES)
    keep = next(row for row in rows if row["policy"] == "keep")
    assert (keep["share_of_keep"], keep["over_keep"], keep["recomputed_share"]) == (1, 0, 0)
    graph = models.build("lenet", batch=8)
    for row in rows:
        if row["reserved_bytes"] is None:
            assert row["policy"] == "auto" and row["setting"] != "fewest bytes"
            continue
        assert 0 < row["average_bytes"] <= row["peak_bytes"] <= row["reserved_bytes"]
        assert row["over_keep"] == pytest.approx(row["step_seconds"] / keep["step_seconds"] - 1)
        if row["setting"] == "fewest bytes":
            assert row["reserved_bytes"] == layup.minimum_memory(graph, row["policy"], device=None, profile="k40")
    vdnn = next(row for row in rows if row["policy"] == "vdnn")
    assert vdnn["host_bytes"] > keep["host_bytes"] and vdnn["average_bytes"] < keep["average_bytes"]


def test_the_average_is_weighed_by_time():
    policies = import_module("policies")
    context = layup.Context(prepare(models.build("lenet", batch=64), device=None, profile="k40"))
    schedule = layup.Planner(context).keep.train
    average = policies.average_bytes(context, schedule)
    assert context.base_bytes < average < schedule.profile.peak_bytes


def test_an_ablation_says_what_each_switch_saves(script, tmp_path):
    assert script("ablation", "--tiny", "--json", "a.json").code == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    keep, naive = (next(row for row in rows if row["setting"] == name) for name in ("keep", "naive"))
    ablation = sys.modules["ablation"]
    assert {row["technique"] for row in rows} == {"", *ablation.SWITCHES}
    graph = models.build("lenet", batch=8)
    for setting, base, sign in (("off alone", keep, 1), ("on alone", naive, -1)):
        chosen = [row for row in rows if row["setting"] == setting]
        assert [row["technique"] for row in chosen] == list(ablation.SWITCHES)
        for row in chosen:
            switches = {name: sign < 0 for name in ablation.SWITCHES} | {row["technique"]: sign > 0}
            reuse = minidnn.Reuse(**{name: not on for name, on in switches.items()})
            profile = minidnn.compile(graph, minidnn.Plan(reuse=reuse), device=None).profile
            assert row["reserved_bytes"] == profile.reserved_bytes
            assert row["saves_bytes"] == sign * (row["reserved_bytes"] - base["reserved_bytes"])
    window = {row["technique"]: row["gradient_window"] for row in rows if row["setting"] == "off alone"}
    assert keep["gradient_window"] == 2 and window["gradient_window"] > 2  # a chain
    assert {window[name] for name in ablation.SWITCHES if name != "gradient_window"} == {2}


def test_the_bars_are_measured_with_the_time_of_planning(script, tmp_path):
    done = script("tradeoff", "--tiny", "--json", "t.json")
    assert done.code == 0, done.err
    half, streamed = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert half["fits"] and half["precision"] == "fp16" and half["over_compute"] >= 0
    assert streamed["fits"] and streamed["streamed"] and streamed["host_bytes"] > 8 * streamed["parameters"]
    assert streamed["plan_wall_seconds"] > 0 and streamed["plan_cpu_seconds"] > 0
    assert len(re.findall(r"^\| (half|streamed) ", done.out, re.MULTILINE)) == 2


def test_a_tiny_run_publishes_nothing_and_mistakes_are_one_line(script):
    results = sys.modules["figures"].RESULTS if "figures" in sys.modules else import_module("figures").RESULTS
    before = {path: path.stat().st_mtime_ns for path in results.glob("*.json")}
    assert "written" not in script("ablation", "--tiny").out
    assert {path: path.stat().st_mtime_ns for path in results.glob("*.json")} == before
    refused(script("depth", "--tiny", "--policies", "layupp"), "layupp", "layup")
    refused(script("policies", "--tiny", "--nets", "vgg16"), "vgg16", "vgg16:256")
    refused(script("depth", "--memory", "12Gb2"), "12Gb2")


def test_the_page_has_a_row_for_every_policy_and_a_command_for_every_script(root):
    page = (root / "docs" / "reproduce.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", page, re.MULTILINE)
    assert {name for name, _ in rows} == set(layup.policies.POLICIES)
    assert all(cells.count("|") == 3 for _, cells in rows)
    for name in ("depth", "policies", "ablation", "tradeoff"):
        assert f"python scripts/reproduce/{name}.py" in page
