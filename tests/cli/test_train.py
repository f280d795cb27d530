"""What a run prints, writes and promises (C1, C2, F9, F13, F14, T5)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import job
from minidnn.defaults import DEFAULTS
from minidnn.errors import VerificationError
from minidnn.step import CompiledStep
from tests.cli.running import LENET, TINY, Done, Script, checked, environment, read, refused, tensors


def test_a_run_folder_holds_what_it_takes_to_repeat_and_to_judge_the_run(script: Script, tmp_path: Path) -> None:
    done = script("train", *TINY, "--epochs", "2", "--output", "run")
    assert done.code == 0 and done.err == ""
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "args.json", "plan.json", "recipe.json", "metrics.jsonl", "summary.json", "trace.json", "last.safetensors",
        "best.safetensors", "report.html",
    }  # fmt: skip
    summary, args = read(tmp_path / "run"), read(tmp_path / "run", "args.json")
    assert (args["lr"], args["opt"], args["batch_size"], args["epochs"]) == (0.1, "nesterov", 8, 2)
    assert summary["predicted"]["peak_bytes"] == summary["measured"]["peak_bytes"]
    assert summary["predicted"].keys() == summary["measured"].keys() == {
        "peak_bytes", "reserved_bytes", "host_bytes", "step_seconds",
    }  # fmt: skip
    assert summary["naive_bytes"] > summary["keep_bytes"] == summary["predicted"]["reserved_bytes"]
    assert 0 <= summary["best_acc1"] <= 1 and summary["steps"] == 12
    assert summary["offloaded_bytes"] == summary["recompute_fraction"] == 0 and summary["outside_bytes"] == 0
    for key in ("images_per_second", "ranks", "seed", "command", "versions", "machine"):
        assert summary[key] is not None
    for nbytes in (summary["naive_bytes"], summary["keep_bytes"], summary["measured"]["peak_bytes"]):
        assert f"{nbytes:,} (" in done.out  # exact, and beside it for people


def test_the_accuracy_of_the_log_is_the_accuracy_of_the_file(script: Script, tmp_path: Path) -> None:
    script("train", *TINY, "--epochs", "2", "--output", "run")
    accuracy = read(tmp_path / "run")["acc1"]
    done = script("train", "-e", "--resume", "run/last.safetensors")
    assert f"Acc@1 {accuracy:.2%} ({round(accuracy * 11)} of 11 test images)" in done.out
    assert f"Acc@1 {accuracy:.2%} " in script("train", *TINY, "-e", "--weights", "run/last.safetensors").out
    done = script("evaluate", "run/last.safetensors", "--json", "accuracy.json", "-b", "3")
    assert done.code == 0 and read(tmp_path, "accuracy.json")["acc1"] == accuracy


def test_the_default_folder_is_the_next_free_one(script: Script, tmp_path: Path) -> None:
    for _ in range(2):
        assert script("train", *TINY, "--max-steps", "1").code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["synthetic-tiny-1", "synthetic-tiny-2"]


def test_a_folder_with_a_checkpoint_is_not_written_over(script: Script, tmp_path: Path) -> None:
    script("train", *TINY, "--max-steps", "1", "--output", "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    refused(script("train", *TINY, "--max-steps", "2", "--output", "run"), "--output run", "--resume auto")
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_plan_without_data_says_what_the_later_run_measures(script: Script, tmp_path: Path) -> None:
    """T5: no device and no data set is touched, and the bytes are those of the run."""
    planned = script("plan", *TINY[:-1], "--json", "plan.json")
    dry = script("train", *TINY, "--dry-run")
    assert planned.code == dry.code == 0
    assert not (tmp_path / "runs").exists()
    run = script("train", *TINY, "--max-steps", "1", "--output", "run")
    summary, plan = read(tmp_path / "run"), read(tmp_path, "plan.json")
    assert {key: plan[key] for key in ("naive_bytes", "keep_bytes", "predicted")} == {
        key: summary[key] for key in ("naive_bytes", "keep_bytes", "predicted")
    }
    assert plan["measured"] is None
    assert "measured" not in planned.out + dry.out and "measured as predicted, to the byte" in run.out
    for row in ("naive", "keep", "predicted"):
        (line,) = {" ".join(x.split()) for x in run.out.splitlines() if x.startswith(row)}
        assert line in " ".join(dry.out.split()) and line in " ".join(planned.out.split())


def test_a_plan_of_a_data_set_that_is_not_there_needs_no_file(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("job.load", lambda *_, **__: pytest.fail("read data"))
    done = script(
        "plan", "--data", "cifar10:nowhere", "-a", "resnet20", "--dump", "--explain", "--save-plan", "plan.json"
    )
    assert done.code == 0 and "BACKWARD_WEIGHT" in done.out
    assert script("plan", "--data", "cifar10:nowhere", "-a", "resnet20", "--plan", "plan.json").code == 0


@pytest.mark.parametrize("policy", ["keep", "auto"])
def test_a_budget_is_kept_or_refused_with_one_that_works(script: Script, tmp_path: Path, policy: str) -> None:
    """C1, C2: the smallest budget runs; a block less is refused before data is read, naming a minimum that runs."""
    found = script("plan", *TINY[:-1], "--policy", policy, "--min-memory")
    least = int(found.out.split(" B (")[0].split()[-1])
    small = (*TINY, "--policy", policy, "--memory")
    for budget in (least - 512, 1024):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("job.load", lambda *_, **__: pytest.fail("read data"))
            done = script("train", *small, str(budget), "--output", "small")
        message = refused(done, f"the smallest reserves {least} B", f"--memory {least}", str(budget))
        assert "conv" in message  # residents by layer
        assert not (tmp_path / "small").exists()
    assert script("train", *small, str(least), "--max-steps", "2", "--output", "run").code == 0
    assert read(tmp_path / "run")["measured"]["reserved_bytes"] <= least
    assert script("plan", *TINY[:-1], "--policy", policy, "--memory", "100%").code == 0
    refused(script("train", *TINY, "--policy", policy, "--host-memory", "1kB"), "pinned host memory")


def test_the_same_bits_under_both_plans(script: Script, tmp_path: Path) -> None:
    for policy in ("naive", "keep"):
        assert script("train", *TINY, "--policy", policy, "--epochs", "1", "--output", policy).code == 0
    one, other = tensors(tmp_path / "naive"), tensors(tmp_path / "keep")
    assert all((one[name] == other[name]).all() for name in one)
    assert (
        read(tmp_path / "naive")["measured"]["reserved_bytes"] > read(tmp_path / "keep")["measured"]["reserved_bytes"]
    )


def test_a_failed_verification_exits_with_3_and_writes_nothing(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(*_: object) -> None:
        raise VerificationError("measured 2 bytes, predicted 1")

    monkeypatch.setattr(CompiledStep, "verify", differ)
    refused(script("train", *TINY, "--output", "run"), "measured 2 bytes", code=3)
    assert not (tmp_path / "run").exists()


def test_a_last_batch_of_one_that_batch_norm_cannot_use_is_left_out_of_training_only(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F9: counted and said; evaluation uses every image."""
    sizes: list[int] = []
    evaluate = CompiledStep.evaluate
    monkeypatch.setattr(CompiledStep, "evaluate", lambda self, x: (sizes.append(len(x)), evaluate(self, x))[1])
    options = ("--data", "synthetic:9,8,8,3,2", "-b", "4", "--epochs", "2")
    done = script("train", *options, "-a", "one_pixel", "--output", "run")
    assert (
        done.code == 0
        and "bn1 sees one value per channel" in done.out
        and "2 batches of one image left out" in done.out
    )
    assert (read(tmp_path / "run")["steps"], read(tmp_path / "run")["dropped_batches"]) == (4, 2)
    assert sizes == [2, 2]
    done = script("train", *options, "-a", "tiny", "--output", "used")  # its maps have 64 values a channel
    assert (read(tmp_path / "used")["steps"], read(tmp_path / "used")["dropped_batches"]) == (6, 0)


