"""CIFAR-10 and CIFAR-100 as published: Python pickles or binary records, in a directory or a tar archive.

Both store an image as 3,072 bytes, channel first (1,024 red, green, blue), so images are transposed to NHWC here.
Archives are read in memory, never extracted. Source: the description of the formats on the data set's page (Krizhevsky,
"Learning multiple layers of features from tiny images", 2009).
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minidnn.data.dataset import Dataset, Splits, check_labels
from minidnn.data.safe_pickle import load_arrays
from minidnn.errors import UserError

_PIXELS = 3 * 32 * 32
_AGAIN = "use the files of the official archive"
_GIVE = "give the directory or .tar.gz of the Python or the binary version, with all its files (nothing is downloaded)"


class _Set(NamedTuple):
    """What is particular to one of the two sets. Mean and std are of its 50,000 train images, to four digits."""

    name: str
    folders: tuple[str, str]  # of the Python and of the binary version
    train: tuple[str, ...]  # in binary, the names end in .bin
    test: tuple[str, ...]
    label_key: str
    label_bytes: int  # in front of a binary record; the last of them is the fine label
    classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


_CIFAR10 = _Set(
    name="cifar10",
    folders=("cifar-10-batches-py", "cifar-10-batches-bin"),
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test=("test_batch",),
    label_key="labels",
    label_bytes=1,
    classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)
_CIFAR100 = _Set(
    name="cifar100",
    folders=("cifar-100-python", "cifar-100-binary"),
    train=("train",),
    test=("test",),
    label_key="fine_labels",
    label_bytes=2,
    classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)

Part = tuple[NDArray[np.uint8], NDArray[np.int64]]


def read_cifar10(path: Path) -> Splits:
    """CIFAR-10 from a directory or archive; a file may hold fewer images than published, but none may be missing."""
    return _read(path, _CIFAR10)


def read_cifar100(path: Path) -> Splits:
    """CIFAR-100 with its 100 fine labels; the 20 coarse ones are not read."""
    return _read(path, _CIFAR100)


def _read(path: Path, cifar: _Set) -> Splits:
    if not path.exists():
        raise UserError(f"{cifar.name}:{path} does not exist: {_GIVE}.")
    names = (*cifar.train, *cifar.test)
    parts: dict[str, Part] = {}
    files = _in_directory(path, cifar.folders, names) if path.is_dir() else _in_archive(path, names)
    for name, where, content in files:
        if not content:
            raise UserError(f"{where} is empty (0 bytes): {_AGAIN}.")
        images, labels = (_from_binary if name.endswith(".bin") else _from_pickle)(content, where, cifar)
        check_labels(labels, cifar.classes, where)
        parts[name] = np.ascontiguousarray(images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), labels
    suffix = ".bin" if parts and parts.keys().isdisjoint(names) else ""
    missing = [name + suffix for name in names if name + suffix not in parts]
    if missing:
        raise UserError(f"{cifar.name}:{path} has no {', '.join(missing)}: {_GIVE}.")

    def joined(names: tuple[str, ...]) -> Dataset:
        images, labels = zip(*(parts.pop(name + suffix) for name in names), strict=True)
        return Dataset(cifar.name, np.concatenate(images), np.concatenate(labels), cifar.classes, cifar.mean, cifar.std)

    return Splits(joined(cifar.train), joined(cifar.test))


def _in_directory(path: Path, folders: tuple[str, str], names: tuple[str, ...]) -> Iterator[tuple[str, str, bytes]]:
    """Name, place for messages and content of the files of one version, in ``path`` or in its usual folder below it."""
    for folder, suffix in zip(folders, ("", ".bin"), strict=True):
        for base in (path, path / folder):
            files = [file for name in names if (file := base / (name + suffix)).is_file()]
            for file in files:
                try:
                    yield file.name, str(file), file.read_bytes()
                except OSError as error:
                    raise UserError(f"{file} cannot be read ({error}): copy or fetch it again.") from error
            if files:
                return


def _in_archive(path: Path, names: tuple[str, ...]) -> Iterator[tuple[str, str, bytes]]:
    """The same from a tar archive, gzipped or plain, in one pass; of two of one name the later counts, as in tar."""
    wanted = {name + suffix for name in names for suffix in ("", ".bin")}
    try:
        with path.open("rb") as file:
            gzipped = file.read(2) == b"\x1f\x8b"
        with tarfile.open(path, "r:gz" if gzipped else "r:") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                stream = archive.extractfile(member) if member.isfile() and name in wanted else None
                if stream is not None:
                    yield name, f"{path}:{member.name}", stream.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a whole tar archive ({error}): copy or fetch it again.") from error


def _from_pickle(content: bytes, where: str, cifar: _Set) -> Part:
    batch = load_arrays(content, where)
    images, labels = batch.get("data"), batch.get(cifar.label_key)
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != _PIXELS:
        found = f"of shape {images.shape}" if isinstance(images, np.ndarray) else f"a {type(images).__name__}"
        raise UserError(f"{where}: 'data' is {found}, not an array of N x {_PIXELS} bytes: {_AGAIN}.")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise UserError(f"{where}: '{cifar.label_key}' is a {type(labels).__name__}, not a list of integers: {_AGAIN}.")
    if len(images) != len(labels) or not labels:
        raise UserError(f"{where} holds {len(images)} images and {len(labels)} labels: {_AGAIN}.")
    limit = 2**63 - 1  # a label beyond 64 bits is out of range all the same
    return images, np.array([max(-limit, min(limit, label)) for label in labels], np.int64)


def _from_binary(content: bytes, where: str, cifar: _Set) -> Part:
    record = cifar.label_bytes + _PIXELS
    if len(content) % record:
        raise UserError(
            f"{where} is cut off: {len(content)} bytes, not a multiple of its records of {record}: {_AGAIN}."
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return records[:, cifar.label_bytes :], records[:, cifar.label_bytes - 1].astype(np.int64)
