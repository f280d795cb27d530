"""Order, augmentation, normalisation, resuming and worker threads of ``minidnn.data.Batches``."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from minidnn.data import Augment, Batches, Dataset
from minidnn.data.draws import Purpose, words
from minidnn.errors import UserError

Batch = tuple[NDArray[np.float32], NDArray[np.int64]]


def make_dataset(count: int = 23, height: int = 6, width: int = 5, channels: int = 3) -> Dataset:
    """Pixels are never 0 (so padding shows) and images are all different; the label is the index."""
    generator = np.random.default_rng(7)
    images = generator.integers(1, 256, (count, height, width, channels), np.uint8)
    mean, std = tuple(0.3 + 0.1 * c for c in range(channels)), tuple(0.2 + 0.05 * c for c in range(channels))
    return Dataset("numbers", images, np.arange(count, dtype=np.int64), count, mean, std)


def raw(dataset: Dataset) -> Dataset:
    """The same with a normalisation that is undone by ``* 255``."""
    channels = dataset.images.shape[3]
    return Dataset(dataset.name, dataset.images, dataset.labels, dataset.classes, (0.0,) * channels, (1.0,) * channels)


def pixels_by_index(batches: Batches, epoch: int) -> dict[int, bytes]:
    return {int(label): image.tobytes() for x, y in batches.epoch(epoch) for image, label in zip(x, y, strict=True)}


def as_bytes(batches: Iterable[Batch]) -> list[tuple[bytes, bytes]]:
    return [(x.tobytes(), y.tobytes()) for x, y in batches]


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("minidnn-data")]


AUGMENT = Augment(pad=2, flip=True)


def test_number_of_workers_changes_no_byte() -> None:
    dataset = make_dataset()
    reference, *others = (
        as_bytes(Batches(dataset, 4, seed=3, augment=AUGMENT, workers=workers).epoch(1)) for workers in (0, 1, 4)
    )
    assert len(reference) == 6
    assert all(other == reference for other in others)


def test_epochs_differ_and_runs_repeat() -> None:
    dataset = make_dataset()
    run1, run2 = (Batches(dataset, 4, seed=3, augment=AUGMENT) for _ in range(2))
    orders = [tuple(run1.order(epoch).tolist()) for epoch in range(4)]
    assert len(set(orders)) == 4
    crops = [pixels_by_index(run1, epoch) for epoch in range(2)]
    changed = sum(crops[0][index] != crops[1][index] for index in crops[0])
    assert changed > len(dataset) * 3 // 4  # of 50 variants an image, some repeat
    assert as_bytes(run1.epoch(1)) == as_bytes(run2.epoch(1))  # run2 has never seen epoch 0
    assert pixels_by_index(Batches(dataset, 4, seed=4, augment=AUGMENT), 0) != crops[0]
    assert Batches(dataset, 4, seed=4).order(0).tolist() != list(orders[0])


def test_a_crop_belongs_to_its_sample_not_to_its_batch_order_or_set_size() -> None:
    dataset = make_dataset()
    reference = pixels_by_index(Batches(dataset, 4, seed=3, augment=AUGMENT), 2)
    assert pixels_by_index(Batches(dataset, 7, seed=3, augment=AUGMENT, shuffle=False), 2) == reference
    part = Dataset("part", dataset.images[:9], dataset.labels[:9], 9, dataset.mean, dataset.std)
    smaller = pixels_by_index(Batches(part, 2, seed=3, augment=AUGMENT), 2)
    assert smaller == {index: reference[index] for index in range(9)}


def test_the_order_is_pinned_for_all_time() -> None:
    """A change here changes every published run; the raw words of Philox stay the same between NumPy versions."""
    assert Batches(make_dataset(8), 4, seed=0).order(0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    big = Batches(make_dataset(8), 4, seed=2**64 - 1).order(5).tolist()
    assert sorted(big) == list(range(8)) and big != list(range(8))


def test_the_order_tells_nothing_about_the_crops() -> None:
    streams = [tuple(words(3, 1, purpose, 8).tolist()) for purpose in Purpose]
    assert len(set(streams)) == len(Purpose)


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_at_a_batch_yields_the_tail_of_the_same_epoch(workers: int) -> None:
    dataset = make_dataset()
    whole = as_bytes(Batches(dataset, 4, seed=3, augment=AUGMENT).epoch(5))
    for start in range(len(whole) + 1):
        batches = Batches(dataset, 4, seed=3, augment=AUGMENT, workers=workers)
        assert as_bytes(batches.epoch(5, start)) == whole[start:]


@pytest.mark.parametrize("start", [-1, 7])
def test_start_outside_the_epoch_is_refused_before_the_first_batch(start: int) -> None:
    with pytest.raises(UserError, match=rf"batch {start} is not in an epoch of 6 batches of numbers: start at 0 to 6"):
        Batches(make_dataset(), 4, seed=0).epoch(0, start)


@pytest.mark.parametrize(
    ("count", "batch", "drop_last", "sizes", "tail"),
    [
        (9, 4, False, [4, 4, 1], 1),
        (9, 4, True, [4, 4], None),
        (8, 4, False, [4, 4], None),
        (3, 8, False, [3], 3),
        (8, 8, True, [8], None),
    ],
)
def test_each_sample_is_visited_once_and_the_tail_is_announced(
    count: int, batch: int, drop_last: bool, sizes: list[int], tail: int | None
) -> None:
    batches = Batches(make_dataset(count), batch, seed=1, drop_last=drop_last)
    seen = [y.tolist() for _, y in batches.epoch(0)]
    assert [len(y) for y in seen] == sizes
    assert len(batches) == len(sizes) and batches.tail == tail
    flat = list(itertools.chain.from_iterable(seen))
    assert len(set(flat)) == len(flat) == sum(sizes)
    assert flat == batches.order(0)[: len(flat)].tolist()


def test_an_epoch_without_a_step_is_refused() -> None:
    with pytest.raises(UserError, match=r"numbers has 3 samples, fewer than one batch of 8.*0 steps.*at most 3"):
        Batches(make_dataset(3), 8, seed=0, drop_last=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "batch 0 is not a batch size: give at least 1"),
        ({"workers": -1}, "-1 workers: give 0"),
        ({"seed": -1}, r"seed -1 is out of range: give an integer from 0"),
        ({"augment": Augment(pad=5)}, "pad 5 on 6x5 images of numbers.*less than 5"),
    ],
)
def test_impossible_numbers_are_refused_at_once(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Batches(make_dataset(), **{"batch": 4, "seed": 0, **arguments})  # type: ignore[arg-type]


def test_negative_padding_is_refused() -> None:
    with pytest.raises(UserError, match="pad -1 is negative"):
        Augment(pad=-1)


def test_crops_are_windows_of_the_black_padded_image_and_all_of_them_occur() -> None:
    pad = 1
    dataset = raw(make_dataset(400, 4, 3, 2))
    seen = set()
    for x, y in Batches(dataset, 64, seed=0, augment=Augment(pad=pad, flip=True)).epoch(0):
        for image, index in zip(np.rint(x * 255).astype(np.uint8), y.tolist(), strict=True):
            padded = np.pad(dataset.images[index], ((pad, pad), (pad, pad), (0, 0)))
            found = [
                (top, left, step)
                for top, left, step in itertools.product(range(3), range(3), (1, -1))
                if np.array_equal(padded[top : top + 4, left : left + 3][:, ::step], image)
            ]
            assert len(found) == 1, index
            seen.add(found[0])
    assert len(seen) == 18


def test_flip_alone_mirrors_about_half_of_the_images_and_moves_none() -> None:
    dataset = raw(make_dataset(400))
    mirrored = 0
    for x, y in Batches(dataset, 50, seed=0, augment=Augment(flip=True)).epoch(0):
        pixels = np.rint(x * 255).astype(np.uint8)
        flipped = (pixels == dataset.images[y][:, :, ::-1]).all(axis=(1, 2, 3))
        assert (pixels[~flipped] == dataset.images[y][~flipped]).all()
        mirrored += int(flipped.sum())
    assert 160 < mirrored < 240  # 200 expected, 4 standard deviations


def test_no_augmentation_asked_for_means_none() -> None:
    plain, nothing = (pixels_by_index(Batches(make_dataset(), 4, seed=3, augment=a), 0) for a in (None, Augment()))
    assert plain == nothing


@pytest.mark.parametrize("augment", [None, Augment(pad=1)])
def test_x_is_normalised_float32_in_c_order_also_of_a_repeated_channel(augment: Augment | None) -> None:
    grey = make_dataset(channels=1)
    wide = np.broadcast_to(grey.images, (*grey.images.shape[:3], 3))
    for dataset in (make_dataset(), Dataset("wide", wide, grey.labels, grey.classes, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))):
        for x, y in Batches(dataset, 4, seed=0, augment=augment).epoch(0):
            assert x.dtype == np.float32 and y.dtype == np.int64 and x.flags.c_contiguous
            if augment is None:
                expected = (dataset.images[y] / 255 - np.array(dataset.mean)) / np.array(dataset.std)
                np.testing.assert_allclose(x, expected, atol=1e-6)


def test_evaluation_keeps_the_order_of_the_split() -> None:
    y = np.concatenate([y for _, y in Batches(make_dataset(), 4, seed=9, shuffle=False).epoch(3)])
    assert y.tolist() == list(range(23))


class Counting(Batches):
    """Counts the batches made and fails at the one that holds sample ``bad``."""

    made = 0
    bad = -1

    def _make(self, indexes: NDArray[np.int64], draws: NDArray[np.uint64] | None) -> Batch:
        self.made += 1
        if self.bad in indexes:
            raise OSError("cannot read sample 9")
        return super()._make(indexes, draws)


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_an_error_in_a_worker_reaches_the_consumer_in_its_place_and_ends_the_threads(workers: int) -> None:
    batches = Counting(make_dataset(), 4, seed=0, shuffle=False, workers=workers)
    batches.bad = 9
    iterator = batches.epoch(0)
    assert [next(iterator)[1][0] for _ in range(2)] == [0, 4]
    with pytest.raises(OSError, match="cannot read sample 9"):
        next(iterator)
    assert not loader_threads()


def test_closing_or_finishing_an_epoch_leaves_no_thread() -> None:
    batches = Batches(make_dataset(), 2, seed=0, workers=3)
    iterator = batches.epoch(0)
    next(iterator)
    assert loader_threads()
    iterator.close()
    assert not loader_threads()
    assert len(list(batches.epoch(0))) == 12
    assert not loader_threads()


def test_workers_run_ahead_but_only_so_far() -> None:
    batches = Counting(make_dataset(200), 2, seed=0, workers=2)
    iterator = batches.epoch(0)
    next(iterator)
    deadline = time.monotonic() + 10
    while batches.made < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert batches.made == 5  # the one taken and two ahead for each worker
    iterator.close()
