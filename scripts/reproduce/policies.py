"""What every policy takes on the nets of the papers: bytes on the device, bytes on the host, and slowdown.

    python scripts/reproduce/policies.py [--nets vgg16:256,resnet50:128] [--profile p100]

Slowdown is against ``keep`` with unlimited memory, as vDNN's is against its oracle. A policy without a knob is one plan;
``sqrt_n`` is shown under the smallest budget that runs; ``auto`` at 80, 60, 50 and 40 % of what ``keep`` reserves, in 12 GB
where that is less, and under its smallest budget.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from figures import WORKSPACES, markdown, names_of, options, percent, save, size

import models
from layup.context import Context
from layup.evaluate import Candidate
from layup.planner import Planner
from layup.policies import POLICIES
from minidnn.commandline import run
from minidnn.errors import UserError
from minidnn.prepare import prepare
from minidnn.schedule.instruction import COMPUTE, Op
from minidnn.schedule.program import Schedule
from minidnn.schedule.simulate import live_curve, schedule_times

NETS = "alexnet_2012:256,vgg16:256,googlenet:256,resnet50:128"
SHARES = (80, 60, 50, 40)
TITAN_X_BYTES = 12_000_000_000
PUBLISHED = (
    "vDNN (MICRO 2016, abstract): VGG-16 at batch 256, 28 GB, trains on a 12 GB Titan X with 18 % loss against an oracle with "
    "enough memory; average use of GPU memory falls by 89 % for AlexNet and 95 % for GoogLeNet",
)


class Row(NamedTuple):
    """One policy on one net. None where no plan fits.

    ``setting``: for ``auto`` the budget; ``average_bytes``: of live bytes over the time of a step; ``recomputed_share``: of
    the FLOPs of forward; ``over_keep``: step time over that of ``keep``, less 1.
    """

    net: str
    batch: int
    policy: str
    setting: str
    peak_bytes: int | None = None
    average_bytes: int | None = None
    reserved_bytes: int | None = None
    host_bytes: int | None = None
    share_of_keep: float | None = None
    step_seconds: float | None = None
    over_keep: float | None = None
    recomputed_share: float | None = None


def average_bytes(context: Context, schedule: Schedule) -> int:
    """Live device bytes averaged over a step: each row of the compute stream weighs as long as it and the wait before it."""
    request = context.request
    times = schedule_times(schedule.rows, request.gpu, request.recipe.precision)
    total = before = 0.0
    for row, live, (_, end) in zip(schedule.rows, live_curve(schedule.rows, context.base_bytes), times, strict=True):
        if row.stream == COMPUTE and end > before:
            total += live * (end - before)
            before = end
    return round(total / before)


def rows_of(net: str, batch: int, context: Context, names: Sequence[str], shares: Sequence[int]) -> Iterator[Row]:
    """Plan all policies on one net."""
    auto = Planner(context, "auto")
    keep = auto.keep
    whole, unlimited = keep.program.reserved_bytes, keep.seconds

    def row(policy: str, setting: str, candidate: Candidate | None) -> Row:
        if candidate is None:
            return Row(net, batch, policy, setting)
        profile = candidate.program.prediction
        flops = {op: sum(r.flops for r in candidate.train.rows if r.op is op) for op in (Op.FORWARD, Op.RECOMPUTE)}
        return Row(
            net,
            batch,
            policy,
            setting,
            profile.peak_bytes,
            average_bytes(context, candidate.train),
            profile.reserved_bytes,
            profile.host_bytes,
            profile.reserved_bytes / whole,
            candidate.seconds,
            candidate.seconds / unlimited - 1,
            flops[Op.RECOMPUTE] / flops[Op.FORWARD],
        )

    for name in names:
        if name == "auto":
            for share in shares:
                yield row(name, f"{share} % of keep", auto.select(whole * share // 100, context.host_memory))
            if whole > TITAN_X_BYTES:
                yield row(name, "12 GB", auto.select(TITAN_X_BYTES, context.host_memory))
            yield row(name, "fewest bytes", leanest(auto))
        else:
            setting = "fewest bytes" if POLICIES[name].knob else ""
            yield row(name, setting, keep if name == "keep" else leanest(Planner(context, name)))


def leanest(planner: Planner) -> Candidate | None:
    """The fastest plan under the smallest budget that runs: several plans may take the fewest bytes."""
    host_memory = planner.context.host_memory
    smallest = planner.smallest(host_memory)
    return smallest and planner.select(smallest.program.reserved_bytes, host_memory)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = options(__doc__, "k40")
    parser.add_argument("--nets", metavar="NAME:BATCH,...", help=f"nets and batches ({NETS})")
    parser.add_argument("--policies", metavar="NAME,...", help="some policies only")
    args = parser.parse_args(argv)
    nets = nets_of(args.nets or ("lenet:8,cifar_quick:8" if args.tiny else NETS))
    names = names_of(args.policies, list(POLICIES))
    rows: list[Row] = []
    for net, batch in nets:
        context = Context(prepare(models.build(net, batch=batch), device=None, profile=args.profile))
        found = list(rows_of(net, batch, context, names, SHARES))
        print(f"{net}, batch {batch}, fp32, SGD with momentum, {args.profile}\n\n{table(found)}\n", flush=True)
        rows += found
    print(*(f"Published: {line}.\n" for line in PUBLISHED), sep="\n")
    print(WORKSPACES)
    name = f"policies_{Path(args.profile).stem}"
    result = {"profile": args.profile, "rows": [row._asdict() for row in rows], "published": PUBLISHED}
    save(name, result, args.json, args.tiny)
    return 0


def nets_of(text: str) -> list[tuple[str, int]]:
    """Names and batches of a list. Raises UserError for an entry of another form."""
    found = []
    for entry in text.split(","):
        name, colon, batch = entry.strip().partition(":")
        if not colon or not batch.isdecimal() or int(batch) < 1:
            raise UserError(f"--nets {entry.strip()!r} is no net with a batch; write vgg16:256")
        found.append((name, int(batch)))
    return found


def table(rows: Sequence[Row]) -> str:
    """The policies of one net."""
    head = (
        "policy", "at", "peak", "average", "reserved", "of keep", "in 12 GB", "pinned host", "step ms", "over keep",
        "recomputed",
    )  # fmt: skip
    cells: list[tuple[object, ...]] = []
    for row in rows:
        if row.reserved_bytes is None or row.step_seconds is None:
            cells.append((row.policy, row.setting, *["does not fit"], *[None] * 8))
            continue
        sizes = (
            size(row.peak_bytes),
            size(row.average_bytes),
            size(row.reserved_bytes),
            f"{100 * (row.share_of_keep or 0):.1f} %",
        )
        fits = "yes" if row.reserved_bytes <= TITAN_X_BYTES else "no"
        times = (f"{row.step_seconds * 1e3:,.1f}", percent(row.over_keep), percent(row.recomputed_share))
        cells.append((row.policy, row.setting, *sizes, fits, size(row.host_bytes), *times))
    return markdown(head, cells)


if __name__ == "__main__":
    sys.exit(run(main))
