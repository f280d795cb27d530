"""staleness.py compares what it says it compares, several runs at a time find what they find alone, and nothing that was found
is lost when it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import models
from minidnn.data import load
from minidnn.errors import UserError
from tests.cli.running import environment, tiny

REPRODUCE = Path(__file__).resolve().parents[2] / "scripts" / "reproduce"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``script("staleness_jobs")``: a module of the folder; processes that tests start find it, too."""
    monkeypatch.syspath_prepend(str(REPRODUCE))
    monkeypatch.setitem(models.MODELS, "tiny", models.Model(tiny, 8))
    return import_module


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of IDX files: 120 training images of 8 x 8, 20 test images."""
    return write_idx(tmp_path / "images", 8)


def write_idx(folder: Path, size: int) -> Path:
    folder.mkdir()
    source = np.random.default_rng(0)
    for name, count in (("train", 120), ("t10k", 20)):
        pixels = source.integers(0, 256, (count, size, size), np.uint8)
        labels = source.integers(0, 10, count).astype(np.uint8)
        head = np.array([0x803, count, size, size], ">u4").tobytes()
        (folder / f"{name}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(np.array([0x801, count], ">u4").tobytes() + labels.tobytes())
    return folder


def test_both_momenta_are_compared_on_a_subset_that_is_one(script: Any, images: Path, tmp_path: Path) -> None:
    staleness = script("staleness")
    part = tmp_path / "part"
    part.mkdir()
    staleness.limit(f"mnist:{images}", 60, part)
    whole, less = load(f"mnist:{images}"), load(f"mnist:{part}")
    assert (len(less.train), len(less.test)) == (60, 10)
    np.testing.assert_array_equal(less.train.images, whole.train.images[:60])
    np.testing.assert_array_equal(less.test.labels, whole.test.labels[:10])
    out = tmp_path / "staleness.json"
    options = ["--tiny", "--data", f"fashion_mnist:{images}", "--train-limit", "60", "-b", "20", "--nets", "tiny"]
    assert staleness.main([*options, "--json", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["momentum"] for row in found["rows"]] == ["heavy-ball", "nesterov"] and found["missing"] == []
    for row in found["rows"]:
        at = {what: row[what] for what in ("delay_0", "delay_1", "delay_1_own_rate")}
        assert all(entry["rate"] == pytest.approx(0.01) and entry["diverged"] == 0 for entry in at.values())
        assert at["delay_1"]["points"] == pytest.approx(100 * (at["delay_1"]["mean_acc1"] - at["delay_0"]["mean_acc1"]))
        assert all(len(entry["by_epoch"]) == len(entry["seconds_by_epoch"]) == 1 for entry in at.values())


def result(accuracy: float | None, seconds: float = 2.0, alone: bool = True) -> dict[str, Any]:
    """Of a run of two epochs; None: it diverged in the first."""
    if accuracy is None:
        return {"acc1": [], "seconds": [], "diverged": "x", "alone": alone}
    return {"acc1": [accuracy / 2, accuracy], "seconds": [seconds / 2, seconds], "alone": alone}


ACCURACY = {(0, 0.01): 0.90, (0, 0.02): 0.95, (0, 0.04): 0.93, (1, 0.01): 0.91, (1, 0.02): 0.80, (1, 0.04): None}


def test_an_own_rate_is_chosen_and_divergence_is_told(script: Any) -> None:
    """The sweep without delay decides the common rate; the delayed run also gets the rate at which it does best itself."""
    study_of, runs = script("staleness_study"), script("staleness_runs")
    study = study_of.Study({"lenet": sorted({rate for _, rate in ACCURACY})}, seeds=2)
    results = runs.Results({})
    while missing := study.missing(results):  # the runs over the seeds are asked for once the sweeps are done
        for setting in missing:
            shared = setting.momentum == "heavy-ball"
            results.put(setting, result(ACCURACY[setting.delay, setting.rate], 9.0 if shared else 2.0, not shared))
    row = study_of.compare(study, results, "lenet", "nesterov")
    assert (row["tuned_rate"], row["delay_1_own_rate"]["rate"]) == (0.02, 0.01)
    assert row["delay_1"]["points"] == pytest.approx(-15) and not row["delay_1"]["within_target"]
    assert row["delay_1_own_rate"]["points"] == pytest.approx(-4) and row["sweep"][2]["delay_1"] == 0
    said = study_of.table([row])
    assert "| lenet | nesterov | delay 1 | 0.02 | 80.00 ± 0.00 | 0 | −15.00 | no |" in said
    assert "delay 1 own rate: 0.01 is at an end of the sweep" in said and "delay 0: 0.02 is at an end" not in said
    diverging = runs.Setting("lenet", "nesterov", 1, 0.01, 1)
    results.put(diverging, result(None))
    assert study.chosen(results, "lenet", "nesterov")["delay_1_own_rate"] == 0.02, (
        "a rate that another seed does not bear"
    )
    shared = study_of.compare(study, results, "lenet", "heavy-ball")
    assert shared["delay_0"]["seconds_by_epoch"] == [1.0, 2.0]  # not those of runs that shared the machine


def test_runs_that_must_be_alone_come_first_then_the_longest_and_none_after_the_deadline(script: Any) -> None:
    study_of, runs = script("staleness_study"), script("staleness_runs")
    study = study_of.Study({"quick": [0.1], "slow": [0.1]}, seeds=1)
    results = runs.Results({})
    order = study_of.Order(study, results, measures=True, deadline=time.monotonic() + 60)
    for net, seconds in (("quick", 1.0), ("slow", 9.0)):
        for delay in (0, 1):
            setting = order(())
            assert (setting.net, setting.delay) == (net, delay) and setting in order.alone
            assert order((setting,)) is None
            results.put(setting, result(0.5, seconds))
    first = order(())
    second = order((first,))
    assert first != second and first.net == second.net == "slow" and not order.alone & {first, second}
    late = study_of.Order(study, results, measures=True, deadline=time.monotonic())
    assert late(()) is None
    again = study_of.Order(study, results, measures=True, deadline=time.monotonic() + 60)
    assert [setting.net for setting in again.alone] in (["quick", "slow"], ["slow", "quick"])  # to measure engines
    assert not study_of.Order(study, results, measures=False, deadline=0.0).alone


def test_a_command_without_time_says_what_is_missing_and_the_next_one_repeats_nothing(
    script: Any, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    staleness = script("staleness")
    cache, out = tmp_path / "cache.json", tmp_path / "out.json"
    options = ["--tiny", "--data", f"mnist:{images}", "-b", "20", "--nets", "tiny", "--cache", str(cache)]
    assert staleness.main([*options, "--json", str(out), "--seconds", "0"]) == 3
    said = capsys.readouterr()
    assert "| tiny | heavy-ball | delay 0 | missing | missing |" in said.out
    assert "4 runs are missing and those over the seeds: tiny heavy-ball delay 0 lr 0.01 seed 0, " in said.err
    assert len(json.loads(out.read_text(encoding="utf-8"))["missing"]) == 4 and not cache.exists()
    made: list[Any] = []

    def stop_after_two(training: Any, setting: Any) -> dict[str, Any]:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(setting)
        return result(0.5)

    monkeypatch.setattr(staleness, "train_one", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        staleness.main(options)
    monkeypatch.setattr(staleness, "train_one", lambda training, setting: made.append(setting) or result(0.5))
    assert staleness.main(options) == 0
    assert len(made) == len(set(made)) == 4
    with pytest.raises(UserError, match=r"has runs of batch_size 20, now 10: give the same options, or another file"):
        staleness.main([*options, "-b", "10"])


def test_an_interrupted_run_is_no_result(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """train.py ends in order upon Ctrl-C: what it has done until then must not pass for the whole."""
    runs = script("staleness_runs")
    monkeypatch.setattr(runs.train, "main", lambda words: 130)
    training = runs.Training("digits", 1, 0.0, None, 16, "emulated", "fp32", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        runs.train_one(training, runs.Setting("lenet", "nesterov", 0, 0.1, 0))


def double_or_fail(item: int) -> int:
    """Work for the test below. 1 is a user's mistake, 2 ends the process."""
    if item == 1:
        time.sleep(0.3)
        raise UserError("1: this cannot be")
    if item == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)
    return 2 * item