def test_data_smaller_than_a_batch_is_one_step_or_refused(script: Script, tmp_path: Path) -> None:
    """F14."""
    options = ("--data", "synthetic:3,8,8,3,2", "-a", "tiny", "-b", "8", "--epochs", "1")
    assert script("train", *options, "--output", "run").code == 0
    assert read(tmp_path / "run")["steps"] == 1
    refused(script("train", *options, "--drop-last", "--output", "none"), "3 samples", "at most 3")
    assert not (tmp_path / "none").exists()


def test_clipping_is_said_acts_and_is_refused_beside_layer_wise_update(script: Script, tmp_path: Path) -> None:
    """D2."""
    for name, clip in (("free", ()), ("clipped", ("--clip-grad-norm", "0.1"))):
        done = script("train", *TINY, *clip, "--max-steps", "3", "--output", name)
        assert done.code == 0 and done.err == ""
        assert ("clip: 0.1" in done.out) == ("layer-wise update off: clipping needs" in done.out) == bool(clip)
    assert tensors(tmp_path / "free")["fc.weight"].tobytes() != tensors(tmp_path / "clipped")["fc.weight"].tobytes()
    done = script("train", "--resume", "clipped/last.safetensors", "--max-steps", "5", "--output", "clipped")
    assert done.code == 0 and "clip: 0.1" in done.out, "a resumed run clips as before"
    plan = tmp_path / "plan.json"
    plan.write_text('{"reuse": {"layerwise_update": true}}')
    clip = ("--clip-grad-norm", "1")
    for command in (("train", *TINY), ("plan", *TINY[:-1])):
        refused(script(*command, *clip, "--plan", str(plan)), "layerwise_update", "clip_grad_norm=1")
        for value in ("0", "-1", "nan", "inf"):
            refused(script(*command, "--clip-grad-norm", value), "--clip-grad-norm", repr(value))
    refused(script("train", *TINY, *clip, "--strategy", "ring"), "clip_grad_norm=1", "strategy ring")


