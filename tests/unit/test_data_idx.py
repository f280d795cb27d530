"""IDX files: every accepted form reads the same, every damage is one sentence with file, value and remedy."""

from __future__ import annotations

import gzip
import hashlib
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from minidnn.data import Splits, idx, load
from minidnn.errors import UserError

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
FASHION = Path("/usr/share/datasets/fashion-mnist")


def encode(values: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">{values.ndim + 1}I", 0x800 | values.ndim, *values.shape) + values.tobytes()


def make_files() -> dict[str, bytes]:
    """Twelve train and five test images of 6x4 with their labels, by published name."""
    generator = np.random.default_rng(0)
    return {
        f"{part}-{kind}": encode(values)
        for part, count in (("train", 12), ("t10k", 5))
        for kind, values in (
            ("images-idx3-ubyte", generator.integers(0, 256, (count, 6, 4), np.uint8)),
            ("labels-idx1-ubyte", generator.integers(0, 10, count, np.uint8)),
        )
    }


def write(directory: Path, files: dict[str, bytes]) -> str:
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return f"mnist:{directory}"


def test_images_labels_and_computed_statistics(tmp_path: Path) -> None:
    files = make_files()
    train, test = load(write(tmp_path, files))
    assert train.images.shape == (12, 6, 4, 1) and test.images.shape == (5, 6, 4, 1)
    assert train.images.tobytes() == files[TRAIN_IMAGES][16:]
    assert bytes(train.labels.astype(np.uint8)) == files[TRAIN_LABELS][8:]
    assert train.labels.dtype == np.int64 and train.classes == 10
    assert train.name == test.name == "mnist-idx"
    np.testing.assert_allclose(train.mean, (train.images / 255).mean(), rtol=1e-12)
    np.testing.assert_allclose(train.std, (train.images / 255).std(), rtol=1e-12)
    assert test.mean == train.mean and test.std == train.std  # never of the test images


@pytest.mark.parametrize(
    "renamed",
    [
        lambda name, content: (f"{name}.gz", gzip.compress(content)),
        lambda name, content: (name.replace("-idx", ".idx"), content),
        lambda name, content: (name.replace("-idx", ".idx") + ".gz", gzip.compress(content)),
        lambda name, content: (f"{name}.gz", content),  # unpacked on the way without a new name
        lambda name, content: (name, gzip.compress(content)),
    ],
    ids=["gz", "dot", "dot-gz", "gz-in-name-only", "gz-in-content-only"],
)
def test_packed_and_renamed_files_read_like_the_plain_ones(
    tmp_path: Path, renamed: Callable[[str, bytes], tuple[str, bytes]]
) -> None:
    files = make_files()
    (tmp_path / "plain").mkdir()
    (tmp_path / "other").mkdir()
    plain = load(write(tmp_path / "plain", files))
    other = load(write(tmp_path / "other", dict(renamed(name, content) for name, content in files.items())))
    for one, two in zip(plain, other, strict=True):
        assert np.array_equal(one.images, two.images) and np.array_equal(one.labels, two.labels)


def known_as(name: str, files: dict[str, bytes], names: list[str]) -> idx._Known:
    return idx._Known(name, 0.25, 0.5, tuple(hashlib.md5(files[file]).hexdigest() for file in names))


def test_the_checksum_of_all_four_uncompressed_files_names_the_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_files()
    packed = {f"{name}.gz": gzip.compress(content, mtime=1) for name, content in files.items()}
    monkeypatch.setattr(idx, "_KNOWN", (known_as("famous", files, list(files)),))
    train, test = load(write(tmp_path, packed))
    assert (train.name, test.name, train.mean, train.std) == ("famous", "famous", (0.25,), (0.5,))
    monkeypatch.setattr(idx, "_KNOWN", (known_as("famous", files, [TRAIN_IMAGES]),))
    assert load(write(tmp_path, packed)).train.name == "mnist-idx"


def test_files_of_two_published_sets_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_files()
    images, labels = known_as("one", files, [TRAIN_IMAGES]), known_as("two", files, [TRAIN_LABELS])
    monkeypatch.setattr(idx, "_KNOWN", (images, labels))
    with pytest.raises(UserError, match=rf"{TRAIN_IMAGES} is of one but {TRAIN_LABELS} is of two: keep the four"):
        load(write(tmp_path, files))


def with_label(content: bytes, label: int) -> bytes:
    return content[:-1] + bytes([label])


