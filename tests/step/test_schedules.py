"""The rows of two small nets, word for word: any change of lowering, placement or waits shows up as a diff to be read."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

import minidnn
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
