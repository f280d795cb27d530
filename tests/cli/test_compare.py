"""compare.py and report.py as a person runs them: tables, files, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layup.policies import POLICIES
from layup.report import read_data
from tests.cli.running import TINY, Script, read, refused

KEYS = [
    "policy",
    "memory_bytes",
    "fits",
    "peak_bytes",
    "reserved_bytes",
    "host_bytes",
    "step_seconds",
    "recompute_flops",
]
NET = ("--data", "synthetic:16,16,16,3,4", "-a", "tiny", "-b", "16")


def rows_of(path: str) -> list[dict[str, Any]]:
    data = json.loads(Path(path).read_text())
    assert list(data) == ["rows", "machine", "versions", "seed", "command"]
    rows: list[dict[str, Any]] = data["rows"]
    return rows


def test_all_policies_are_compared_at_several_budgets_and_the_minimum(script: Script) -> None:
    done = script("compare", *NET, "--profile", "v100", "--json", "rows.json")
    assert done.code == 0 and "NVIDIA" in done.out and "does not fit: naive" in done.out
    rows = rows_of("rows.json")
    assert all(list(row) == KEYS for row in rows)
    budgets = sorted({row["memory_bytes"] for row in rows}, reverse=True)
    assert len(rows) == len(budgets) * len(POLICIES) and {row["policy"] for row in rows} == set(POLICIES)
    for row in rows:
        assert row["fits"] == (row["reserved_bytes"] is not None)
        assert all((row[key] is None) != row["fits"] for key in KEYS[3:])
    keep = next(row["reserved_bytes"] for row in rows if row["policy"] == "keep" and row["fits"])
    minimum = min(row["reserved_bytes"] for row in rows if row["fits"])
    assert max(budgets) == keep and min(budgets) == minimum and len(budgets) >= 4
    assert all(any(row["fits"] for row in rows if row["memory_bytes"] == budget) for budget in budgets)


def test_budgets_and_policies_can_be_chosen(script: Script) -> None:
    script("compare", *NET, "--budgets", "100%,1GiB", "--policies", "keep,layup", "--json", "rows.json")
    rows = rows_of("rows.json")
    assert [(row["policy"], row["memory_bytes"] == 2**30) for row in rows] == [
        ("keep", True), ("layup", True), ("keep", False), ("layup", False),
    ]  # fmt: skip
    assert all(row["fits"] for row in rows)


def test_a_host_budget_bounds_every_row(script: Script) -> None:
    script("compare", *NET, "--policies", "vdnn,auto", "--host-memory", "100KiB", "--json", "rows.json")
    rows = rows_of("rows.json")
    assert not any(row["fits"] for row in rows if row["policy"] == "vdnn")
    assert any(row["fits"] for row in rows if row["policy"] == "auto")
    assert all(row["host_bytes"] <= 102400 for row in rows if row["fits"])


def test_without_data_the_net_gets_the_images_it_was_made_for(script: Script) -> None:
    assert "cifar_quick, batch 8, fp32" in script("compare", "-a", "cifar_quick", "-b", "8", "--policies", "keep").out


def test_the_picture_needs_matplotlib_and_says_so_before_it_works(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compare.find_spec", lambda name: None)
    refused(script("compare", *NET, "--png", "x.png"), "--png", "pip install", "[report]")


def test_the_picture_is_drawn(script: Script) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra 'report'")
    assert script("compare", *NET, "--png", "x.png").code == 0
    assert Path("x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (("--policies", "kepp"), ("'kepp'", "keep")),
        (("--budgets", "half"), ("--budgets", "'half'")),
        (("--theta", "0"), ("--theta", "0")),
        (("--profile", "h20"), ("'h20'", "h200")),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(
    script: Script, options: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    refused(script("compare", *NET, *options), *texts)


@pytest.mark.parametrize(("name", "option"), [("compare", "--json"), ("plan", "--json"), ("plan", "--save-plan")])
def test_a_place_that_cannot_be_written_is_named_before_the_work(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, option: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(f"{name}.complete", lambda args: pytest.fail("worked first"))
    refused(script(name, *NET, option, "file/x.json"), f"{option} file/x.json cannot be written", "another place")
    refused(script(name, *NET, option, "."), f"{option} . is a folder")


# -- report.py --------------------------------------------------------------------------------------------------------


def data_of(folder: Path) -> dict[str, Any]:
    return read_data((folder / "report.html").read_text(encoding="utf-8"))


def test_a_report_of_options_has_curve_waterfall_and_trace(script: Script, tmp_path: Path) -> None:
    done = script("report", *NET, "--memory", "96%", "--output", "out")
    assert done.code == 0, done
    data = data_of(tmp_path / "out")
    assert data["title"] == "tiny on synthetic:16,16,16,3,4" and data["plan"]["policy"] == "auto"
    assert data["reserved_bytes"] <= data["memory_bytes"] < data["keep_bytes"]
    assert {row["policy"] for row in data["curve"]["rows"]} == set(POLICIES)
    on_curve = [r for r in data["curve"]["rows"] if r["policy"] == "auto" and r["memory_bytes"] == data["memory_bytes"]]
    assert [row["reserved_bytes"] for row in on_curve] == [data["reserved_bytes"]], "the plan is a point of its curve"
    assert [stage["name"] for stage in data["waterfall"]][:2] == ["naive", "lifetimes"]
    assert any(data["strings"][text] for text in data["bill"]["reason"])
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert (
        max(e["args"]["live"] for e in trace["traceEvents"] if e["name"] == "device bytes")
        == data["views"]["plan"]["peak_bytes"]
    )


def test_what_does_not_fit_is_drawn_all_the_same(script: Script, tmp_path: Path) -> None:
    """T1: the picture is there when it is needed most."""
    refused(script("report", *NET, "--memory", "1KiB", "--curve", "no"), "1024 B", "--memory")
    data = data_of(tmp_path)
    assert data["memory_bytes"] == 1024 < data["reserved_bytes"] and data["curve"] is None


def test_the_report_of_a_run_shows_its_plan_and_what_it_measured(script: Script, tmp_path: Path) -> None:
    assert script("train", *TINY, "--policy", "vdnn", "--max-steps", "2", "--output", "run").code == 0
    (tmp_path / "run" / "report.html").unlink(missing_ok=True)
    assert script("report", "run", "--curve", "no").code == 0
    data, summary = data_of(tmp_path / "run"), read(tmp_path / "run")
    assert data["measured_peak_bytes"] == summary["measured"]["peak_bytes"] == data["peak_bytes"]
    assert data["reserved_bytes"] == summary["predicted"]["reserved_bytes"]
    plan = read(tmp_path / "run", "plan.json")
    assert data["plan"]["decisions"] == plan["decisions"] != {}
    assert data["strings"][data["bill"]["reason"][0]]


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (("nowhere",), ("nowhere", "folder")),
        (("nowhere", "-a", "tiny"), ("nowhere", "not both")),
        ((), ("-a/--arch",)),
    ],
)
def test_a_report_of_nothing_is_refused_in_one_line(
    script: Script, options: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    refused(script("report", *options), *texts)
