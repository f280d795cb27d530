"""The 1,797 handwritten digits that come with scikit-learn: real data without a download.

They are the test part of UCI's optdigits (Alpaydin and Kaynak, 1998): 8x8, values 0 to 16, thirteen writers. No split
is published and no writer is named, so any split mixes writers and accuracies are optimistic.
"""

from __future__ import annotations

import numpy as np

from minidnn.data.dataset import Dataset, Splits
from minidnn.data.pixels import statistics
from minidnn.errors import UserError


def read_digits() -> Splits:
    """Digits as uint8, ``round(255 * value / 16)``, in a fixed split: every fifth sample of each class is test.

    This gives 1,442 train and 355 test, stratified, from no seed. Mean and std are computed from the train part.
    """
    try:
        from sklearn.datasets import load_digits  # takes a second and is optional
    except ImportError as error:
        raise UserError(
            "the digits come with scikit-learn, which is not installed: "
            'python -m pip install "minidnn-layup[demo]" (or use --data synthetic, which needs nothing).'
        ) from error
    values, targets = load_digits(return_X_y=True)
    labels = np.asarray(targets, np.int64)
    images = ((np.asarray(values, np.int64) * 255 + 8) // 16).astype(np.uint8).reshape(-1, 8, 8, 1)
    test = np.zeros(len(labels), bool)
    for digit in range(10):
        test[np.flatnonzero(labels == digit)[4::5]] = True
    mean, std = statistics(images[~test])
    return Splits(
        Dataset("digits", images[~test], labels[~test], 10, mean, std),
        Dataset("digits", images[test], labels[test], 10, mean, std),
    )
