"""From the text of ``--data`` to a data set."""

from __future__ import annotations

from pathlib import Path

from minidnn.data.cifar import read_cifar10, read_cifar100
from minidnn.data.dataset import Splits
from minidnn.data.digits import read_digits
from minidnn.data.idx import read_mnist
from minidnn.data.pixels import resized, with_channels
from minidnn.data.synthetic import DEFAULT, make_synthetic
from minidnn.errors import UserError, nearest

# How each set is written, for messages.
_FORMS = {
    "digits": "digits",
    "mnist": "mnist:DIR",
    "cifar10": "cifar10:PATH",
    "cifar100": "cifar100:PATH",
    "synthetic": "synthetic:N,H,W,C,classes",
}


def load(spec: str, *, image_size: int | None = None, seed: int = 0, channels: int | None = None) -> Splits:
    """Read a data set from the host. It never downloads, and of all sets only ``synthetic`` depends on ``seed``.

    Args:
        spec: ``digits`` (of scikit-learn), ``mnist:DIR`` (IDX files of MNIST or Fashion-MNIST), ``cifar10:PATH``,
            ``cifar100:PATH`` (directory or archive, Python or binary version), ``synthetic`` (1,024 train and 256 test
            images, 32x32x3, 10 classes) or ``synthetic:N,H,W,C,classes``.
        image_size: bring every image to this height and width, bilinear, where it differs; the whole set is held at it.
        seed: of the synthetic images.
        channels: repeat a grey set this many times, for models that take colour.

    Raises:
        UserError: unknown name, missing or damaged file, label out of range, impossible size or number of channels.
    """
    for option, value in (("image_size", image_size), ("channels", channels)):
        if value is not None and value < 1:
            raise UserError(f"{option} {value} is not possible: give at least 1.")
    splits = _read(spec, seed)
    if image_size is not None:
        splits = Splits(*(resized(split, image_size) for split in splits))
    if channels is not None:
        splits = Splits(*(with_channels(split, channels) for split in splits))
    return splits


def _read(spec: str, seed: int) -> Splits:
    name, _, argument = spec.partition(":")  # at the first colon: a path may hold others
    path = Path(argument).expanduser()
    match name:
        case "digits" if not argument:
            return read_digits()
        case "synthetic":
            return make_synthetic(argument or DEFAULT, seed)
        case "mnist" if argument:
            return read_mnist(path)
        case "cifar10" if argument:
            return read_cifar10(path)
        case "cifar100" if argument:
            return read_cifar100(path)
        case "folder":
            raise UserError(f"{spec!r}: image folders are not available yet; known: {', '.join(_FORMS.values())}.")
    if name in _FORMS:
        raise UserError(f"the data set {spec!r} is not complete or has too much: write it as {_FORMS[name]}.")
    raise UserError(f"unknown data set {spec!r}: {nearest(name, _FORMS)} Give one of {', '.join(_FORMS.values())}.")
