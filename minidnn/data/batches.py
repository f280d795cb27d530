"""Batches of one split in an order that depends on (seed, epoch) alone, made ahead by threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from minidnn.data.augment import Augment, augmented
from minidnn.data.dataset import Dataset
from minidnn.data.draws import Purpose, words
from minidnn.errors import UserError
from minidnn.schedule.ranks import length, share

Indexes = NDArray[np.int64]
Batch = tuple[NDArray[np.float32], NDArray[np.int64]]

_AHEAD = 2  # batches a worker may be ahead of the consumer


class Batches:
    """The batches of a split, epoch by epoch. Nothing is kept between epochs, so any can be asked for at any time.

    The order and each sample's crop and flip are pure functions of (seed, epoch, index of the sample): the batch size,
    the number of workers and an earlier interruption change neither.

    Args:
        dataset: the split; it is read, never written.
        batch: samples a batch.
        seed: of the order and the augmentation, 0 to 2**64 - 1.
        augment: None for evaluation.
        shuffle: False keeps the order of the split.
        drop_last: leave out a smaller last batch (with ``shuffle``, other samples each epoch).
        workers: threads that make batches ahead, at most two each; 0 makes each batch when it is asked for.
            Threads, not processes: NumPy copies outside the interpreter lock, and nothing can be left behind.
        rank, ranks: in data parallelism, whose share of every batch is made; ``batch`` still counts the samples of all
            ranks. A rank without a share of a small last batch gets the last sample of it.

    Raises:
        UserError: a number out of range; or ``drop_last`` leaves no batch at all, so that an epoch would train nothing.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch: int,
        *,
        seed: int,
        augment: Augment | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        workers: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        count, height, width, _ = dataset.images.shape
        if batch < 1:
            raise UserError(f"batch {batch} is not a batch size: give at least 1.")
        if workers < 0:
            raise UserError(f"{workers} workers: give 0 (no threads) or more.")
        if drop_last and count < batch:
            raise UserError(
                f"{dataset.name} has {count} samples, fewer than one batch of {batch}, and the smaller last batch is "
                f"dropped: 0 steps per epoch. Use a batch of at most {count}, or keep the last batch."
            )
        if augment is not None and augment.pad >= min(height, width):
            raise UserError(
                f"pad {augment.pad} on {height}x{width} images of {dataset.name}: a crop could miss the image, "
                f"so give less than {min(height, width)}."
            )
        self.dataset = dataset
        self.batch = batch
        self.seed = seed
        self.augment = augment
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.workers = workers
        self.rank, self.ranks = rank, ranks
        words(seed, 0, Purpose.ORDER, 0)  # a bad seed is refused here, not in the first epoch
        # (pixel / 255 - mean) / std as pixel * scale - shift, one row at a time: long inner loops are six times faster
        std = np.asarray(dataset.std, np.float64)
        self._scale = np.tile(1 / (255 * std), width).astype(np.float32)
        self._shift = np.tile(np.asarray(dataset.mean, np.float64) / std, width).astype(np.float32)

    def __len__(self) -> int:
        """Steps an epoch."""
        count = len(self.dataset)
        return count // self.batch if self.drop_last else -(-count // self.batch)

    @property
    def tail(self) -> int | None:
        """Samples in the smaller last batch; None if all batches are whole."""
        rest = len(self.dataset) % self.batch
        return rest if rest and not self.drop_last else None

    def samples(self, number: int) -> int:
        """Samples of all ranks in batch ``number`` of an epoch."""
        return min(self.batch, len(self.dataset) - number * self.batch)

    def counted(self, number: int) -> int:
        """Samples of this rank in batch ``number`` that count: 0 where it has no share."""
        return length(share(self.samples(number), self.rank, self.ranks))

    def order(self, epoch: int) -> Indexes:
        """The indexes of the samples in the order in which this epoch visits them, ``(N,)``."""
        if not self.shuffle:
            return np.arange(len(self.dataset), dtype=np.int64)
        keys = words(self.seed, epoch, Purpose.ORDER, len(self.dataset))
        return np.argsort(keys, kind="stable").astype(np.int64)

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch, None, None]:
        """The batches of an epoch from number ``start`` on: the very tail of the same epoch begun at 0.

        Yields ``x`` ``(n, H, W, C)`` float32, normalised, and ``y`` ``(n,)`` int64; ``n`` is ``batch`` or ``tail``, or this
        rank's share of it.
        Closing the iterator, or running it to its end, leaves no thread behind; an error in a worker is raised here.
        """
        if not 0 <= start <= len(self):
            raise UserError(
                f"batch {start} is not in an epoch of {len(self)} batches of {self.dataset.name}: start at 0 to "
                f"{len(self)}; to resume within an epoch, keep the batch size with which it was begun."
            )
        order = self.order(epoch)
        draws = words(self.seed, epoch, Purpose.AUGMENT, len(self.dataset)) if self.augment else None
        parts = [order[step * self.batch : (step + 1) * self.batch] for step in range(start, len(self))]

        def make(indexes: Indexes) -> Batch:
            mine = indexes[share(len(indexes), self.rank, self.ranks)]
            return self._make(mine if len(mine) else indexes[-1:], draws)

        return _ahead(make, parts, self.workers) if self.workers else (make(part) for part in parts)

    def _make(self, indexes: Indexes, draws: NDArray[np.uint64] | None) -> Batch:
        images = self.dataset.images
        if draws is None or self.augment is None:
            pixels = images[indexes]
        else:
            pixels = augmented(images, indexes, draws[indexes], self.augment)
        count, height, width, channels = pixels.shape
        x = np.empty((count, height, width * channels), np.float32)
        np.multiply(pixels.reshape(x.shape), self._scale, out=x)
        x -= self._shift
        return x.reshape(pixels.shape), self.dataset.labels[indexes]


def _ahead(make: Callable[[Indexes], Batch], parts: Sequence[Indexes], workers: int) -> Generator[Batch, None, None]:
    """``make`` of each part, in order, with a bounded number of parts under way in threads."""
    executor = ThreadPoolExecutor(workers, thread_name_prefix="minidnn-data")
    pending: deque[Future[Batch]] = deque()
    rest = iter(parts)
    try:
        for part in islice(rest, _AHEAD * workers):
            pending.append(executor.submit(make, part))
        while pending:
            batch = pending.popleft().result()
            for part in islice(rest, 1):
                pending.append(executor.submit(make, part))
            yield batch
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
