"""What a delay of one costs: accuracy against epochs and seconds, with and without it, heavy-ball and Nesterov momentum.

    python scripts/reproduce/staleness.py                                                  # digits, lenet, minutes
    python scripts/reproduce/staleness.py --data fashion_mnist:DIR --nets resnet20 cifar_quick --device cuda:0 --epochs 20

``ring_delayed`` computes W(t+1) = W(t) - lr * mean g(W(t-1)) on any number of ranks, and the mean is over the whole batch: so
its accuracy is found on one, which trains on the joint batch (tests/parallel/test_strategies.py: ranks and one process give
the same bits). Only batch norm differs there: on N ranks it sees an Nth of the batch, on one all of it.

Every run is one of ``scripts/train.py``, with its schedule of the rate. First the rate is swept, on seed 0, for each of the four;
then, for each kind of momentum, the rate at which the *synchronous* run did best is given to both, over all seeds; and the
delayed run gets its own best rate, too. Rates are chosen by the accuracy on the test images, which flatters all alike.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import struct
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from figures import markdown, options, save, signed

import train
from minidnn.commandline import run
from minidnn.data import Dataset, load
from minidnn.defaults import DEFAULTS, name_of
from minidnn.errors import UserError
from minidnn.metrics import write_json

MOMENTA = {"heavy-ball": "sgd", "nesterov": "nesterov"}
TEST_SHARE = 6
"""Of images with --train-limit: MNIST has six training images for a test image."""
TARGET_POINTS = 0.5


class Setting(NamedTuple):
    """One run. ``delay``: 0, plain training, or 1, ``ring_delayed``."""

    net: str
    momentum: str
    delay: int
    rate: float
    seed: int

    @property
    def key(self) -> str:
        """Its name in the cache."""
        return f"{self.net} {self.momentum} delay {self.delay} lr {self.rate:g} seed {self.seed}"


class Runs:
    """Runs of ``train.py``, remembered by setting."""

    def __init__(self, args: Namespace, data: str) -> None:
        self.args, self.data = args, data
        self.known: dict[str, Any] = {}
        if args.cache is not None and args.cache.exists():
            self.known = json.loads(args.cache.read_text(encoding="utf-8"))

    def __call__(self, setting: Setting) -> dict[str, Any]:
        """Accuracy after every epoch, and seconds of training until then; ``diverged`` says why there are no more."""
        if setting.key not in self.known:
            self.known[setting.key] = result = self._train(setting)
            last = f"{result['acc1'][-1]:.2%}" if result["acc1"] else ""
            print(f"{setting.key}: {result.get('diverged') or last}", file=sys.stderr, flush=True)
            if self.args.cache is not None:
                write_json(self.args.cache, self.known)
        found: dict[str, Any] = self.known[setting.key]
        return found

    def _train(self, setting: Setting) -> dict[str, Any]:
        a = self.args
        with tempfile.TemporaryDirectory() as folder:
            words = ["--data", self.data, "-a", setting.net, "--epochs", a.epochs, "--opt", MOMENTA[setting.momentum]]
            words += [
                "--lr",
                f"{setting.rate:g}",
                "--seed",
                setting.seed,
                "--device",
                a.device,
                "--precision",
                a.precision,
            ]
            words += ["--policy", "keep", "--output", folder]
            words += [] if a.batch_size is None else ["-b", a.batch_size]
            words += [] if a.image_size is None else ["--image-size", a.image_size]
            words += ["--warmup", a.warmup]
            words += ["--strategy", "ring_delayed"] if setting.delay else []
            diverged = {}
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    train.main(list(map(str, words)))
            except UserError as error:
                if "the loss became" not in str(error):
                    raise
                diverged = {"diverged": str(error).partition(":")[0]}
            log = Path(folder) / "metrics.jsonl"
            lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        epochs = [line for line in lines if line["kind"] == "epoch"]
        seconds = [sum(line["seconds"] for line in epochs[: k + 1]) for k in range(len(epochs))]
        return {"acc1": [line["acc1"] for line in epochs], "seconds": seconds, **diverged}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = options(__doc__, "h200")
    add = parser.add_argument
    add("--data", default="digits", metavar="SET", help="as of train.py; fashion_mnist:DIR is mnist:DIR (digits)")
    add("--nets", nargs="+", default=["lenet"], metavar="NAME")
    add("--image-size", type=int, metavar="N", help="as of train.py (16 for digits, which are smaller than nets want)")
    add("--device", default="emulated", help="as of train.py (emulated)")
    add("--precision", default="fp32", help="as of train.py (fp32)")
    add("-b", "--batch-size", type=int, metavar="N", help="of all ranks together (default: of the data)")
    add("--epochs", type=int, default=12)
    add("--warmup", type=float, default=2.0, metavar="EPOCHS", help="of a rising rate, in all runs (2)")
    add("--seeds", type=int, default=5, metavar="N", help="seeds 0 to N - 1 (5)")
    add("--rates", nargs="+", type=float, default=[0.5, 1, 2, 4, 8], metavar="F",
        help="of the sweep, times the rate that train.py would take (0.5 1 2 4 8)")  # fmt: skip
    add(
        "--train-limit",
        type=int,
        metavar="N",
        help="the first N training images, and a sixth as many test images, of IDX files",
    )
    add("--cache", type=Path, metavar="FILE", help="remember runs, and do not repeat them")
    args = parser.parse_args(argv)
    if args.tiny:
        args.epochs, args.seeds, args.rates, args.warmup = 1, 1, [1.0], 0.0
    if min(args.epochs, args.seeds, *(args.rates or [0])) <= 0:
        raise UserError("--epochs, --seeds and --rates: give more than 0 of each")
    if args.data == "digits":
        args.image_size = args.image_size or 16
    name, _, place = args.data.partition(":")
    source = f"mnist:{place}" if name == "fashion_mnist" else args.data
    with tempfile.TemporaryDirectory() as folder:
        if args.train_limit is not None:
            limit(source, args.train_limit, Path(folder))
            source = f"mnist:{folder}"
        runs = Runs(args, source)
        found = [compare(runs, net, momentum) for net in args.nets for momentum in MOMENTA]
    print(table(found))
    facts = {
        key: getattr(args, key)
        for key in ("epochs", "warmup", "seeds", "batch_size", "image_size", "train_limit", "device", "precision")
    }
    save(
        f"staleness_{name}",
        {"data": name, **facts, "target_points": TARGET_POINTS, "rows": found},
        args.json,
        args.tiny,
    )
    return 0


def compare(runs: Runs, net: str, momentum: str) -> dict[str, Any]:
    """Sweep the rate with and without delay, and compare the two, over the seeds, at the rate tuned without."""
    args = runs.args
    normed = net.startswith(("resnet", "densenet")) or net.endswith("_bn")
    base = DEFAULTS[name_of(runs.data)].lr * (1.0 if normed else 0.1)
    rates = sorted(base * factor for factor in args.rates)
    sweep = {delay: [(rate, _last(runs(Setting(net, momentum, delay, rate, 0)))) for rate in rates] for delay in (0, 1)}
    tuned, _ = max(sweep[0], key=lambda pair: pair[1])
    row: dict[str, Any] = {"net": net, "momentum": momentum, "tuned_rate": tuned}
    row["sweep"] = [{"rate": rate, "delay_0": acc, "delay_1": sweep[1][k][1]} for k, (rate, acc) in enumerate(sweep[0])]
    own, _ = max(sweep[1], key=lambda pair: pair[1])
    for what, delay, rate in (("delay_0", 0, tuned), ("delay_1", 1, tuned), ("delay_1_own_rate", 1, own)):
        results = [runs(Setting(net, momentum, delay, rate, seed)) for seed in range(args.seeds)]
        last = [_last(result) for result in results]
        row[what] = {
            "rate": rate,
            "acc1": last,
            "diverged": sum("diverged" in result for result in results),
            "mean_acc1": statistics.fmean(last),
            "deviation": statistics.stdev(last) if len(last) > 1 else 0.0,
            "by_epoch": _means([result["acc1"] for result in results]),
            "seconds_by_epoch": _means([result["seconds"] for result in results]),
        }
    for what in ("delay_1", "delay_1_own_rate"):
        row[what]["points"] = 100 * (row[what]["mean_acc1"] - row["delay_0"]["mean_acc1"])
        row[what]["within_target"] = row[what]["points"] >= -TARGET_POINTS
    return row


def _last(result: Mapping[str, Any]) -> float:
    """Accuracy after the last epoch; 0 where it diverged."""
    return 0.0 if "diverged" in result else float(result["acc1"][-1])


def _means(curves: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*curves, strict=False)]


def limit(source: str, count: int, folder: Path) -> None:
    """Write the first images of a set as IDX files."""
    splits = load(source)
    for name, dataset, wanted in (("train", splits.train, count), ("t10k", splits.test, count // TEST_SHARE)):
        if not 1 <= wanted <= len(dataset):
            raise UserError(f"--train-limit {count}: {source} has {len(splits.train)} training images; give 6 to that")
        _write_idx(folder, name, dataset, wanted)


def _write_idx(folder: Path, name: str, dataset: Dataset, count: int) -> None:
    images, labels = dataset.images[:count], dataset.labels[:count].astype("uint8")
    head = struct.pack(">IIII", 0x803, count, *images.shape[1:3])
    (folder / f"{name}-images-idx3-ubyte").write_bytes(head + images.tobytes())
    (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels.tobytes())


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The comparison, and the sweep."""
    head = ("net", "momentum", "delay", "lr", "accuracy", "diverged", "points over delay 0", "within 0.5")
    cells = []
    for row in rows:
        for what in ("delay_0", "delay_1", "delay_1_own_rate"):
            at = row[what]
            cell = (f"{at['rate']:g}", f"{100 * at['mean_acc1']:.2f} ± {100 * at['deviation']:.2f}", at["diverged"])
            verdict = (
                (signed(at["points"], 2), "yes" if at["within_target"] else "no") if "points" in at else (None, None)
            )
            cells.append((row["net"], row["momentum"], what.replace("_", " "), *cell, *verdict))
    swept = [
        (row["net"], row["momentum"], f"{at['rate']:g}", f"{at['delay_0']:.2%}", f"{at['delay_1']:.2%}")
        for row in rows
        for at in row["sweep"]
    ]
    return f"{markdown(head, cells)}\n\n{markdown(('net', 'momentum', 'lr', 'delay 0', 'delay 1'), swept)}"


if __name__ == "__main__":
    sys.exit(run(main))