def test_a_loss_that_is_not_finite_ends_the_run_with_advice(script: Script) -> None:
    refused(
        script("train", *TINY, "--opt", "sgd", "--lr", "1e30", "--output", "run"), "the loss became", "--lr below 1e+30"
    )


def test_a_pipe_gets_plain_lines_and_few(process: Script) -> None:
    """F13: no carriage return, no escape, and with 100 batches and --print-freq 50 at most four lines an epoch."""
    done = process(
        "train", "--data", "synthetic:800,16,16,1,4", "-a", "lenet", "-b", "8", "--epochs", "2", "-p", "50",
        "--output", "run",
    )  # fmt: skip
    assert done.code == 0 and done.err == ""
    assert "\r" not in done.out and "\x1b" not in done.out
    for epoch in ("0", "1"):
        assert 1 <= sum(line.startswith(f"Epoch: [{epoch}]") for line in done.out.splitlines()) <= 4


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_gets_a_progress_bar(root: Path, tmp_path: Path) -> None:
    wide = (
        "import fcntl, os, struct, sys, termios; fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack('4H', 24, 99, 0, 0)); "
    )
    train = [sys.executable, str(root / "scripts" / "train.py"), *LENET, "--epochs", "1", "--output", "run"]
    inside = [sys.executable, "-c", wide + f"os.execv(sys.executable, {train!r})"]
    done = subprocess.run(
        [sys.executable, "-c", f"import pty, sys; sys.exit(pty.spawn({inside!r}) >> 8)"],
        cwd=tmp_path, env=environment(root), capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    out = done.stdout.decode()
    checked(Done(done.returncode, out, done.stderr.decode()))
    assert done.returncode == 0 and "\rEpoch: [0]: " in out


def test_workers_change_no_bit(script: Script, tmp_path: Path) -> None:
    for workers in ("0", "3"):
        assert script("train", *TINY, "-j", workers, "--epochs", "1", "--output", workers).code == 0
    one, other = tensors(tmp_path / "0"), tensors(tmp_path / "3")
    assert all((one[name] == other[name]).all() for name in one)


@pytest.mark.parametrize(
    ("device", "ranks", "cores", "threads"),
    [("emulated", 1, 16, 1), (None, 1, 16, 1), ("cuda:0", 1, 16, 4), ("cuda:1", 8, 16, 2), ("cuda:0", 4, 2, 1),
     ("cuda:0", 1, None, 1)],
)  # fmt: skip
def test_a_gpu_is_fed_by_more_threads_as_far_as_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, device: str | None, ranks: int, cores: int | None, threads: int
) -> None:
    monkeypatch.setattr(job.os, "cpu_count", lambda: cores)
    assert job.workers_of(device, ranks) == threads


def test_help_shows_the_defaults_of_every_data_set(process: Script) -> None:
    done = process("train", "--help")
    assert done.code == 0
    for name, defaults in DEFAULTS.items():
        assert any(line.split()[:1] == [name] and f"{defaults.lr:g}" in line for line in done.out.splitlines())


def test_the_scripts_multiply_on_one_thread_whatever_the_number_of_cores(root: Path) -> None:
    """The bits of a matrix product depend on the number of threads, so a run would depend on the machine's other work."""
    pytest.importorskip("threadpoolctl", reason="counts the threads of BLAS")
    code = "import train, threadpoolctl; print({pool['num_threads'] for pool in threadpoolctl.threadpool_info()})"
    free = {name: value for name, value in environment(root).items() if not name.endswith("_NUM_THREADS")}
    free["PYTHONPATH"] = f"{root}{os.pathsep}{root / 'scripts'}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=free, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout in ("{1}\n", "set()\n")