@pytest.mark.parametrize(("bad", "words"), [(1, "1: this cannot be"), (2, "2: its process ended with code -9")])
def test_a_failure_is_named_begins_nothing_more_and_loses_nothing(script: Any, bad: int, words: str) -> None:
    jobs, waiting, found = script("staleness_jobs"), [5, bad, 6], []
    with pytest.raises(UserError, match=words):
        for pair in jobs.carry_out(double_or_fail, lambda under_way: waiting.pop(0) if waiting else None, 2):
            found.append(pair)
    assert found == [(5, 10)] and waiting == [6]


def test_two_jobs_find_what_one_finds_and_leave_no_process_upon_ctrl_c(root: Path, tmp_path: Path) -> None:
    data = write_idx(tmp_path / "large", 28)
    command = [sys.executable, str(REPRODUCE / "staleness.py"), "--tiny", "--data", f"fashion_mnist:{data}", "-b", "20"]
    command += ["--nets", "lenet", "cifar_quick"]  # enough runs that some are left when the signal comes

    def start(jobs: str) -> subprocess.Popen[str]:
        files = ["--cache", str(tmp_path / f"{jobs}.json"), "--jobs", jobs]
        return subprocess.Popen([*command, *files], env=environment(root), stderr=subprocess.PIPE, text=True,
            stdout=subprocess.DEVNULL, start_new_session=True)  # fmt: skip

    with start("2") as process:
        assert process.stderr is not None and "seed 0" in process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        said = process.stderr.read()
    assert process.returncode == 130 and said.splitlines()[-1] == "interrupted" and "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        for _ in range(50):
            os.killpg(process.pid, 0)
            time.sleep(0.1)
    assert len(known(tmp_path / "2.json")) < 8
    for jobs in ("2", "1"):
        with start(jobs) as process:
            process.communicate(timeout=120)
        assert process.returncode == 0
    assert known(tmp_path / "2.json") == known(tmp_path / "1.json") and len(known(tmp_path / "1.json")) == 8


def known(cache: Path) -> dict[str, Any]:
    """Accuracies by run."""
    return {key: run["acc1"] for key, run in json.loads(cache.read_text(encoding="utf-8"))["runs"].items()}
