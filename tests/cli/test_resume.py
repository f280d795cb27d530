"""A run that is interrupted and resumed ends in the same bits as one that is not (D3, D4, D5, E1 to E5)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minidnn.checkpoint import Checkpoint
from minidnn.screen import Progress as Bar
from tests.cli.running import (
    LENET,
    TINY,
    Done,
    Script,
    assert_same_bits,
    checked,
    environment,
    records,
    refused,
    tensors,
)

OPTIMIZERS = {
    "sgd": ("--opt", "sgd", "--momentum", "0"),
    "momentum": ("--opt", "sgd"),
    "nesterov": ("--opt", "nesterov"),
    "adam": ("--opt", "adam"),
}
RATES = ("--epochs", "3", "--lr", "0.05", "--lr-sched", "cosine", "--warmup", "1", "-p", "1")


@pytest.fixture
def interrupt_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ctrl-C is pressed when so many batches have been trained on in this process; an empty list: never."""
    wanted: list[int] = []
    done = 0
    advance = Bar.advance

    def counted(self: Bar) -> None:
        nonlocal done
        done += 1
        if wanted and done == wanted[0]:
            os.kill(os.getpid(), signal.SIGINT)
        advance(self)

    monkeypatch.setattr(Bar, "advance", counted)
    return wanted


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_interrupted_run_goes_on_bit_for_bit(
    script: Script, tmp_path: Path, interrupt_at: list[int], optimizer: str
) -> None:
    """Weights, statistics, optimizer state, and every loss and rate logged, with dropout, augmentation and a tail (E2, E4)."""
    options = (*TINY, *OPTIMIZERS[optimizer], *RATES)
    assert script("train", *options, "--output", "straight").code == 0
    interrupt_at.append(18 + 9)  # the third batch of the second epoch
    done = script("train", *options, "--output", "parts")
    assert done.code == 130 and "interrupted in epoch 1 after batch 3 of 6" in done.out
    assert script("train", "--resume", "auto", "--output", "parts", "-p", "1").code == 0
    assert_same_bits(tmp_path / "straight", tmp_path / "parts")
    for kind, keys in (
        ("step", ("step", "epoch", "batch", "loss", "lr")),
        ("epoch", ("step", "train_loss", "acc1", "lr")),
    ):
        assert records(tmp_path / "straight", kind, *keys) == records(tmp_path / "parts", kind, *keys)


def test_a_run_restarted_at_every_epoch_is_the_straight_run(script: Script, tmp_path: Path) -> None:
    """E3: each epoch has its own order, whatever process it is trained in."""
    assert script("train", *TINY, *RATES, "--output", "straight").code == 0
    for steps in ("6", "12", "18"):
        assert script("train", *TINY, *RATES, "--output", "parts", "--resume", "auto", "--max-steps", steps).code == 0
    assert_same_bits(tmp_path / "straight", tmp_path / "parts")


def test_an_accumulation_group_is_finished_before_a_run_stops(
    script: Script, tmp_path: Path, interrupt_at: list[int]
) -> None:
    options = (*TINY, *RATES, "--accum", "4")
    assert script("train", *options, "--output", "straight").code == 0
    interrupt_at.append(18 + 2)
    assert "after batch 4 of 6" in script("train", *options, "--output", "parts").out
    assert script("train", "--resume", "parts/last.safetensors").code == 0
    assert_same_bits(tmp_path / "straight", tmp_path / "parts")


def test_a_run_saved_under_one_plan_goes_on_under_another(script: Script, tmp_path: Path) -> None:
    """D5: the format of the state does not depend on where values live."""
    assert script("train", *TINY, *RATES, "--output", "straight").code == 0
    script("train", *TINY, *RATES, "--output", "parts", "--policy", "naive", "--max-steps", "8")
    done = script("train", "--resume", "auto", "--output", "parts", "--policy", "keep", "--allocator", "pool")
    assert done.code == 0 and "notice" not in done.out
    assert_same_bits(tmp_path / "straight", tmp_path / "parts")


@pytest.mark.parametrize("optimizer, slots", [("nesterov", ["momentum"]), ("adam", ["exp_avg", "exp_avg_sq"])])
def test_a_checkpoint_lists_the_optimizer_state_of_every_parameter(
    script: Script, tmp_path: Path, optimizer: str, slots: list[str]
) -> None:
    """D4."""
    script("train", *TINY, "--opt", optimizer, "--max-steps", "2", "--output", "run")
    found = tensors(tmp_path / "run")
    trained = {
        "conv1.weight",
        "bn1.weight",
        "bn1.bias",
        "conv2.weight",
        "bn2.weight",
        "bn2.bias",
        "fc.weight",
        "fc.bias",
    }
    expected = {f"optimizer.{slot}.{name}" for slot in slots for name in trained}
    assert {name for name in found if name.startswith("optimizer.")} == expected | {
        "optimizer.step",
        "optimizer.updates",
    }
    assert int(found["optimizer.step"]) == 2
    assert all(found[name].any() for name in expected)


