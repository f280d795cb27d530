"""Running the scripts as a person does: in a process of their own or, ten times faster, by their ``main``."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import models
from minidnn.commandline import run
from tests.cli.running import Done, Script, checked, environment, one_pixel, tiny


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Run a script in this process, in an empty folder, with two more models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(models.MODELS, "tiny", models.Model(tiny, 8))
    monkeypatch.setitem(models.MODELS, "one_pixel", models.Model(one_pixel, 8))

    def call(name: str, *args: str) -> Done:
        module = import_module(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *args])
        capsys.readouterr()
        code = run(module.main, args)
        return checked(Done(code, *capsys.readouterr()))

    return call


@pytest.fixture
def process(root: Path, tmp_path: Path) -> Script:
    """Run a script in a process of its own."""

    def call(name: str, *args: str) -> Done:
        done = subprocess.run(
            [sys.executable, str(root / "scripts" / f"{name}.py"), *args],
            cwd=tmp_path, env=environment(root), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        return checked(Done(done.returncode, done.stdout, done.stderr))

    return call
