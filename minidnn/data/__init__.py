"""Image sets on the host and the batches cut from them.

``load`` reads one from files or an installed package, never from the network; ``Batches`` shuffles, augments and
normalises.
"""

from __future__ import annotations

from minidnn.data.augment import Augment
from minidnn.data.batches import Batches
from minidnn.data.dataset import Dataset, Splits
from minidnn.data.sources import load

__all__ = ["Augment", "Batches", "Dataset", "Splits", "load"]
