"""The rows of two small nets, word for word: any change of lowering, placement or waits shows up as a diff to be read."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

import minidnn
from minidnn.schedule.plan import Decision, Plan
from tests.step import nets

PLANS = {"keep": minidnn.keep, "naive": minidnn.naive}
GOLDEN = Path(__file__).parents[1] / "golden" / "schedules"
UPDATE = "python -m pytest tests/step/test_schedules.py --update-golden"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("net", ["chain", "residual"])
def test_the_training_rows_are_the_golden_ones(net: str, plan: str, pytestconfig: pytest.Config) -> None:
    step = minidnn.compile(nets.NETS[net](), PLANS[plan](), nets.MOMENTUM, device=None)
    profile = step.program["train"].profile
    text = (
        f"{step.program['train'].dump()}\n"
        f"peak {profile.peak_bytes} B at {profile.peak_text}, reserved {profile.reserved_bytes} B, host {profile.host_bytes} B\n"
    )
    path = GOLDEN / f"{net}_{plan}.txt"
    if pytestconfig.getoption("--update-golden", default=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    golden = path.read_text(encoding="utf-8") if path.exists() else ""
    if text != golden:
        diff = difflib.unified_diff(golden.splitlines(), text.splitlines(), path.name, "now", n=0, lineterm="")
        pytest.fail(f"the rows differ; if that is what you meant: {UPDATE}\n" + "\n".join(diff), pytrace=False)


def test_a_layer_that_is_overwritten_in_place_is_explained_by_the_decision_about_what_overwrites_it() -> None:
    plan = Plan({"unit0.relu1": Decision.OFFLOAD, "unit0.add": Decision.RECOMPUTE, "unit0.relu2": Decision.RECOMPUTE})
    text = minidnn.compile(nets.residual(), plan, nets.MOMENTUM, device=None).explain()
    told = {line.split()[0]: line.split()[2] for line in text.splitlines() if len(line.split()) > 4}
    assert told["unit0.bn1"] == told["unit0.relu1"] == "offload"
    assert told["unit0.relu2"] == "recompute" and told["unit0.conv1"] == told["fc"] == "keep"
