"""Write report.html and trace.json of a run, or of options: python scripts/report.py --data digits -a resnet20 --memory 60%"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outputs import make_folder, waiting

from arguments import build_graph, read_json, read_plan, request_options
from compare import completed, host_budget, request_of
from layup import Context, Planned, Planner
from layup.evaluate import Candidate
from layup.planned import planned
from layup.refusal import refuse
from layup.report import compare, waterfall, write_report
from minidnn.batch_rules import unusable_tail
from minidnn.budget import parse_bytes
from minidnn.commandline import TRAINING, Parser, add_memory, add_model, run
from minidnn.compile import make_step
from minidnn.defaults import known_facts
from minidnn.errors import DoesNotFit, UserError
from minidnn.parallel.inprocess import InProcess
from minidnn.prepare import prepare
from minidnn.request import Request
from minidnn.schedule.plan import Plan
from minidnn.schedule.timing import schedule_times
from minidnn.step import CompiledStep
from minidnn.step_result import Measured
from minidnn.trace import TracedSchedule, write_trace

REPORT, TRACE = "report.html", "trace.json"
MOST_LAYERS = 1000
"""Nets with more layers get no budget curve unless it is asked for: comparing all policies takes minutes there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises what ``minidnn.commandline.run`` prints."""
    parser = Parser((__doc__ or "").strip())
    parser.add_argument(
        "run", nargs="?", metavar="RUN_FOLDER", help="of a training run: its report, instead of options"
    )
    add_model(parser)
    add_memory(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output", metavar="DIR", help="folder of the two files (default: RUN_FOLDER, else this folder)"
    )
    group.add_argument(
        "--curve", choices=("auto", "yes", "no"), default="auto", help="compare all policies (default: small nets)"
    )
    group.add_argument("--ranks", type=int, metavar="N", help="rank 0 of N, with --strategy (of a run folder: its own)")
    group.add_argument("--strategy", metavar="NAME", help="data parallelism, as of train.py: ring_delayed, ring ...")
    args = parser.parse_args(argv)
    measured, steps, on = Measured(), 1, args.data
    if args.run is not None:
        folder = Path(args.run)
        options, measured, steps = of_run(folder, args)
        on = options.data
    else:
        folder, options = Path("."), completed(args)
    if args.output is not None:
        folder = Path(args.output)
        make_folder(folder, f"--output {folder}")
    waiting(f"planning {options.arch}, by every policy and technique that the report compares")
    request = ranked_request(options)
    plan = plan_of(options, None if args.run is None else Path(args.run))
    streamed = plan.streamed if plan is not None else ("*",) if options.stream else ()
    context = Context(request, theta=options.theta or 1.0, host_memory=host_budget(options), streamed=streamed)
    planner = Planner(context, options.policy or "auto")
    chosen, refusal = choose(planner, plan, options.memory)
    step = make_step(context.request, chosen.plan, chosen.program, chosen.memory)
    step.measured, step.steps = measured, steps
    wanted = args.curve == "yes" or (args.curve == "auto" and len(step.graph.nodes) <= MOST_LAYERS)
    own = () if chosen.memory is None or refusal is not None else (chosen.memory,)
    curve = compare(context, also=own).to_json() if wanted else None
    blocks = " " + ",".join(map(str, options.blocks)) if options.blocks else ""
    name = f"{options.arch}{blocks} on {on}" if on else f"{options.arch}{blocks}"
    known = [(planner.keep.plan, planner.keep.program.prediction)]
    stages = waterfall(step, known)
    write_report(folder / REPORT, step, planned=chosen, curve=curve, waterfall=stages, memory=chosen.memory, title=name)
    write_trace(folder / TRACE, [traced(step, steps)])
    print(f"wrote {folder / REPORT} and {folder / TRACE}")
    if refusal is not None:
        raise refusal
    return 0


def ranked_request(args: Namespace) -> Request:
    """What is asked of the step: of rank 0 where there are ranks. Raises UserError for one of the two options alone."""
    if args.ranks is None and args.strategy is None:
        return request_of(args)
    if args.ranks is None or args.strategy is None or args.ranks < 1:
        raise UserError("--ranks and --strategy go together: give both, for example --ranks 4 --strategy ring_delayed")
    facts = known_facts(args.data)
    graph = build_graph(args, facts)
    tail = None if args.drop_last else facts.train % args.batch_size or None
    smallest = None if tail is None else max(1, tail // args.ranks)
    options = {k: v for k, v in request_options(args).items() if k not in ("host_memory", "streamed", "theta")}
    return prepare(
        graph, device=None, tail=None if unusable_tail(graph, smallest) else tail, strategy=args.strategy,
        communicator=InProcess.group(args.ranks)[0], **options,
    )  # fmt: skip


def of_run(folder: Path, given: Namespace) -> tuple[Namespace, Measured, int]:
    """The options of a run, what it measured, and its steps. Raises UserError for options beside a run folder."""
    options = (*TRAINING, "memory", "policy", "plan", "recipe", "ranks", "strategy")
    if any(getattr(given, name, None) is not None for name in options):
        raise UserError(f"{folder} has its options in args.json: give a run folder or options, not both")
    if not folder.is_dir():
        raise UserError(
            f"{folder} is no folder: give one that a training run has written, or options such as --data and -a"
        )
    saved = read_json(str(folder / "args.json"))
    args = Namespace(**{**vars(given), **saved})
    args.ranks = 1 if args.strategy is not None else None
    args.recipe = str(folder / "recipe.json")
    args.workspace_limit = None  # the recipe's
    if not (folder / "summary.json").is_file():  # the run goes on, or was interrupted
        return args, Measured(), 1
    summary = read_json(str(folder / "summary.json"))
    args.ranks = None if args.strategy is None else summary.get("ranks")
    measured: dict[str, Any] = summary.get("measured") or {}
    return args, Measured(**measured), int(summary.get("steps") or 1)


def plan_of(args: Namespace, run_folder: Path | None) -> Plan | None:
    """The plan of the run, or of ``--plan``; None if a policy makes it."""
    if run_folder is not None:
        data = read_json(str(run_folder / "plan.json"))
        data.pop("recipe_hash", None)
        return Plan.from_json(data)
    read = read_plan(args)
    return None if read is None else read[0]


def choose(planner: Planner, plan: Plan | None, memory: str | None) -> tuple[Planned, DoesNotFit | None]:
    """The given plan, or the policy's; where that does not fit, the smallest there is, and the refusal."""
    context = planner.context
    budget = None
    if memory is not None:
        budget = parse_bytes(memory, what="--memory", whole=lambda: planner.keep.program.reserved_bytes)
    refusal = None
    if plan is not None:
        candidate: Candidate | None = Candidate(context, context.request.translate(plan))
    else:
        candidate = planner.select(budget, context.host_memory)
    if candidate is None:
        refusal = refuse(planner, budget, context.host_memory)
        candidate = planner.smallest(context.host_memory) or planner.smallest() or planner.keep
    return planned(context, candidate, [candidate], budget), refusal


def traced(step: CompiledStep, steps: int) -> TracedSchedule:
    """The training schedule for the trace."""
    schedule, persistent = step.program["train"], step.program.persistent
    times = schedule_times(schedule.rows, step.gpu, step.precision.name)
    return TracedSchedule("train", schedule.rows, times, (*persistent.buffers, *persistent.host_buffers), steps)


if __name__ == "__main__":
    sys.exit(run(main))
