"""How deep a ResNet trains in 12 GB: the greatest depth of every policy, and the time of a step there.

    python scripts/reproduce/depth.py [--stream] [--whole-gradients] [--cache probes.json]

ResNet (6, 32, n3, 6) at batch 16, 224 x 224, fp32, SGD with momentum, as SuperNeurons, Layrub and Layup count: depth =
3 (6 + 32 + n3 + 6) + 2. For every policy and budget the deepest net whose whole program fits is planned, and so is the next
one, which does not fit. Nothing is extrapolated: straight lines through earlier probes only choose what is planned next.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import WORKSPACES, markdown, names_of, options, percent, save, size
from probes import Net, Probes
from walls import BATCH, BLOCKS, IMAGE_SIZE, arithmetic, depth, exactly, wall_table
from walls import WALLS as WALLS
from walls import parameters as parameters

from minidnn.budget import parse_bytes
from minidnn.commandline import run

BUDGETS = "12GB,12GiB,11441MiB"
POLICIES = ("naive", "keep", "vdnn_conv", "superneurons", "superneurons_memory", "sqrt_n", "vdnn", "layup", "auto")
DEEPEST = 3288
PUBLISHED = (
    (1517, "Layrub", "12 GB, batch 16", "abstract, TACO 15(3), 2018"),
    (1920, "SuperNeurons", "12 GB, batch 16, as Layup cites it", "abstract of Layup"),
    (2504, "Layup", "12 GB, batch 16", "abstract, TACO 16(4), 2019"),
)
"""Depth, system, setting, source. 1,920 is no depth of this family: 1,919 (n3 = 595) and 1,922 (n3 = 596) are nearest."""


def search(load: Callable[[int], float], limit: int, start: int = 1, hints: Iterable[int] = ()) -> int | None:
    """The greatest n from ``start`` to ``limit`` with ``load(n) <= 1``; None if there is none. ``load`` rises, nearly linearly.

    Every answer is probed: n fits, and n + 1 does not or is beyond the limit. ``hints``: n that are cheap to ask for.
    """
    known = {start: load(start)}
    if known[start] > 1:
        return None
    known |= {n: load(n) for n in hints if start < n <= limit}
    if len(known) == 1 and start < limit:
        other = min(limit, start + max(4, (limit - start) // 16 if start == 1 else 0))
        known[other] = load(other)
    while True:
        low = max(n for n, size in known.items() if size <= 1)
        high = min((n for n, size in known.items() if size > 1), default=limit + 1)
        if high - low <= 1:
            return low
        near = min(known, key=lambda n: (abs(known[n] - 1), n))
        others = sorted((n for n in known if n != near), key=lambda n: (abs(n - near) < 4, abs(n - near)))
        slopes = [(known[far] - known[near]) / (far - near) for far in others]
        slope = next((slope for slope in slopes if 0 < slope < math.inf), 0.0)
        if not slope or len(known) > 30:  # no line at all
            guess = (low + high) // 2
        else:
            guess = min(max(near + math.floor((1 - known[near]) / slope), low + 1), high - 1)
        known[guess] = load(guess)


@dataclass(frozen=True, slots=True)
class Row:
    """The greatest depth of a policy under a budget; all but ``needs_bytes`` is None where no depth fits.

    ``needs_bytes``: what the next deeper net would reserve at least, or the shallowest where none fits; None at the limit and
    where host memory is too small for the next one: then ``needs_host_bytes`` says what it would take of that.
    ``keep_seconds``: a step of the same net with unlimited memory.
    """

    policy: str
    memory_bytes: int
    n3: int | None
    depth: int | None
    reserved_bytes: int | None
    host_bytes: int | None
    step_seconds: float | None
    keep_seconds: float | None
    needs_bytes: int | None
    at_limit: bool
    needs_host_bytes: int | None = None


def deepest(probes: Probes, policy: str, memory: int, limit: int, start: int, stages: tuple[int, int, int]) -> Row:
    """Search, then find the fastest plan that fits at that depth."""
    hints = probes.known(policy)
    n3 = search(lambda n: probes.load(policy, n, memory), limit, start, hints)
    if n3 is None and start > 1:
        n3 = search(lambda n: probes.load(policy, n, memory), start - 1, 1, hints)
    if n3 is None:
        needs, needs_host = missing(probes, policy, 1, memory)
        return Row(policy, memory, None, None, None, None, None, None, needs, False, needs_host)
    best = probes.fastest(policy, n3, memory)
    beyond = (None, None) if n3 >= limit else missing(probes, policy, n3 + 1, memory)
    sizes = (best["reserved_bytes"], best["host_bytes"])
    times = (best["seconds"], best["keep_seconds"])
    return Row(policy, memory, n3, depth(n3, stages), *sizes, *times, beyond[0], n3 >= limit, beyond[1])


def missing(probes: Probes, policy: str, n3: int, memory: int) -> tuple[int | None, int | None]:
    """What a net that does not fit needs: of device memory or, where that is what it lacks, of host memory."""
    load, of_host = probes.scarcest(policy, n3, memory)
    if not of_host:
        return math.ceil(load * memory), None
    assert probes.net.host_memory is not None
    return None, math.ceil(load * probes.net.host_memory)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = options(__doc__, "k40")
    add = parser.add_argument
    add("--memory", metavar="SIZE,...", default=BUDGETS, help=f"device budgets ({BUDGETS})")
    add("--policies", metavar="NAME,...", help="some policies only")
    add("--stream", action="store_true", help="parameters and optimizer state live in pinned host memory")
    add("--host-memory", metavar="SIZE", help="pinned host bytes a plan may take (no limit; with --stream 100GiB)")
    add("--whole-gradients", action="store_true", help="one update after backward, as in Caffe: all gradients stay")
    add("--deepest", metavar="N3", type=int, default=DEEPEST, help=f"look at no deeper net ({DEEPEST}: 9,998 layers)")
    add("--start", metavar="N3", type=int, default=1, help="a depth that fits, to search from (1)")
    add("--cache", metavar="FILE", type=Path, help="remember what was planned, so that a search can be continued")
    args = parser.parse_args(argv)
    stages, image_size, budgets = BLOCKS, IMAGE_SIZE, [parse_bytes(text) for text in args.memory.split(",")]
    limit, host_text = args.deepest, args.host_memory or ("100GiB" if args.stream else None)
    if args.tiny:
        stages, image_size, limit = (1, 1, 1), 32, 8
        budgets = [parse_bytes("140MiB")] if args.memory == BUDGETS else budgets
    host = None if host_text is None else parse_bytes(host_text, what="--host-memory")
    net = Net(stages, BATCH, image_size, args.profile, host, args.stream, args.whole_gradients)
    probes = Probes(net, args.cache)
    rows: list[Row] = []
    for policy in names_of(args.policies, POLICIES):
        for memory in sorted(budgets, reverse=True):
            start = args.start
            if policy == "auto":  # whatever any other policy fits, auto fits
                start = max([start, *(row.n3 or 1 for row in rows if row.memory_bytes == memory)])
            rows.append(deepest(probes, policy, memory, limit, start, stages))
            print(text([rows[-1]]).splitlines()[-1], file=sys.stderr, flush=True)
    walls = arithmetic(budgets)
    print(
        f"ResNet {stages[0]}, {stages[1]}, n3, {stages[2]}; batch {BATCH}; {image_size} x {image_size}; {net.title}\n"
    )
    print(text(rows))
    print(
        f"\nPublished\n\n{markdown(('depth', 'system', 'setting', 'source'), [(f'{p[0]:,}', *p[1:]) for p in PUBLISHED])}"
    )
    print(f"\nArithmetic: what alone fills the budget\n\n{wall_table(walls, budgets)}\n\n{WORKSPACES}")
    kind = "_".join(
        ["depth", *(["stream"] if args.stream else []), *(["whole_gradients"] if args.whole_gradients else [])]
    )
    as_json = [{name: getattr(row, name) for name in Row.__slots__} for row in rows]
    published = [dict(zip(("depth", "system", "setting", "source"), entry, strict=True)) for entry in PUBLISHED]
    about = {
        "batch": BATCH,
        "image_size": image_size,
        "profile": args.profile,
        "stages": stages,
        "host_memory_bytes": host,
    }
    result = {**about, "streamed": args.stream, "whole_gradients": args.whole_gradients, "rows": as_json}
    save(f"{kind}_{args.profile}", {**result, "published": published, "arithmetic": walls}, args.json, args.tiny)
    return 0


def text(rows: Sequence[Row]) -> str:
    """The depths as a table."""
    head = (
        "policy",
        "budget",
        "greatest depth",
        "n3",
        "reserved",
        "pinned host",
        "step s",
        "over keep",
        "the next needs",
    )
    cells: list[tuple[object, ...]] = []
    for row in rows:
        budget, needs = exactly(row.memory_bytes), size(row.needs_bytes)
        if row.needs_host_bytes is not None:
            needs = f"{size(row.needs_host_bytes)} pinned"
        if row.n3 is None:
            cells.append((row.policy, budget, "none", None, None, None, None, None, needs))
            continue
        assert row.step_seconds is not None and row.keep_seconds is not None
        times = (f"{row.step_seconds:.3f}", percent(row.step_seconds / row.keep_seconds - 1))
        deep = f"{row.depth:,}{' or more' if row.at_limit else ''}"
        cells.append((row.policy, budget, deep, row.n3, size(row.reserved_bytes), size(row.host_bytes), *times, needs))
    return markdown(head, cells)


if __name__ == "__main__":
    sys.exit(run(main))
