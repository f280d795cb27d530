"""What a delay of one costs: accuracy against epochs and seconds, with and without it, heavy-ball and Nesterov momentum.

    python scripts/reproduce/staleness.py                                                  # digits, lenet, minutes
    python scripts/reproduce/staleness.py --data fashion_mnist:DIR --nets resnet20 cifar_quick --device cuda:0 --jobs 8

``ring_delayed`` computes W(t+1) = W(t) - lr * mean g(W(t-1)) on any number of ranks, and the mean is over the whole batch: so
its accuracy is found on one, which trains on the joint batch (tests/parallel/test_strategies.py: ranks and one process give
the same bits). Only batch norm differs there: on N ranks it sees an Nth of the batch, on one all of it.

Every run is one of ``scripts/train.py``, with its schedule of the rate. First the rate is swept, on seed 0, for each of the four;
then, for each kind of momentum, the rate at which the *synchronous* run did best is given to both, over all seeds; and the
delayed run gets its own best rate, too. A rate at which any seed diverges is nobody's best. Rates are chosen by the accuracy
on the test images, which flatters all alike.

``--jobs N`` makes N runs at a time, each in a process of its own; what they find does not depend on N. ``--cache`` remembers
each run as it ends, so that the same command goes on where it was stopped. Exit code 3: runs are missing, because
``--seconds`` were up.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import threads  # noqa: F401

# isort: split
import math
import signal
import struct
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from figures import options, save
from staleness_jobs import carry_out
from staleness_runs import MOMENTA, Results, Setting, Training, train_one
from staleness_study import TARGET_POINTS, Order, Study, compare, table

from minidnn.commandline import run
from minidnn.data import Dataset, load
from minidnn.defaults import DEFAULTS, name_of
from minidnn.errors import UserError

TEST_SHARE = 6
"""Of images with --train-limit: MNIST has six training images for a test image."""
MOST_NAMED = 8
"""Missing runs that are told one by one."""
UNFINISHED = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    started = time.monotonic()
    args = parse(argv)
    name, _, place = args.data.partition(":")
    source = f"mnist:{place}" if name == "fashion_mnist" else args.data
    common = ("epochs", "warmup", "batch_size", "image_size", "train_limit", "precision")
    facts = {"data": name, "device": args.device.partition(":")[0], **{key: getattr(args, key) for key in common}}
    study = Study({net: rates_of(net, source, args.rates) for net in args.nets}, args.seeds)
    results = Results(facts, args.cache)
    with tempfile.TemporaryDirectory() as folder:
        if args.train_limit is not None:
            limit(source, args.train_limit, Path(folder))
            source = f"mnist:{folder}"
        training = Training(
            source, args.epochs, args.warmup, args.batch_size, args.image_size, args.device, args.precision, folder
        )
        make_runs(args, study, results, training, started)
    missing = study.missing(results)
    rows = [compare(study, results, net, momentum) for net in study.rates for momentum in MOMENTA]
    print(table(rows))
    found = {
        **facts,
        "seeds": args.seeds,
        "target_points": TARGET_POINTS,
        "missing": list(map(str, missing)),
        "rows": rows,
    }
    if missing and args.json is None:
        print("\nnot written, because runs are missing: --json FILE writes what there is")
    else:
        save(f"staleness_{name}", found, args.json, args.tiny)
    if missing:
        print(f"not finished: {told(missing, study, results)}; the same command with --cache goes on", file=sys.stderr)
    return UNFINISHED if missing else 0


def parse(argv: Sequence[str] | None) -> Namespace:
    """The options. Raises UserError for what cannot be."""
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
    add("--train-limit", type=int, metavar="N",
        help="the first N training images, and a sixth as many test images, of IDX files")  # fmt: skip
    add("--cache", type=Path, metavar="FILE", help="remember runs, and do not repeat them")
    add("--jobs", type=int, default=1, metavar="N", help="runs at a time (1)")
    add("--seconds", type=float, default=math.inf, metavar="S", help="begin no run later than this (no limit)")
    args = parser.parse_args(argv)
    if args.tiny:
        args.epochs, args.seeds, args.rates, args.warmup = 1, 1, [1.0], 0.0
    if min(args.epochs, args.seeds, args.jobs, *args.rates) <= 0:
        raise UserError("--epochs, --seeds, --rates and --jobs: give more than 0 of each")
    if args.data == "digits":
        args.image_size = args.image_size or 16
    return args


def rates_of(net: str, source: str, factors: Sequence[float]) -> list[float]:
    """The rates of a net's sweep, rising."""
    normed = net.startswith(("resnet", "densenet")) or net.endswith("_bn")
    base = DEFAULTS[name_of(source)].lr * (1.0 if normed else 0.1)
    return sorted({base * factor for factor in factors})


def make_runs(args: Namespace, study: Study, results: Results, training: Training, started: float) -> None:
    """Make the runs that are missing, as many as there is time for, and remember each as it ends."""
    order = Order(study, results, measures=args.device != "emulated", deadline=started + args.seconds)
    with closing(carry_out(partial(train_one, training), order, args.jobs)) as runs:
        for setting, result in runs:
            results.put(setting, {**result, "alone": args.jobs == 1 or setting in order.alone})
            said = result.get("diverged") or f"{result['acc1'][-1]:.2%}"
            left = len(study.missing(results))
            print(f"{time.monotonic() - started:5.0f} s  {setting}: {said}; {left} left", file=sys.stderr, flush=True)


def told(missing: Sequence[Setting], study: Study, results: Results) -> str:
    """The runs that are missing, in words."""
    names = ", ".join(map(str, missing[:MOST_NAMED])) + (", ..." if len(missing) > MOST_NAMED else "")
    open_rates = any(None in study.chosen(results, net, m).values() for net in study.rates for m in MOMENTA)
    return f"{len(missing)} runs are missing{' and those over the seeds' if open_rates else ''}: {names}"


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


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, upon which what it has started ends, too
    sys.exit(run(main))
