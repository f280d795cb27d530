"""``minidnn.data.load``: names, digits, synthetic images, sizes and channels."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from minidnn.data import Dataset, load
from minidnn.errors import UserError


def test_digits_are_scaled_to_bytes_and_split_by_every_fifth_of_each_class() -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    values, targets = datasets.load_digits(return_X_y=True)
    train, test = load("digits")
    assert train.name == "digits" and train.classes == 10
    assert train.images.shape == (1442, 8, 8, 1) and test.images.shape == (355, 8, 8, 1)
    for digit in range(10):
        original = values[targets == digit].reshape(-1, 8, 8, 1)
        position = np.arange(len(original)) % 5
        for split, chosen in ((train, position != 4), (test, position == 4)):
            expected = np.floor(original[chosen] * (255 / 16) + 0.5)
            assert np.array_equal(split.images[split.labels == digit], expected)
    assert train.images.max() == 255
    np.testing.assert_allclose([*train.mean, *train.std], [(train.images / 255).mean(), (train.images / 255).std()])


def test_digits_without_scikit_learn_name_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UserError, match=r'python -m pip install "minidnn-layup\[demo\]"'):
        load("digits")


def test_resizing_keeps_place_and_brightness_and_only_touches_what_differs() -> None:
    plain, larger = load("synthetic:8,16,16,1,2"), load("synthetic:8,16,16,1,2", image_size=32)
    assert larger.train.images.shape == (8, 32, 32, 1) and larger.test.images.shape == (2, 32, 32, 1)
    halved = larger.train.images.reshape(8, 16, 2, 16, 2, 1).mean(axis=(2, 4))
    assert np.corrcoef(halved.ravel(), plain.train.images.ravel())[0, 1] > 0.9
    assert larger.train.mean == plain.train.mean
    same = load("synthetic:8,16,16,1,2", image_size=16)
    assert np.array_equal(same.train.images, plain.train.images)
    assert not np.array_equal(larger.test.images, larger.train.images[:2])


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_bilinear_enlargement_of_a_ramp_is_a_ramp_in_every_channel(channels: int) -> None:
    from minidnn.data.pixels import resized

    ramp = np.arange(0, 240, 60, dtype=np.uint8)  # 0 60 120 180 from left to right
    images = np.broadcast_to(ramp[None, None, :, None], (2, 4, 4, channels)) + np.arange(channels, dtype=np.uint8) * 10
    dataset = Dataset("ramp", images, np.zeros(2, np.int64), 1, (0.5,) * channels, (1.0,) * channels)
    expected = np.array([0, 15, 45, 75, 105, 135, 165, 180])[:, None] + np.arange(channels) * 10
    assert np.array_equal(resized(dataset, 8).images, np.broadcast_to(expected, (2, 8, 8, channels)))


def test_a_grey_set_is_repeated_without_memory_and_colour_is_not_reduced() -> None:
    grey, wide = load("synthetic:8,4,4,1,2"), load("synthetic:8,4,4,1,2", channels=3)
    assert wide.train.images.shape == (8, 4, 4, 3) and wide.train.images.strides[3] == 0
    assert (wide.train.images == grey.train.images).all() and (wide.test.images == grey.test.images).all()
    assert wide.train.mean == grey.train.mean * 3 and wide.train.std == grey.train.std * 3
    with pytest.raises(UserError, match=r"synthetic has 3 channels and 1 were asked for.*3 input channels"):
        load("synthetic", channels=1)


def test_synthetic_images_have_the_default_sizes_and_depend_on_the_seed_alone() -> None:
    train, test = load("synthetic", seed=5)
    assert train.images.shape == (1024, 32, 32, 3) and test.images.shape == (256, 32, 32, 3) and train.classes == 10
    assert set(train.labels.tolist()) == set(range(10))
    again, other = load("synthetic", seed=5), load("synthetic", seed=6)
    assert np.array_equal(again.train.images, train.images) and np.array_equal(again.test.labels, test.labels)
    assert not np.array_equal(other.train.images, train.images)
    assert not np.array_equal(other.train.labels, train.labels)
    assert not np.array_equal(train.images[:256], test.images)


def test_synthetic_classes_can_be_learned_from_train_for_test() -> None:
    train, test = load("synthetic:64,8,8,1,4")
    centres = np.stack([train.images[train.labels == label].mean(axis=0) for label in range(4)])
    distance = ((test.images[:, None] - centres[None]) ** 2).sum(axis=(2, 3, 4))
    assert (distance.argmin(axis=1) == test.labels).all()


@pytest.mark.parametrize("sizes", ["8,4,4,1", "8,4,4,1,2,3", "8,4,x,1,2", "0,4,4,1,2", "8,-4,4,1,2"])
def test_impossible_synthetic_sizes_show_the_form(sizes: str) -> None:
    with pytest.raises(UserError, match=rf"synthetic:{sizes}: give five whole numbers above 0, N,H,W,C,classes"):
        load(f"synthetic:{sizes}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("digit", r"unknown data set 'digit': did you mean digits\?"),
        ("cifra10:data", r"unknown data set 'cifra10:data': did you mean cifar10"),
        ("", r"unknown data set '': known: cifar10, .*mnist:DIR"),
        ("mnist", "'mnist' is not complete.*write it as mnist:DIR"),
        ("cifar100:", "'cifar100:' is not complete.*write it as cifar100:PATH"),
        ("digits:8", "'digits:8' .*has too much: write it as digits"),
        ("folder:photos", "image folders are not available yet; known: digits, mnist:DIR"),
    ],
)
def test_a_spec_that_names_no_set_is_answered_with_what_exists(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(spec)


@pytest.mark.parametrize("option", ["image_size", "channels"])
def test_sizes_below_one_are_refused(option: str) -> None:
    with pytest.raises(UserError, match=f"{option} 0 is not possible: give at least 1"):
        load("synthetic", **{option: 0})


def test_a_constant_channel_gets_std_one_instead_of_a_division_by_zero() -> None:
    from minidnn.data.pixels import statistics

    images = np.zeros((1500, 4, 4, 2), np.uint8)  # more than one block
    images[..., 0] = 51
    images[1000:, ..., 1] = 255
    mean, std = statistics(images)
    np.testing.assert_allclose(mean, [0.2, 1 / 3])
    np.testing.assert_allclose(std, [1.0, np.sqrt(2) / 3])


def test_a_dataset_that_contradicts_itself_is_refused() -> None:
    images, labels = np.zeros((3, 2, 2, 1), np.uint8), np.zeros(3, np.int64)
    for changed, message in (
        ({"images": images.astype(np.float32)}, r"images are float32 of shape \(3, 2, 2, 1\): pass uint8"),
        ({"images": images[..., 0]}, r"of shape \(3, 2, 2\): pass uint8 of shape \(N, H, W, C\)"),
        ({"labels": labels.astype(np.int32)}, "labels are int32"),
        ({"labels": labels[:2]}, "3 images but 2 labels"),
        ({"images": images[:0], "labels": labels[:0]}, "hold no pixel: give at least one image"),
        ({"labels": labels - 1}, "own: label -1 of image 0 is out of range for 2 classes"),
        ({"mean": (0.5, 0.5)}, "for 1 channels: give one number a channel"),
        ({"std": (0.0,)}, "std above 0"),
    ):
        whole = {"images": images, "labels": labels, "mean": (0.5,), "std": (1.0,)}
        with pytest.raises(UserError, match=message):
            Dataset("own", classes=2, **{**whole, **changed})  # type: ignore[arg-type]
