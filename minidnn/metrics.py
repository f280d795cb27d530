"""What a run writes about itself: measurements line by line, and on which machine by which command they were made."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("minidnn-layup", "numpy", "safetensors", "Pillow", "scikit-learn", "cupy-cuda12x", "cupy-cuda13x")


def provenance(seed: int | None = None) -> dict[str, Any]:
    """Machine, versions, seed and command: without them no number of ours is published."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
        "versions": versions,
        "seed": seed,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file that people can read, whole or not at all."""
    write_text(path, json.dumps(data, indent=2) + "\n")


class MetricsLog:
    """``metrics.jsonl``: one JSON object a line, each on the disk before the next is made. It keeps no averages.

    Records after ``steps``, which a run that was killed made after its last checkpoint, are dropped: the resumed run
    makes them again.
    """

    def __init__(self, path: Path, steps: int = 0) -> None:
        self._path = path
        kept = []
        if steps and path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= steps:
                        kept.append(line + "\n")
                except (ValueError, KeyError, TypeError):
                    continue  # a line cut off by a kill
        write_text(path, "".join(kept))

    def write(self, **record: Any) -> None:
        """Append a record; ``step``, the number of batches trained on since the start, belongs in each."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
