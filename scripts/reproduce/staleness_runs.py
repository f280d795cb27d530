"""One run of the comparison with and without delay, and the file that remembers the runs there have been."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import train
from minidnn.errors import DoesNotFit, UserError
from minidnn.metrics import write_json

MOMENTA = {"heavy-ball": "sgd", "nesterov": "nesterov"}


class Setting(NamedTuple):
    """What tells one run from another. ``delay``: 0, plain training, or 1, ``ring_delayed``. As text: its name in the cache."""

    net: str
    momentum: str
    delay: int
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.net} {self.momentum} delay {self.delay} lr {self.rate:g} seed {self.seed}"


class Training(NamedTuple):
    """What all runs have in common, in the words of ``train.py``. ``folder``: for their files, which nobody reads later."""

    data: str
    epochs: int
    warmup: float
    batch_size: int | None
    image_size: int | None
    device: str
    precision: str
    folder: str


def train_one(training: Training, setting: Setting) -> dict[str, Any]:
    """Accuracy after every epoch, and seconds until then; ``diverged`` says why there are no more.

    Raises:
        UserError: it cannot be run; the sentence begins with the setting.
        KeyboardInterrupt: it was interrupted, and what there is of it is not the whole.
    """
    t = training
    with tempfile.TemporaryDirectory(dir=t.folder) as folder:
        words = ["--data", t.data, "-a", setting.net, "--epochs", t.epochs, "--opt", MOMENTA[setting.momentum]]
        words += ["--lr", f"{setting.rate:g}", "--warmup", t.warmup, "--seed", setting.seed]
        words += ["--device", t.device, "--precision", t.precision, "--policy", "keep", "--output", folder]
        words += [] if t.batch_size is None else ["-b", t.batch_size]
        words += [] if t.image_size is None else ["--image-size", t.image_size]
        words += ["--strategy", "ring_delayed"] if setting.delay else []
        code, diverged = 0, {}
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                code = train.main(list(map(str, words)))
        except (UserError, DoesNotFit) as error:
            if "the loss became" not in str(error):
                raise UserError(f"{setting}: {error}") from error
            diverged = {"diverged": str(error).partition(":")[0]}
        if code == 130:  # train.py turns Ctrl-C into an orderly end
            raise KeyboardInterrupt
        log = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8")
    epochs = [line for line in map(json.loads, log.splitlines()) if line["kind"] == "epoch"]
    seconds = [sum(line["seconds"] for line in epochs[: k + 1]) for k in range(len(epochs))]
    return {"acc1": [line["acc1"] for line in epochs], "seconds": seconds, **diverged}


class Results:
    """Results of runs by setting, in ``cache`` as well. ``facts``: what all of them have in common.

    Raises UserError for a cache of runs that had other facts, or a file that is none.
    """

    def __init__(self, facts: Mapping[str, Any], cache: Path | None = None) -> None:
        self._facts, self._cache = dict(facts), cache
        self._known: dict[str, dict[str, Any]] = {}
        if cache is None or not cache.exists():
            return
        try:
            data = json.loads(cache.read_text(encoding="utf-8"))
            had, self._known = dict(data["facts"]), dict(data["runs"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"--cache {cache} is no file of this command's: give another name") from error
        other = [f"{key} {had.get(key)}, now {value}" for key, value in self._facts.items() if had.get(key) != value]
        if other:
            raise UserError(f"--cache {cache} has runs of {'; '.join(other)}: give the same options, or another file")

    def get(self, setting: Setting) -> dict[str, Any] | None:
        """The result of a run; None if there is none."""
        return self._known.get(str(setting))

    def put(self, setting: Setting, result: Mapping[str, Any]) -> None:
        """Remember a result, in the file as well: whole or not at all."""
        self._known[str(setting)] = dict(result)
        if self._cache is not None:
            write_json(self._cache, {"facts": self._facts, "runs": self._known})
