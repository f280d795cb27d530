"""A checkpoint is whole or not there, whatever happens during a save (E1, bad input of the command line)."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from minidnn import checkpoint
from minidnn.checkpoint import BEST, LAST, Checkpoint, Metadata, Progress, newest, save
from minidnn.errors import UserError

TENSORS = {
    "conv1.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2),
    "bn1.num_batches_tracked": np.array(7, np.int64),
    "optimizer.momentum.conv1.weight": np.full((2, 3, 2, 2), 0.5, np.float32),
    "optimizer.step": np.array(7, np.int64),
}
METADATA = Metadata(
    Progress(epoch=2, batch=3, steps=7, best_acc1=0.5), seed=4, args={"arch": "lenet"}, recipe_hash="ab"
)


def test_a_checkpoint_gives_back_bits_and_progress(tmp_path: Path) -> None:
    save(tmp_path / LAST, TENSORS, METADATA)
    with Checkpoint(tmp_path / LAST) as loaded:
        assert loaded.metadata == METADATA
        assert dict(loaded).keys() == TENSORS.keys()
        for name, expected in TENSORS.items():
            assert loaded[name].dtype == expected.dtype and loaded[name].shape == expected.shape
            assert np.array_equal(loaded[name], expected)
        assert set(loaded.weights()) == {"conv1.weight", "bn1.num_batches_tracked"}
        assert set(loaded.optimizer()) == {"optimizer.momentum.conv1.weight", "optimizer.step"}
        with pytest.raises(KeyError):
            loaded.weights()["optimizer.step"]


def test_a_view_is_saved_by_its_values_not_by_the_bytes_it_lies_in(tmp_path: Path) -> None:
    view = np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2).transpose(0, 2, 3, 1)
    save(tmp_path / LAST, {"w": view, "half": view[::2]}, METADATA)
    with Checkpoint(tmp_path / LAST) as loaded:
        assert np.array_equal(loaded["w"], view) and np.array_equal(loaded["half"], view[::2])


def _fail(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("place", ["save_file", "_flush", "os.replace"])
def test_a_full_disk_leaves_the_previous_checkpoint_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    save(tmp_path / LAST, TENSORS, METADATA)
    before = (tmp_path / LAST).read_bytes()
    monkeypatch.setattr(f"minidnn.checkpoint.{place}", _fail)
    with pytest.raises(UserError, match=r"No space left on device.*previous checkpoint is intact") as error:
        save(tmp_path / LAST, {"w": np.zeros(3)}, METADATA)
    assert "\n" not in str(error.value)
    assert (tmp_path / LAST).read_bytes() == before
    assert os.listdir(tmp_path) == [LAST]


LIMITED = """
import resource, signal, sys, numpy as np
from pathlib import Path
from minidnn import checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
checkpoint.save(Path(sys.argv[1]), {"w": np.ones(100_000, np.float32)}, checkpoint.Metadata())
"""
KILLED = """
import os, signal, sys, numpy as np
from pathlib import Path
from minidnn import checkpoint
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
PATCH = die
checkpoint.save(Path(sys.argv[1]), {"w": np.ones(1000, np.float32)}, checkpoint.Metadata())
"""


def python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(path)]
    return subprocess.run(
        command, cwd=Path(__file__).parents[2], timeout=60, check=False, capture_output=True, text=True
    )


@pytest.mark.skipif(os.name != "posix", reason="no limit of the size of files here")
def test_a_file_that_can_be_written_only_in_part_is_never_renamed_over_a_good_one(tmp_path: Path) -> None:
    save(tmp_path / LAST, TENSORS, METADATA)
    before = (tmp_path / LAST).read_bytes()
    done = python(LIMITED, tmp_path / LAST)
    assert "UserError" in done.stderr and "File too large" in done.stderr
    assert (tmp_path / LAST).read_bytes() == before
    assert os.listdir(tmp_path) == [LAST]


@pytest.mark.skipif(os.name != "posix", reason="no permission bits here")
def test_a_checkpoint_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    save(tmp_path / LAST, TENSORS, METADATA)
    (tmp_path / "other").touch()
    assert (tmp_path / LAST).stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.parametrize("patch", ["checkpoint._flush", "checkpoint.os.replace"])
def test_a_kill_during_a_save_leaves_the_previous_checkpoint(tmp_path: Path, patch: str) -> None:
    """E1: what the killed process left is not a checkpoint, and the next save removes it."""
    save(tmp_path / LAST, TENSORS, METADATA)
    before = (tmp_path / LAST).read_bytes()
    done = python(KILLED.replace("PATCH", patch), tmp_path / LAST)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / LAST).read_bytes() == before
    (stale,) = set(os.listdir(tmp_path)) - {LAST}
    assert newest(tmp_path) == tmp_path / LAST
    save(tmp_path / BEST, TENSORS, METADATA)
    assert stale not in os.listdir(tmp_path)


def test_the_newest_checkpoint_is_the_one_with_most_steps(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    (tmp_path / f"{LAST}.12.writing").mkdir()
    assert newest(tmp_path) is None
    save(tmp_path / BEST, TENSORS, Metadata(Progress(steps=9)))
    assert newest(tmp_path) == tmp_path / BEST
    save(tmp_path / LAST, TENSORS, Metadata(Progress(steps=9)))
    assert newest(tmp_path) == tmp_path / LAST
    save(tmp_path / LAST, TENSORS, Metadata(Progress(steps=3)))
    assert newest(tmp_path) == tmp_path / BEST


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _text(path: Path) -> None:
    path.write_text("not tensors at all")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [_cut, _text, _empty, Path.unlink])
def test_a_wrong_file_is_one_sentence_with_its_path(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save(tmp_path / LAST, TENSORS, METADATA)
    damage(tmp_path / LAST)
    with pytest.raises(UserError) as error:
        Checkpoint(tmp_path / LAST)
    assert str(tmp_path / LAST) in str(error.value) and "\n" not in str(error.value)


def test_published_weights_open_but_cannot_be_resumed_from(tmp_path: Path) -> None:
    checkpoint.save_file({"w": np.ones(3, np.float32)}, tmp_path / "weights.safetensors")
    with Checkpoint(tmp_path / "weights.safetensors") as loaded:
        assert np.array_equal(loaded.weights()["w"], np.ones(3))
        with pytest.raises(UserError, match="--weights"):
            _ = loaded.metadata


def test_a_newer_format_is_refused_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minidnn.checkpoint.FORMAT_VERSION", 99)
    save(tmp_path / LAST, TENSORS, METADATA)
    monkeypatch.undo()
    with Checkpoint(tmp_path / LAST) as loaded, pytest.raises(UserError, match="99"):
        _ = loaded.metadata
