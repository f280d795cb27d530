"""CIFAR in all its published forms, written here as the originals were, and the pickle reader that runs no code."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from minidnn.data import load
from minidnn.errors import UserError

NAMES = {
    "cifar10": [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"],
    "cifar100": ["train", "test"],
}
FOLDERS = {
    ("cifar10", ""): "cifar-10-batches-py",
    ("cifar10", ".bin"): "cifar-10-batches-bin",
    ("cifar100", ""): "cifar-100-python",
    ("cifar100", ".bin"): "cifar-100-binary",
}


class Python2Pickler(pickle._Pickler):  # the pure-Python one, whose parts can be replaced
    """Writes bytes as Python 2 wrote its strings, which is what the published files hold."""

    def save_string(self: Any, value: bytes) -> None:
        short = len(value) < 256
        self.write((b"U" + struct.pack("<B", len(value)) if short else b"T" + struct.pack("<i", len(value))) + value)
        self.memoize(value)

    dispatch: ClassVar[dict[type, Any]] = {**pickle._Pickler.dispatch, bytes: save_string}


def python2(value: object) -> bytes:
    stream = io.BytesIO()
    Python2Pickler(stream, 2).dump(value)
    return stream.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def python3(value: dict[bytes, object]) -> bytes:
    return pickle.dumps({key.decode(): item for key, item in value.items()}, protocol=2)


Part = tuple[NDArray[np.uint8], list[int]]


def make_part(number: int, classes: int) -> Part:
    generator = np.random.default_rng(number)
    return generator.integers(0, 256, (3, 32, 32, 3), np.uint8), generator.integers(0, classes, 3).tolist()


def make_parts(name: str) -> dict[str, Part]:
    return {file: make_part(number, 10 if name == "cifar10" else 100) for number, file in enumerate(NAMES[name])}


def batch(name: str, images: NDArray[np.uint8], labels: list[int]) -> dict[bytes, object]:
    """The dictionary of one file, its images channel first as published."""
    data = np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), 3072)
    names: dict[bytes, object] = {b"batch_label": b"training batch 1 of 5", b"filenames": [b"a.png"] * len(images)}
    if name == "cifar10":
        return {**names, b"data": data, b"labels": labels}
    return {**names, b"data": data, b"fine_labels": labels, b"coarse_labels": [label // 5 for label in labels]}


def binary(name: str, images: NDArray[np.uint8], labels: list[int]) -> bytes:
    head = [[label] if name == "cifar10" else [label // 5, label] for label in labels]
    data = images.transpose(0, 3, 1, 2).reshape(len(images), 3072)
    return np.concatenate([np.array(head, np.uint8), data], axis=1).tobytes()


def make_files(name: str, suffix: str, encode: Callable[[Any], bytes] = python2) -> dict[str, bytes]:
    return {
        file + suffix: binary(name, *part) if suffix else encode(batch(name, *part))
        for file, part in make_parts(name).items()
    }


def write_folder(directory: Path, files: dict[str, bytes]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


def write_tar(path: Path, folder: str, files: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in {"batches.meta": b"not read", **dict(reversed(files.items()))}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def check(name: str, path: Path) -> None:
    parts = list(make_parts(name).values())
    train, test = load(f"{name}:{path}")
    for split, expected in ((train, parts[:-1]), (test, parts[-1:])):
        assert split.name == name and split.classes == (10 if name == "cifar10" else 100)
        assert split.labels.tolist() == [label for _, labels in expected for label in labels]
        assert split.images.flags.c_contiguous
        assert np.array_equal(split.images, np.concatenate([images for images, _ in expected]))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("suffix", ["", ".bin"])
@pytest.mark.parametrize("form", ["files", "parent", "tar.gz", "tar"])
def test_every_published_form_gives_the_same_nhwc_images_in_order(
    tmp_path: Path, name: str, suffix: str, form: str
) -> None:
    folder, files = FOLDERS[name, suffix], make_files(name, suffix)
    match form:
        case "files":
            path = write_folder(tmp_path / "any", files)
        case "parent":
            path = write_folder(tmp_path / folder, files).parent
        case _:
            path = write_tar(tmp_path / f"any.{form}", folder, files, "w:gz" if form == "tar.gz" else "w")
    check(name, path)
    if path.is_file():
        assert list(tmp_path.iterdir()) == [path]  # nothing was extracted


def test_batches_written_by_python_3_read_the_same(tmp_path: Path) -> None:
    check("cifar10", write_folder(tmp_path, make_files("cifar10", "", python3)))


def test_published_mean_and_std_are_used_also_for_a_part_of_the_set(tmp_path: Path) -> None:
    train, test = load(f"cifar10:{write_folder(tmp_path, make_files('cifar10', '.bin'))}")
    assert train.mean == test.mean == (0.4914, 0.4822, 0.4465)
    assert train.std == test.std == (0.2470, 0.2435, 0.2616)


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_a_pickle_that_wants_to_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    files = make_files("cifar10", "")
    marker = tmp_path / "executed"
    files["data_batch_2"] = pickle.dumps({b"data": Evil(marker)}, protocol=2)
    with pytest.raises(UserError, match=r"it asks for \w+\.mkdir, which no CIFAR file needs; use the files") as caught:
        load(f"cifar10:{write_folder(tmp_path / 'data', files)}")
    assert str(tmp_path / "data" / "data_batch_2") in str(caught.value)
    assert not marker.exists()


def test_arrays_of_objects_and_numpys_other_functions_are_refused(tmp_path: Path) -> None:
    for value, message in (
        (np.array([{}], object), "array of 'O8'"),
        (np.zeros((3, 3072)), "array of 'f8'"),
        (np.float64(1.0), r"numpy\._core\.multiarray\.scalar"),
        (b"raw".decode(), "'data' is a str, not an array"),
        (np.zeros((3, 1024), np.uint8), r"'data' is of shape \(3, 1024\), not an array of N x 3072 bytes"),
    ):
        files = make_files("cifar10", "")
        files["data_batch_1"] = pickle.dumps({b"data": value, b"labels": [1, 2, 3]}, protocol=2)
        with pytest.raises(UserError, match=message) as caught:
            load(f"cifar10:{write_folder(tmp_path, files)}")
        assert "data_batch_1" in str(caught.value) and "official archive" in str(caught.value)


def test_a_pickle_cut_off_anywhere_is_a_user_error(tmp_path: Path) -> None:
    files = make_files("cifar100", "")
    content = files["test"]
    for length in [*range(1, 60), len(content) // 2, len(content) - 1]:
        files["test"] = content[:length]
        with pytest.raises(UserError, match="test is not a CIFAR batch that can be read safely"):
            load(f"cifar100:{write_folder(tmp_path, files)}")


@pytest.mark.parametrize("suffix", ["", ".bin"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_a_label_out_of_range_is_named_with_file_index_and_classes(tmp_path: Path, name: str, suffix: str) -> None:
    classes = 10 if name == "cifar10" else 100
    files, file = make_files(name, suffix), NAMES[name][0]
    for label in [classes, 255] + ([-1, 2**80] if not suffix else []):
        images, labels = make_parts(name)[file]
        labels[1] = label
        files[file + suffix] = binary(name, images, labels) if suffix else python2(batch(name, images, labels))
        with pytest.raises(UserError, match=rf"of image 1 is out of range for {classes} classes") as caught:
            load(f"{name}:{write_folder(tmp_path, files)}")
        assert f"{tmp_path / (file + suffix)}: label {min(label, 2**63 - 1)} " in str(caught.value)


def test_labels_that_do_not_match_the_images_are_refused(tmp_path: Path) -> None:
    files = make_files("cifar10", "")
    images, _ = make_part(0, 10)
    for labels, message in (
        ([1, 2], "holds 3 images and 2 labels"),
        ([1, 2, "3"], "'labels' is a list, not a list of integers"),
    ):
        files["test_batch"] = python2(batch("cifar10", images, labels))  # type: ignore[arg-type]
        with pytest.raises(UserError, match=f"test_batch.* {message}"):
            load(f"cifar10:{write_folder(tmp_path, files)}")


def test_missing_empty_and_cut_off_files_are_named_with_the_remedy(tmp_path: Path) -> None:
    files = make_files("cifar10", ".bin")
    whole = files["data_batch_3.bin"]
    for content, message in (
        (b"", r"data_batch_3\.bin is empty \(0 bytes\): use the files of the official archive"),
        (whole[:-5], r"data_batch_3\.bin is cut off: 9214 bytes, not a multiple of its records of 3073: use the files"),
        (None, r"has no data_batch_3\.bin: give the directory or \.tar\.gz .*nothing is downloaded"),
    ):
        folder = tmp_path / str(len(message))
        changed = {**files, "data_batch_3.bin": content}
        write_folder(folder, {name: data for name, data in changed.items() if data is not None})
        with pytest.raises(UserError, match=message):
            load(f"cifar10:{folder}")
    with pytest.raises(UserError, match="nowhere does not exist: give the directory or"):
        load(f"cifar10:{tmp_path / 'nowhere'}")
    with pytest.raises(UserError, match="has no train, test: give"):
        load(f"cifar100:{folder}")


def test_a_damaged_archive_is_named_with_the_remedy(tmp_path: Path) -> None:
    for mode in ("w:gz", "w"):
        whole = write_tar(tmp_path / "whole", "cifar-100-python", make_files("cifar100", ""), mode).read_bytes()
        for content in (b"", b"PK\x03\x04 no tar at all", whole[: len(whole) // 3], whole[:700]):
            path = tmp_path / "part.tar"
            path.write_bytes(content)
            with pytest.raises(UserError, match=r"part\.tar is not a whole tar archive .*: copy or fetch it again"):
                load(f"cifar100:{path}")
