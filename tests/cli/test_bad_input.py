"""A mistake is one sentence with the value and the remedy, exit code 2, no traceback, and nothing half-written."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.running import TINY, Script, read, refused

MISTAKES = [
    (("--data", "digts", "-a", "tiny"), ["digts", "did you mean digits"]),
    (("--data", "folder:photos", "-a", "tiny"), ["folder:photos"]),
    (("--data", "mnist", "-a", "tiny"), ["mnist:DIR"]),
    (("--data", "mnist:nowhere", "-a", "tiny"), ["nowhere", "not a directory"]),
    (("--data", "cifar10:nowhere", "-a", "tiny"), ["nowhere"]),
    (("--data", "synthetic:8,8,8", "-a", "tiny"), ["synthetic:8,8,8", "N,H,W,C,classes"]),
    (("--data", "synthetic:8,8,9,1,2", "-a", "tiny"), ["8x9", "--image-size"]),
    (("-a", "tiny"), ["--data is missing"]),
    (("--data", "synthetic"), ["--arch is missing"]),
    ((*TINY, "-a", "resnet21"), ["resnet21", "did you mean", "resnet20"]),
    ((*TINY, "-a", "lenet"), ["lenet", "16 x 16", "8 x 8"]),
    ((*TINY, "--blocks", "1,1"), ["blocks", "resnet"]),
    ((*TINY, "--blocks", "1,,1"), ["--blocks", "1,,1"]),
    ((*TINY, "--num-classes", "3"), ["--num-classes 3", "4 classes"]),
    ((*TINY, "--memory", "4GB5"), ["--memory='4GB5'", "4GiB"]),
    ((*TINY, "--memory", "-3MiB"), ["--memory has no value", "minus sign"]),
    ((*TINY, "--memory", "6"), ["--memory 6 is 6 bytes", "6MiB"]),
    ((*TINY, "--memory", "6", "MiB"), ["'MiB' belongs to no option", "6MiB"]),
    ((*TINY, "--memory", "0"), ["--memory='0'"]),
    ((*TINY, "--memory", "0%"), ["--memory='0%'"]),
    ((*TINY, "--host-memory", "60%"), ["--host-memory='60%'"]),
    ((*TINY, "--workspace-limit", "lots"), ["--workspace-limit='lots'"]),
    ((*TINY, "--policy", "kepp"), ["kepp", "did you mean keep"]),
    ((*TINY, "--plan", "none.json"), ["none.json"]),
    ((*TINY, "--recipe", "none.json"), ["none.json"]),
    ((*TINY, "--device", "cuda:0"), ["CUDA", "the device 'emulated'"]),
    ((*TINY, "--profile", "h20"), ["h20", "h200"]),
    ((*TINY, "--precision", "fp16"), ["fp16"]),
    ((*TINY, "--lr-sched", "stpe:3:0.1"), ["stpe", "did you mean step"]),
    ((*TINY, "--warmup", "3", "--epochs", "2"), ["3 epochs", "2 epochs"]),
    ((*TINY, "--opt", "adam", "--momentum", "0.9"), ["--momentum 0.9", "adam"]),
    ((*TINY, "--opt", "nesterov", "--momentum", "0"), ["nesterov", "momentum"]),
    ((*TINY, "--lr", "fast"), ["--lr", "fast"]),
    ((*TINY, "--epochs", "0"), ["--epochs", "0"]),
    ((*TINY, "-b", "0"), ["--batch-size", "0"]),
    ((*TINY, "-b", "999", "--drop-last"), ["44 samples", "at most 44"]),
    ((*TINY, "--policy", "layup", "--theta", "0"), ["theta", "above 0"]),
    ((*TINY, "--policy", "vdnn", "--theta", "2"), ["--theta 2", "layup", "vdnn"]),
    ((*TINY, "--memroy", "1"), ["--memroy", "did you mean --memory"]),
    ((*TINY, "-e"), ["--evaluate", "--resume"]),
    ((*TINY, "--resume", "auto"), ["--output"]),
    ((*TINY, "--resume", "none.safetensors"), ["none.safetensors"]),
    ((*TINY, "--weights", "none.safetensors"), ["none.safetensors"]),
    ((*TINY, "--weights", "a", "--resume", "b"), ["--weights a", "--resume b"]),
]


@pytest.mark.parametrize("args, texts", MISTAKES, ids=lambda value: " ".join(value)[-40:])
def test_a_mistake_is_one_sentence(script: Script, tmp_path: Path, args: tuple[str, ...], texts: list[str]) -> None:
    refused(script("train", *args), *texts)
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be_made_is_named(script: Script, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(script("train", *TINY, "--output", "file/run"), "--output file/run cannot be written", "another place")


def idx(folder: Path, part: str, count: int, *, labels: int | None = None) -> None:
    """IDX files of ``count`` images of 28 x 28 and as many labels."""
    pixels = bytes(i % 251 for i in range(count * 784))
    (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, count, 28, 28) + pixels)
    numbers = bytes(i % 10 for i in range(count if labels is None else labels))
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, len(numbers)) + numbers)


def cut(folder: Path) -> None:
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-100])


def cut_gzip(folder: Path) -> None:
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(gzip.compress(path.read_bytes())[:-100])


def other_count(folder: Path) -> None:
    idx(folder, "train", 20, labels=19)


def empty(folder: Path) -> None:
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, cut_gzip, other_count, empty])
def test_a_damaged_file_is_named_and_no_run_is_begun(
    script: Script, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    for part, count in (("train", 20), ("t10k", 10)):
        idx(tmp_path, part, count)
    damage(tmp_path)
    name = "t10k-labels-idx1-ubyte" if damage is empty else "train-images-idx3-ubyte"
    refused(script("train", "--data", f"mnist:{tmp_path}", "-a", "lenet", "-b", "8", "--output", "run"), name)
    assert not (tmp_path / "run").exists()


def test_a_smaller_set_than_published_is_planned_again(script: Script, tmp_path: Path) -> None:
    """60,000 images divide by 8; the 20 that are there do not, so the step needs a tail that was not planned at first."""
    for part, count in (("train", 20), ("t10k", 10)):
        idx(tmp_path, part, count)
    done = script("train", "--data", f"mnist:{tmp_path}", "-a", "lenet", "-b", "8", "--epochs", "1", "--output", "run")
    assert done.code == 0 and "20 training and 10 test images" in done.out
    assert read(tmp_path / "run")["steps"] == 3


def test_a_checkpoint_of_another_net_is_refused_by_name(script: Script, tmp_path: Path) -> None:
    script("train", *TINY, "--max-steps", "1", "--output", "run")
    other = ("--data", "synthetic:44,8,8,3,4", "-a", "one_pixel", "-b", "8", "--output", "other")
    refused(script("train", *other, "--weights", "run/last.safetensors"), "bn2.bias", "did you mean bn1.bias")
    assert not (tmp_path / "other").exists()


def test_a_plan_for_another_net_names_the_layer(script: Script, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"policy": "mine", "reuse": {}, "decisions": {"conv3": "keep"}}')
    refused(script("train", *TINY, "--plan", "plan.json"), "conv3", "conv1")
    (tmp_path / "plan.json").write_text("{")
    refused(script("train", *TINY, "--plan", "plan.json"), "plan.json")


def test_a_mistake_in_a_process_of_its_own_is_one_line_and_code_2(process: Script) -> None:
    refused(process("train", "--data", "digits", "-a", "resnet2"), "resnet20")
