"""README.md: its commands, its example and its numbers are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.running import Script


@pytest.fixture
def readme(root: Path) -> str:
    return (root / "README.md").read_text(encoding="utf-8")


def first_command(readme: str) -> list[str]:
    (line,) = re.findall(r'^python -m pip install -e "\.\[demo\]" && python scripts/train.py (.*)$', readme, re.M)
    return shlex.split(line)


def test_the_table_is_what_the_first_command_predicts(script: Script, readme: str) -> None:
    done = script("train", *first_command(readme), "--dry-run")
    assert done.code == 0
    for row in ("naive", "keep", "predicted"):
        (shown,) = re.findall(rf"^{row} .*$", readme, re.M)
        (printed,) = re.findall(rf"^{row} .*$", done.out, re.M)
        assert shown.split() == printed.split()


def test_the_first_command_has_a_budget_that_naive_would_not_fit(script: Script, readme: str) -> None:
    assert "--memory" in first_command(readme)
    done = script("train", *first_command(readme), "--policy", "naive", "--dry-run")
    assert done.code == 2 and "no plan of policy naive fits" in done.err
    done = script("train", *first_command(readme), "--policy", "keep", "--dry-run")
    assert done.code == 2 and "no plan of policy keep fits" in done.err


def test_the_first_command_names_layers_that_it_offloads_and_recomputes(script: Script, readme: str) -> None:
    done = script("train", *first_command(readme), "--dry-run")
    for what in ("offloaded", "recomputed"):
        (shown,) = re.findall(rf"^(\d+ layers {what}, such as \S+) ", readme, re.M)
        (printed,) = re.findall(rf"^(\d+ layers {what}, such as \S+) ", done.out, re.M)
        assert shown == printed


def test_the_example_runs(readme: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    exec(compile(code, "README.md", "exec"), {})
    assert "BACKWARD_WEIGHT" in capsys.readouterr().out


def test_continuous_integration_runs_both_commands_word_for_word(root: Path, readme: str) -> None:
    (pattern,) = re.findall(r"grep -E '(.*)' README.md", (root / ".ci" / "run").read_text(encoding="utf-8"))
    assert re.findall(pattern, readme, re.M) == ["demo", "test"]


def test_every_link_of_a_document_leads_somewhere(root: Path) -> None:
    documents = [root / "README.md", *sorted((root / "docs").glob("*.md")), *sorted(root.glob("scripts/*/README.md"))]
    for document in documents:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), (document.name, target)


def test_every_path_it_names_exists(root: Path, readme: str) -> None:
    for path in re.findall(r"`((?:minidnn|layup|models|scripts|docs)/[\w/.]*)", readme):
        assert (root / path).exists(), path
