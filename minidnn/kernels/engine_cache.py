"""Engines that were measured before, on disk: so that a GPU measures each problem once, and its later runs have the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from minidnn.schedule.recipe import Engine


class EngineCache:
    """Engines measured before, in a JSON file for one GPU, cuDNN and frontend: ``folder/<what>.json``.

    Several processes may use one file at a time: each keeps what the others have found. A file that cannot be read or written
    only costs the measuring. It never holds more than engines and their bytes.
    """

    def __init__(self, folder: Path, what: str) -> None:
        self._path = folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', what)}.json"
        self._found: dict[str, Any] = self._read()

    def get(self, key: str) -> Engine | None:
        """The engine of a problem, if it was measured before."""
        try:
            name, nbytes, options = self._found[key]
            return Engine(str(name), int(nbytes), tuple(sorted((str(k), int(v)) for k, v in options.items())))
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def put(self, key: str, engine: Engine) -> None:
        """Remember an engine, in the file as well: whole or not at all."""
        others = self._read()
        self._found = {**self._found, **others, key: [engine.name, engine.workspace_bytes, dict(engine.options)]}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            temporary.write_text(json.dumps(self._found, indent=1), encoding="utf-8")
            os.replace(temporary, self._path)

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            data = json.loads(self._path.read_text(encoding="utf-8"))
            return data if isinstance(data, dict) else {}
        return {}


def cache_folder() -> Path:
    """Where engines are remembered: ``minidnn`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minidnn"
