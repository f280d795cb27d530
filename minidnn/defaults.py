"""What is known of a data set before it is read, and the settings that train it where the command line names none."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from minidnn.data import Dataset, load
from minidnn.data.synthetic import DEFAULT as SYNTHETIC
from minidnn.errors import UserError


class Facts(NamedTuple):
    """Sizes that decide the memory of a step; of ``mnist`` and ``cifar``, until they are read, the published ones."""

    train: int
    height: int
    width: int
    channels: int
    classes: int

    @classmethod
    def of(cls, dataset: Dataset) -> Facts:
        """The sizes of a set that has been read."""
        count, height, width, channels = dataset.images.shape
        return cls(count, height, width, channels, dataset.classes)


class Defaults(NamedTuple):
    """Settings of a data set. ``lr`` is for nets with batch norm and SGD; without batch norm a tenth, Adam: 0.001."""

    image_size: int | None  # None: as stored
    batch_size: int
    epochs: int
    opt: str
    lr: float
    lr_sched: str
    wd: float
    label_smoothing: float
    pad: int  # of the random crop
    flip: bool
    augment: bool  # whether crop and flip are on


_FACTS = {
    "digits": Facts(1442, 8, 8, 1, 10),
    "mnist": Facts(60000, 28, 28, 1, 10),
    "cifar10": Facts(50000, 32, 32, 3, 10),
    "cifar100": Facts(50000, 32, 32, 3, 100),
}
_CIFAR = Defaults(
    image_size=None, batch_size=128, epochs=160, opt="nesterov", lr=0.1, lr_sched="cosine", wd=5e-4, label_smoothing=0.0,
    pad=4, flip=True, augment=True,
)  # fmt: skip
DEFAULTS = {
    "digits": _CIFAR._replace(batch_size=64, epochs=18, pad=1, flip=False),
    "mnist": _CIFAR._replace(epochs=20, pad=2, flip=False),
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "synthetic": _CIFAR._replace(batch_size=64, epochs=1, wd=0.0, augment=False),
}
"""By the name before the colon of ``--data``."""


def name_of(spec: str) -> str:
    """The data set's name in the text of ``--data``. Raises UserError for an unknown one, as reading it would."""
    name = spec.partition(":")[0]
    if name not in DEFAULTS:
        _refused(spec)  # by the reader: with the nearest names, and without reading anything
    return name


def known_facts(spec: str) -> Facts:
    """Sizes of a data set without reading it."""
    name = name_of(spec)
    if name != "synthetic":
        return _FACTS[name]
    try:
        sizes = [int(part) for part in (spec.partition(":")[2] or SYNTHETIC).split(",")]
        return Facts(*sizes) if len(sizes) == 5 and min(sizes) > 0 else _refused(spec)
    except ValueError:
        return _refused(spec)


def _refused(spec: str) -> NoReturn:
    load(spec)
    raise UserError(f"{spec} is no data set")


def table() -> str:
    """The defaults as text, for ``--help``."""
    rows = [("data", "image", "-b", "--epochs", "--opt", "--lr", "--lr-sched", "--wd", "crop", "flip")]
    for name, d in DEFAULTS.items():
        crop, flip = (f"pad {d.pad}", "yes" if d.flip else "no") if d.augment else ("off", "off")
        image = "stored" if d.image_size is None else str(d.image_size)
        numbers = (image, str(d.batch_size), str(d.epochs), d.opt, f"{d.lr:g}", d.lr_sched, f"{d.wd:g}")
        rows.append((name, *numbers, crop, flip))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