DAMAGES: list[tuple[str, str, Callable[[bytes], bytes], str]] = [
    ("empty", TRAIN_IMAGES, lambda c: b"", r"is empty \(0 bytes\)"),
    ("header", TRAIN_LABELS, lambda c: c[:5], "is cut off: 5 bytes, less than its header of 8"),
    ("cut", TRAIN_IMAGES, lambda c: c[:-3], r"is cut off: 301 bytes .*\(12 x 6 x 4 values\) promises 304"),
    ("long", TRAIN_LABELS, lambda c: c + b"\0", r"is too long: 21 bytes .* promises 20"),
    ("huge", TRAIN_IMAGES, lambda c: c[:4] + b"\xff" * 12 + c[16:], r"is cut off: 304 bytes .*4294967295"),
    ("magic", TRAIN_IMAGES, lambda c: b"\x89PNG" + c[4:], "magic number 0x89504e47 where 0x00000803 belongs"),
    (
        "swapped",
        TRAIN_IMAGES,
        lambda c: encode(np.zeros(20, np.uint8)),
        "magic number 0x00000801, a labels file, where",
    ),
    ("none", TRAIN_IMAGES, lambda c: encode(np.zeros((0, 6, 4), np.uint8)), r"holds no sample \(0 x 6 x 4"),
    ("gz-cut", TRAIN_IMAGES, lambda c: gzip.compress(c)[:-20], "cannot be read"),
    ("gz-bits", TRAIN_IMAGES, lambda c: gzip.compress(c)[:40] + b"\xff" * 80, "cannot be read"),
]


@pytest.mark.parametrize(("name", "damage", "value"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_a_damaged_file_is_named_with_the_value_and_the_remedy(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes], value: str
) -> None:
    files = make_files()
    files[name] = damage(files[name])
    with pytest.raises(UserError, match=value) as caught:
        load(write(tmp_path, files))
    assert str(tmp_path / name) in str(caught.value)
    assert str(caught.value).endswith("copy or fetch the file again.") and "\n" not in str(caught.value)


@pytest.mark.parametrize("label", [10, 255])
def test_a_label_out_of_range_is_named_with_file_index_and_classes(tmp_path: Path, label: int) -> None:
    files = make_files()
    files[TRAIN_LABELS] = with_label(files[TRAIN_LABELS], label)
    with pytest.raises(
        UserError, match=rf"label {label} of image 11 .* 10 classes: labels count from 0 to 9"
    ) as caught:
        load(write(tmp_path, files))
    assert str(tmp_path / TRAIN_LABELS) in str(caught.value)


def test_images_and_labels_of_different_count_are_refused(tmp_path: Path) -> None:
    files = make_files()
    files[TRAIN_LABELS] = encode(np.zeros(11, np.uint8))
    with pytest.raises(
        UserError, match=rf"{TRAIN_IMAGES} holds 12 images but {TRAIN_LABELS} holds 11 labels: take both"
    ):
        load(write(tmp_path, files))


def test_train_and_test_images_of_different_size_are_refused(tmp_path: Path) -> None:
    files = make_files()
    files["t10k-images-idx3-ubyte"] = encode(np.zeros((5, 4, 6), np.uint8))
    with pytest.raises(UserError, match="has 6x4 images but t10k-images-idx3-ubyte has 4x6 images: keep the four"):
        load(write(tmp_path, files))


def test_a_missing_file_or_directory_is_named_with_what_to_put_there(tmp_path: Path) -> None:
    files = make_files()
    del files["t10k-labels-idx1-ubyte"]
    with pytest.raises(
        UserError, match=r"has no t10k-labels-idx1-ubyte .*put the four IDX files.*nothing is downloaded"
    ):
        load(write(tmp_path, files))
    with pytest.raises(UserError, match="nowhere is not a directory: give the one that holds the four IDX files"):
        load(f"mnist:{tmp_path / 'nowhere'}")


@pytest.mark.skipif(not FASHION.is_dir(), reason=f"{FASHION} is absent: apt-get install dataset-fashion-mnist")
def test_fashion_mnist_is_recognised_and_has_its_known_statistics() -> None:
    splits: Splits = load(f"mnist:{FASHION}")
    assert [split.name for split in splits] == ["fashion-mnist"] * 2
    assert splits.train.images.shape == (60000, 28, 28, 1) and splits.test.images.shape == (10000, 28, 28, 1)
    assert np.bincount(splits.train.labels).tolist() == [6000] * 10
    assert np.bincount(splits.test.labels).tolist() == [1000] * 10
    assert splits.train.mean == (0.2860,) and splits.train.std == (0.3530,)
    assert splits.train.images.mean() / 255 == pytest.approx(0.2860, abs=5e-5)