def test_more_epochs_on_resume_say_what_becomes_of_the_rate(script: Script) -> None:
    """E5: allowed, with one line that names the old and the new rate."""
    options = (*TINY, "--lr", "0.1", "--lr-sched", "cosine")
    script("train", *options, "--epochs", "2", "--output", "run", "--max-steps", "6")
    done = script("train", "--resume", "run/last.safetensors", "--epochs", "4", "--max-steps", "7")
    assert done.code == 0
    (notice,) = [line for line in done.out.splitlines() if line.startswith("notice")]
    assert notice == "notice: --epochs 2 -> 4: the learning rate of the next update is 0.05 -> 0.0853553"


def test_a_budget_that_a_resumed_run_does_not_keep_is_said(script: Script) -> None:
    script("train", *TINY, "--memory", "1GiB", "--output", "run", "--max-steps", "3")
    again = script("train", "--resume", "auto", "--output", "run", "--memory", "2GiB", "--max-steps", "4")
    assert "notice" not in again.out
    done = script("train", "--resume", "auto", "--output", "run", "--max-steps", "5")
    assert done.code == 0 and "notice: the run so far had --memory 2GiB" in done.out


def test_no_notice_where_nothing_changed(script: Script) -> None:
    script("train", *TINY, "--epochs", "2", "--output", "run", "--max-steps", "3")
    assert "notice" not in script("train", "--resume", "run/last.safetensors").out


def test_what_a_killed_save_left_is_never_resumed_from_and_goes_at_the_next_save(
    script: Script, tmp_path: Path
) -> None:
    """E1."""
    script("train", *TINY, "--epochs", "2", "--output", "run", "--max-steps", "3")
    stale = tmp_path / "run" / "last.safetensors.1.writing"
    stale.mkdir()
    (stale / "last.safetensors").write_bytes(b"half a checkpoint")
    assert script("train", "--resume", "auto", "--output", "run").code == 0
    assert not stale.exists()


def test_records_of_a_killed_run_after_its_checkpoint_are_not_kept_twice(script: Script, tmp_path: Path) -> None:
    script("train", *TINY, "--epochs", "2", "--output", "run", "--max-steps", "4", "-p", "1")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"kind": "step", "step": 5, "loss": 9.0}) + "\n" + '{"kind": "st')
    script("train", "--resume", "auto", "--output", "run", "-p", "1")
    assert [step for (step,) in records(tmp_path / "run", "step", "step")] == list(range(1, 13))


def test_resume_auto_without_a_checkpoint_begins_at_the_beginning(script: Script, tmp_path: Path) -> None:
    """The same command can be given again and again."""
    command = ("train", *TINY, "--epochs", "1", "--resume", "auto", "--output", "run")
    first, second = script(*command), script(*command)
    assert first.code == second.code == 0
    assert "beginning at the beginning" in first.out and "nothing is left to train" in second.out


@pytest.mark.parametrize(
    "change", [("-b", "16"), ("--seed", "1"), ("--opt", "adam"), ("-a", "lenet"), ("--accum", "2")]
)
def test_options_that_would_make_another_run_are_refused_on_resume(
    script: Script, tmp_path: Path, change: tuple[str, str]
) -> None:
    script("train", *TINY, "--epochs", "2", "--output", "run", "--max-steps", "3")
    before = (tmp_path / "run" / "last.safetensors").read_bytes()
    refused(script("train", "--resume", "auto", "--output", "run", *change), change[1], "checkpoint was trained with")
    assert (tmp_path / "run" / "last.safetensors").read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="no signals between processes here")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_process_saves_and_exits_with_130(root: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = [
        sys.executable,
        str(root / "scripts" / "train.py"),
        *LENET,
        "--epochs",
        "1000",
        "-p",
        "1",
        "--output",
        "run",
    ]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(root), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        while "Epoch" not in running.stdout.readline():
            assert running.poll() is None
        running.send_signal(number)
        asked = time.monotonic()
        out, err = running.stdout.read(), running.stderr.read()
        assert running.wait(timeout=60) == 130
    assert time.monotonic() - asked < 10
    checked(Done(130, out, err))
    assert err == "" and "go on with --resume run/last.safetensors" in out
    with Checkpoint(tmp_path / "run" / "last.safetensors") as checkpoint:
        assert checkpoint.metadata.progress.steps > 0


@pytest.mark.skipif(os.name != "posix", reason="no signals between processes here")
def test_a_second_signal_ends_the_process_at_once(root: Path) -> None:
    code = (
        "import os, signal\n"
        "from minidnn.interruption import Interruption\n"
        "with Interruption() as interruption:\n"
        "    for _ in range(2):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        print(interruption.asked, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(root), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "True\n", "")
