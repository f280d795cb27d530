"""train.py on several ranks (G1, G2, G3, G4, G6): same steps everywhere, one voice, one file, and one end."""

import json
import signal
from pathlib import Path

import pytest

from tests.cli.running import Script, read, tensors
from tests.parallel.launching import MISSING, NO_TORCH, REASON, ROOT, mpiexec, torchrun

needs_mpi = pytest.mark.skipif(MISSING, reason=REASON)
PROGRAM = ROOT / "tests" / "parallel" / "train_tiny.py"
UNEVEN = ("--data", "synthetic:21,8,8,3,4", "-a", "tiny", "-b", "4", "--augment", "--epochs", "2", "--output", "run")
"""Six steps an epoch; the last of one sample, so that most ranks have no share of it."""


@needs_mpi
def test_uneven_data_end_normally_and_the_file_has_the_accuracy_of_the_log(tmp_path: Path, script: Script) -> None:
    ended = mpiexec(3, PROGRAM, *UNEVEN, "--strategy", "ring_delayed", cwd=tmp_path, timeout=60)
    assert (ended.code, ended.err) == (0, "")
    assert (
        ended.out.count(
            "strategy ring_delayed (steps): updates one step late, which often wants half the --lr; global batch 4, 2/1 a rank"
        )
        == 1
    )
    assert ended.out.count("Epoch: [1]") == 1
    summary = read(tmp_path / "run")
    assert (summary["ranks"], summary["strategy"], summary["steps"], summary["updates"]) == (3, "ring_delayed", 12, 12)
    assert summary["predicted"]["peak_bytes"] == summary["measured"]["peak_bytes"]
    assert read(tmp_path / "run", "args.json")["opt"] == "nesterov"
    logs = [tmp_path / "run" / name for name in ("metrics.jsonl", "metrics.rank1.jsonl", "metrics.rank2.jsonl")]
    losses = [[json.loads(line)["train_loss"] for line in log.read_text().splitlines()] for log in logs]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 2  # the mean over all ranks
    assert f"Acc@1 {summary['acc1']:.2%} " in script("evaluate", "run/last.safetensors").out
    went_on = script("train", "--resume", "run/last.safetensors", "--epochs", "3", "--output", "more")
    assert went_on.code == 0 and read(tmp_path / "more")["steps"] == 18  # on one rank, without a strategy


@needs_mpi
def test_an_interruption_of_one_rank_stops_all_after_the_same_update(tmp_path: Path) -> None:
    ended = mpiexec(2, PROGRAM, "--harm", f"1,2,{int(signal.SIGINT)}", *UNEVEN, "--strategy", "ring", cwd=tmp_path)
    assert ended.code == 130 and "interrupted in epoch 0 after batch 3 of 6: saved" in ended.out
    assert (tmp_path / "run" / "last.safetensors").is_file()


@needs_mpi
@pytest.mark.parametrize("harm", (int(signal.SIGKILL), 0))
def test_a_rank_that_dies_takes_all_with_it(tmp_path: Path, harm: int) -> None:
    ended = mpiexec(2, PROGRAM, "--harm", f"1,2,{harm}", *UNEVEN, "--strategy", "ring", cwd=tmp_path, timeout=60)
    assert ended.code not in (0, 2) and "rank 1" in ended.err
    assert harm or (ended.code, ended.err.count("error: rank 1 failed: MemoryError: no bytes left")) == (5, 1)


@pytest.mark.skipif(NO_TORCH, reason="needs PyTorch, which brings torchrun")
def test_under_torchrun_a_rank_that_dies_takes_all_with_it_and_is_named(tmp_path: Path) -> None:
    ended = torchrun(2, PROGRAM, "--harm", f"1,2,{int(signal.SIGKILL)}", *UNEVEN, "--strategy", "ring", cwd=tmp_path)
    assert ended.out.count("2 ranks by gloo, strategy ring (steps)") == 1
    assert ended.code == 1 and "rank      : 1 (local_rank: 1)" in ended.err and ended.seconds < 60


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ring-warmup", "3"), "--ring-warmup 3 has no effect without --strategy"),
        (("--strategy", "ring", "--ring-warmup", "3"), "a warm-up of 3 updates without delay belongs to ring_delayed"),
        (("--strategy", "rong"), "strategy='rong' is unknown; did you mean ring"),
        (("--strategy", "ring_delayed", "--accum", "2"), "accumulate=2 cannot be combined with ring_delayed"),
        (("--strategy", "ring", "--stream"), "streamed parameters cannot be combined with the strategy ring"),
    ],
)
def test_an_option_that_could_have_no_effect_is_refused(script: Script, options: tuple[str, ...], words: str) -> None:
    done = script("train", *UNEVEN, *options)
    assert done.code == 2 and done.err.startswith(f"error: {words}") and done.err.count("\n") == 1


def test_a_strategy_on_one_rank_trains_like_none_to_the_bit(script: Script, tmp_path: Path) -> None:
    for name, strategy in (("none", ()), ("ring", ("--strategy", "ring"))):
        assert script("train", *UNEVEN[:-1], name, *strategy).code == 0
    ours, theirs = (tensors(tmp_path / name) for name in ("ring", "none"))
    assert {n: a.tobytes() for n, a in ours.items()} == {n: a.tobytes() for n, a in theirs.items()}


@needs_mpi
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--strategy", "ring", "-b", "1"), "error: the global batch of 1 is smaller than the 2 ranks"),
        (("--strategy", "ring", "--device", "cuda:1"), "error: --device cuda:1 on 2 ranks: each takes its own GPU"),
        ((), "error: Open MPI started 2 processes, but there is no --strategy"),
    ],
)
def test_what_does_not_go_together_is_refused_once(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    ended = mpiexec(2, PROGRAM, *UNEVEN, *options, cwd=tmp_path, timeout=60)
    assert ended.code == 2 and ended.err.count("error: ") == ended.err.count(words) == 1
