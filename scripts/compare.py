"""Compare all policies under several budgets, by prediction: python scripts/compare.py -a resnet50 -b 64 --profile v100"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outputs import make_folders, waiting

import models
from arguments import build_graph, request_options
from layup import Context
from layup.policies import find
from layup.report import Comparison, compare, comparison_text
from minidnn.batch_rules import unusable_tail
from minidnn.budget import parse_bytes
from minidnn.commandline import Parser, add_model, complete, run
from minidnn.defaults import known_facts
from minidnn.errors import UserError
from minidnn.metrics import provenance, write_json
from minidnn.prepare import prepare
from minidnn.request import Request
from minidnn.schedule.plan import keep
from minidnn.schedule.text import human_bytes

LARGE_IMAGE, LARGE_CLASSES, SMALL_CLASSES = 200, 1000, 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises what ``minidnn.commandline.run`` prints."""
    parser = Parser((__doc__ or "").strip())
    add_model(parser)
    group = parser.add_argument_group("what is compared")
    add = group.add_argument
    add(
        "--profile", metavar="GPU", default="h200", help="GPU whose times are predicted: a name, a file (default: h200)"
    )
    add(
        "--budgets",
        metavar="SIZE,...",
        help="device budgets: 4GiB, 80%% of what keep reserves (default: six, from what keep reserves to the smallest)",
    )
    add("--policies", metavar="NAME,...", help="some policies only (default: all)")
    add("--host-memory", metavar="SIZE", help="pinned host bytes a plan may take")
    add("--theta", metavar="T", type=float, default=1.0, help="of the policy layup (default: 1.0)")
    add("--workspace-limit", metavar="SIZE", help="scratch of one convolution")
    add("--recipe", metavar="FILE", help="a recipe.json: repeats every choice that can change a bit")
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="write the rows, with machine, versions and command")
    group.add_argument("--png", metavar="FILE", help="draw step time over the budget (needs matplotlib)")
    args = parser.parse_args(argv)
    if args.png is not None and find_spec("matplotlib") is None:
        raise UserError('--png needs matplotlib: python -m pip install -e ".[report]", or leave --png out')
    if not args.theta > 0:
        raise UserError(f"--theta {args.theta:g} must be above 0; 1.0 is usual")
    names = None if args.policies is None else [find(name.strip()).name for name in args.policies.split(",")]
    make_folders(args, "json", "png")
    args.memory, args.stream = None, False
    args = completed(args)
    waiting(f"planning {args.arch} by every policy under every budget")
    request = request_of(args)
    comparison = compare(
        Context(request, theta=args.theta, host_memory=host_budget(args)), budgets(args, request), names
    )
    print(f"{title(args)}: predicted for {request.gpu.device}")
    print(comparison_text(comparison))
    if args.json is not None:
        write_json(Path(args.json), {"rows": comparison.to_json()["rows"]} | provenance(args.seed))
    if args.png is not None:
        draw(Path(args.png), comparison, f"{title(args)}, {request.gpu.device}")
    return 0


def completed(args: Namespace) -> Namespace:
    """All options that decide memory. Without ``--data``: images and classes that the net was made for."""
    args.lr_sched = args.epochs = args.augment = args.warmup = None  # of training alone
    if args.arch is None:
        raise UserError("-a/--arch is missing, for example: -a resnet20")
    if args.data is None:
        known = models.MODELS.get(args.arch)
        size = args.image_size or (known.image_size if known else 224)
        classes = args.num_classes or (LARGE_CLASSES if size >= LARGE_IMAGE else SMALL_CLASSES)
        args.batch_size = args.batch_size or 64
        args.data = f"synthetic:{args.batch_size},{size},{size},3,{classes}"
    args = complete(args)
    args.lr = getattr(args, "lr", None) or 0.1  # decides no byte
    return args


def request_of(args: Namespace) -> Request:
    """What is asked of the step besides plan and budgets; planned only, without arrays."""
    facts = known_facts(args.data)
    graph = build_graph(args, facts)
    tail = None if args.drop_last else facts.train % args.batch_size or None
    options = {k: v for k, v in request_options(args).items() if k not in ("host_memory", "streamed", "theta")}
    return prepare(graph, device=None, tail=None if unusable_tail(graph, tail) else tail, **options)


def host_budget(args: Namespace) -> int | None:
    """The budget of pinned memory in bytes."""
    return None if args.host_memory is None else parse_bytes(args.host_memory, what="--host-memory")


def budgets(args: Namespace, request: Request) -> list[int] | None:
    """The budgets of ``--budgets`` in bytes."""
    if args.budgets is None:
        return None
    whole = request.program(keep()).reserved_bytes
    return [parse_bytes(text.strip(), what="--budgets", whole=lambda: whole) for text in args.budgets.split(",")]


def title(args: Namespace) -> str:
    """Net, batch and precision."""
    blocks = f" {','.join(map(str, args.blocks))}" if args.blocks else ""
    return f"{args.arch}{blocks}, batch {args.batch_size}, {args.precision}"


def draw(path: Path, comparison: Comparison, heading: str) -> None:
    """Draw the predicted step time of every policy over the budget, as steps: a plan fits every larger budget, too."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scale = max(row.memory_bytes for row in comparison.rows)
    unit, size = ("GiB", 2**30) if scale >= 2**30 else ("MiB", 2**20)
    figure, axes = pyplot.subplots(figsize=(9, 5.2), layout="constrained")
    right = scale * 1.06 / size
    for style, name in zip(STYLES, dict.fromkeys(row.policy for row in comparison.rows), strict=False):
        points = sorted(
            {(r.reserved_bytes / size, r.step_seconds * 1e3) for r in comparison.rows
             if r.policy == name and r.reserved_bytes is not None and r.step_seconds is not None}
        )  # fmt: skip
        if not points:
            continue
        x, y = [p[0] for p in points] + [right], [p[1] for p in points] + [points[-1][1]]
        wide: dict[str, Any] = {"linewidth": 4.5, "zorder": 1, "alpha": 0.55} if name == "auto" else {"linewidth": 1.6}
        axes.step(x, y, where="post", label=name, markevery=range(len(points)), **style, **wide)
    axes.axvspan(0, comparison.minimum_bytes / size, color="#e6e8ea")
    axes.axvline(comparison.minimum_bytes / size, color="#c2410c")
    axes.annotate(
        f"minimum {human_bytes(comparison.minimum_bytes)}", (comparison.minimum_bytes / size, 0.5), (-5, 0), rotation=90,
        ha="right", va="center", xycoords=("data", "axes fraction"), textcoords="offset points", color="#c2410c",
    )  # fmt: skip
    axes.set(xlabel=f"reserved device memory, {unit}", ylabel="predicted step time, ms", title=heading)
    axes.set_xlim(comparison.minimum_bytes * 0.75 / size, right)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


_OKABE_ITO = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8f979f", "#000000", "#555555")
_MARKERS = "osD^vP*XH"
STYLES: list[dict[str, Any]] = [
    {"color": colour, "marker": marker} for colour, marker in zip(_OKABE_ITO, _MARKERS, strict=True)
]


if __name__ == "__main__":
    sys.exit(run(main))
