"""IDX files, the format of MNIST and of the sets that took its place, such as Fashion-MNIST.

A file is a big-endian header (two zero bytes, the type 8 for unsigned bytes, the number of dimensions, each dimension
in four bytes) and the values. Source: the format description on the MNIST page of LeCun, Cortes and Burges.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minidnn.data.dataset import Dataset, Splits, check_labels
from minidnn.data.pixels import statistics
from minidnn.errors import UserError

_IMAGES, _LABELS = 0x803, 0x801  # magic numbers: unsigned bytes in three dimensions, in one
_CLASSES = 10
_AGAIN = "copy or fetch the file again"


class _Known(NamedTuple):
    """A published set. The MD5s are of its four uncompressed files, because the same file is gzipped in many ways."""

    name: str
    mean: float
    std: float
    md5: tuple[str, ...]


_KNOWN = (
    _Known(
        "mnist",
        0.1307,
        0.3081,
        (
            "6bbc9ace898e44ae57da46a324031adb",
            "a25bea736e30d166cdddb491f175f624",
            "2646ac647ad5339dbf082846283269ea",
            "27ae3e4e09519cfbb04c329615203637",
        ),
    ),
    _Known(
        "fashion-mnist",
        0.2860,
        0.3530,
        (
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
            "9018921c3c673c538a1fc5bad174d6f9",
            "8181f5470baa50b63fa0f6fddb340f0a",
            "15d484375f8d13e6eb1aabb0c3f46965",
        ),
    ),
)


class _File(NamedTuple):
    path: Path
    values: NDArray[np.uint8]
    known: _Known | None


def read_mnist(directory: Path) -> Splits:
    """The two splits from four IDX files, plain or gzipped, under their published names (or with ``.`` before ``idx``).

    The checksum of the uncompressed bytes tells MNIST from Fashion-MNIST and gives the usual mean and std; other files
    of ten classes load as ``"mnist-idx"`` with the mean and std of their train images.
    """
    files = [
        _read(_find(directory, f"{part}-{kind}"), magic)
        for part in ("train", "t10k")
        for kind, magic in (("images-idx3-ubyte", _IMAGES), ("labels-idx1-ubyte", _LABELS))
    ]
    known = {file.known.name: file for file in files if file.known}
    if len(known) > 1:
        found = " but ".join(f"{file.path.name} is of {name}" for name, file in known.items())
        raise UserError(f"{directory}: {found}: keep the four files of one set in a directory.")
    train, test = _split(*files[:2]), _split(*files[2:])
    if train[0].shape[1:] != test[0].shape[1:]:
        sizes = " but ".join(f"{f.path.name} has {f.values.shape[1]}x{f.values.shape[2]} images" for f in files[::2])
        raise UserError(f"{directory}: {sizes}: keep the four files of one set in a directory.")
    mean, std = statistics(train[0])
    name = "mnist-idx"
    same = files[0].known
    if same is not None and all(file.known is same for file in files):
        name, mean, std = same.name, (same.mean,), (same.std,)
    return Splits(Dataset(name, *train, _CLASSES, mean, std), Dataset(name, *test, _CLASSES, mean, std))


def _split(images: _File, labels: _File) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if len(images.values) != len(labels.values):
        raise UserError(
            f"{images.path} holds {len(images.values)} images but {labels.path.name} holds {len(labels.values)} "
            "labels: take both files from the same set and split."
        )
    numbers = labels.values.astype(np.int64)
    check_labels(numbers, _CLASSES, labels.path)
    return images.values[..., None], numbers


def _find(directory: Path, name: str) -> Path:
    if not directory.is_dir():
        raise UserError(
            f"mnist:{directory} is not a directory: give the one that holds the four IDX files "
            f"({name} and so on, plain or .gz); nothing is downloaded."
        )
    for candidate in (name, name.replace("-idx", ".idx")):
        for path in (directory / candidate, directory / f"{candidate}.gz"):
            if path.is_file():
                return path
    raise UserError(
        f"{directory} has no {name} (plain or .gz): put the four IDX files of MNIST or Fashion-MNIST there; nothing is "
        "downloaded (on Debian, apt-get install dataset-fashion-mnist fills /usr/share/datasets/fashion-mnist)."
    )


def _read(path: Path, magic: int) -> _File:
    """The values of one IDX file of unsigned bytes, complete or not at all."""
    content = _content(path)
    dimensions = magic & 0xFF
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise UserError(f"{path} is cut off: {len(content)} bytes, less than its header of {header}; {_AGAIN}.")
    found, *shape = struct.unpack(f">{1 + dimensions}I", content[:header])
    if found != magic:
        other = {_IMAGES: ", an images file,", _LABELS: ", a labels file,"}.get(found, "")
        raise UserError(
            f"{path}: magic number 0x{found:08x}{other} where 0x{magic:08x} belongs: "
            f"this is not the file its name says; {_AGAIN}."
        )
    promised = header + math.prod(shape)
    if len(content) != promised:
        wrong = "is cut off" if len(content) < promised else "is too long"
        raise UserError(
            f"{path} {wrong}: {len(content)} bytes where its header "
            f"({' x '.join(map(str, shape))} values) promises {promised}; {_AGAIN}."
        )
    if promised == header:
        raise UserError(f"{path} holds no sample ({' x '.join(map(str, shape))} values); {_AGAIN}.")
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    values = np.frombuffer(content, np.uint8, offset=header).reshape(shape)
    return _File(path, values, next((known for known in _KNOWN if digest in known.md5), None))


def _content(path: Path) -> bytes:
    """The uncompressed bytes. Content tells gzip, not the name: servers and browsers unpack .gz without renaming it."""
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}); {_AGAIN}.") from error
    if not content:
        raise UserError(f"{path} is empty (0 bytes); {_AGAIN}.")
    return content
