"""Checkpoints: one safetensors file each, whole or not there at all.

A file is written in a temporary directory beside it, forced to the disk and renamed over the old one, so that a full
disk, a kill or a power cut during a save leaves the previous checkpoint as it was. It holds torchvision's parameter names,
the optimizer's tensors under ``optimizer.`` and, as metadata, where training stands. It does not depend on plan, device
or number of ranks, and holds no random state: order, augmentation and dropout are functions of seed and counters.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from minidnn.errors import UserError

FORMAT_VERSION = 1
OPTIMIZER = "optimizer."
LAST, BEST = "last.safetensors", "best.safetensors"
_KEY = "minidnn"
_TEMPORARY = ".writing"  # the last suffix of directories that hold what is not a checkpoint yet


@dataclass(frozen=True, slots=True)
class Progress:
    """Where training stands: what is done of which epoch.

    Attributes:
        epoch: epochs finished, evaluation included; training goes on in this one, counted from 0.
        batch: batches of it already trained on.
        steps: forward and backward passes since the start.
        updates: optimizer updates since the start.
        loss_sum, loss_samples: of the batches already done in this epoch: the losses of the samples added up, and how many.
        best_acc1: best top-1 accuracy so far, a fraction; None before the first evaluation.
        dropped_batches: last batches of one image that batch norm could not use.
    """

    epoch: int = 0
    batch: int = 0
    steps: int = 0
    updates: int = 0
    loss_sum: float = 0.0
    loss_samples: int = 0
    best_acc1: float | None = None
    dropped_batches: int = 0


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a checkpoint says besides its tensors."""

    progress: Progress = field(default_factory=Progress)
    seed: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)
    recipe_hash: str = ""


def save(path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Metadata) -> None:
    """Write a checkpoint at ``path``; what was there before stays until the new file is complete and on the disk.

    What an interrupted save left in the directory is removed first.

    Raises:
        UserError: the disk is full or not writable; the previous checkpoint is intact and nothing temporary is left.
    """
    text = json.dumps({"format_version": FORMAT_VERSION, **asdict(metadata)}, sort_keys=True)
    # The library writes the bytes behind the first element as they lie, without looking at strides.
    dense = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in tensors.items()}
    # A directory, because the library keeps a temporary file of its own beside the file it writes.
    directory = path.with_name(f"{path.name}.{os.getpid()}{_TEMPORARY}")
    temporary = directory / path.name
    try:
        remove_stale(path.parent)
        directory.mkdir()
        save_file(dense, temporary, metadata={_KEY: text})
        temporary.chmod(directory.stat().st_mode & 0o666)  # the library lets nobody else read, whatever the umask says
        _flush(temporary)
        os.replace(temporary, path)
        directory.rmdir()
        _flush_directory(path.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(directory, ignore_errors=True)
        intact = "the previous checkpoint is intact" if path.exists() else "nothing was written"
        raise UserError(f"cannot save {path} ({error}); {intact}: free space or choose another --output.") from error


def remove_stale(directory: Path) -> None:
    """Remove what saves that never ended have left. Never touches a checkpoint."""
    for left in directory.glob(f"*{_TEMPORARY}"):
        shutil.rmtree(left, ignore_errors=True)


def newest(directory: Path) -> Path | None:
    """The checkpoint of a run folder with most steps done, None if there is none. Temporary files do not count."""
    found = [path for path in (directory / LAST, directory / BEST) if path.is_file()]
    if len(found) < 2:
        return found[0] if found else None
    return max(found, key=_steps)  # the first of equals: the last checkpoint


def _steps(path: Path) -> int:
    with Checkpoint(path) as checkpoint:
        return checkpoint.metadata.progress.steps


class Checkpoint(Mapping[str, NDArray[Any]]):
    """A checkpoint opened by memory map: each look-up reads one tensor, none is read before.

    Any safetensors file opens, such as published weights; ``metadata`` refuses one that was not saved in training.

    Raises:
        UserError: there is no such file, or it is damaged or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any
        if not path.is_file():
            raise UserError(f"{path} is not a file: give a checkpoint, such as {LAST} in the folder of a run.")
        try:
            # Opened with the Python file first: its OSError tells a missing permission from a damaged file.
            path.open("rb").close()
            self._file = safe_open(path, framework="numpy")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} is no whole safetensors file ({error}): give another checkpoint.") from error
        self._names = frozenset(self._file.keys())

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        return np.asarray(self._file.get_tensor(name))

    def __contains__(self, name: object) -> bool:  # Mapping's own reads the tensor
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)

    @property
    def metadata(self) -> Metadata:
        """Where training stood. Raises UserError for a file of another program or of a newer version."""
        try:
            data = json.loads((self._file.metadata() or {})[_KEY])
            version = int(data.pop("format_version"))
            if version > FORMAT_VERSION:
                raise UserError(
                    f"{self.path} has format version {version}, newer than {FORMAT_VERSION}, the newest known here: "
                    "update minidnn."
                )
            known = {f.name for f in fields(Progress)}
            progress = Progress(**{k: v for k, v in data.pop("progress").items() if k in known})
            return Metadata(progress=progress, **data)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise UserError(
                f"{self.path} was not saved by a training run (it lacks its progress): load it with --weights, or "
                "resume from another file."
            ) from error

    def weights(self) -> Mapping[str, NDArray[Any]]:
        """Parameters and running statistics alone, read one by one."""
        return _Part(self, [name for name in self if not name.startswith(OPTIMIZER)])

    def optimizer(self) -> Mapping[str, NDArray[Any]]:
        """The optimizer's tensors and counters alone, read one by one."""
        return _Part(self, [name for name in self if name.startswith(OPTIMIZER)])

    def close(self) -> None:
        """Unmap the file; nothing can be read afterwards."""
        self._file.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Part(Mapping[str, NDArray[Any]]):
    """Some of the tensors of a checkpoint."""

    def __init__(self, whole: Checkpoint, names: list[str]) -> None:
        self._whole = whole
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        return self._whole[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _flush_directory(directory: Path) -> None:
    """Make the rename itself durable, where directories can be opened (not on Windows)."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
