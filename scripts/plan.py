"""Print what a training step takes, before it runs: no data, no arrays, no device."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import layup
from job import assemble, build_graph, request_options
from layup.classify import classify, table
from layup.report import waterfall, waterfall_text
from minidnn.commandline import Parser, add_memory, add_model, complete, run
from minidnn.defaults import known_facts
from minidnn.errors import UserError
from minidnn.layers import Graph
from minidnn.lifetime_map import lifetime_map
from minidnn.metrics import provenance, write_json
from minidnn.schedule.plan import keep, naive
from minidnn.schedule.text import human_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises what ``minidnn.commandline.run`` prints."""
    parser = Parser((__doc__ or "").strip())
    add_model(parser)
    add_memory(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--dump", action="store_true", help="print the schedule of a training step, row by row")
    group.add_argument("--explain", action="store_true", help="print times, bytes, class and reason of every layer")
    group.add_argument("--map", action="store_true", help="print when every buffer lives, as text")
    group.add_argument("--waterfall", action="store_true", help="print what each technique saves and costs")
    group.add_argument("--max-batch", action="store_true", help="find the largest batch that fits --memory")
    group.add_argument("--min-memory", action="store_true", help="find the smallest --memory that runs")
    group.add_argument("--json", metavar="FILE", help="write the numbers, with machine, versions and command")
    group.add_argument("--save-plan", metavar="FILE", help="write the plan for --plan")
    args = parser.parse_args(argv)
    args.epochs = args.lr = args.lr_sched = args.warmup = args.augment = None  # of training alone
    args = complete(args)
    if args.max_batch or args.min_memory:
        print(search(args))
        return 0
    job = assemble(args, device=None)
    profile = job.step.profile
    print(job.table())
    for line in (*job.decisions(), *(f"notice: {note}" for note in job.notes)):
        print(line)
    print(f"predicted time of a step on {args.profile}: {profile.step_seconds * 1e3:.3f} ms")
    print(f"at the peak, {profile.peak_text}, of {job.graph.parameter_count:,} parameters and the rest:")
    for resident in profile.residents_at_peak[:10]:
        print(f"  {human_bytes(resident.nbytes):>12}  {resident.role:<18}  {resident.layer or resident.name}")
    if args.explain:
        print(job.step.explain())
        if job.planned is not None:
            theta = args.theta or 1.0
            print(table(classify(job.planned.context.costs, theta), theta))
            print(job.planned.text())
    if args.map:
        schedule = job.step.program["train"]
        print(lifetime_map(schedule.rows, schedule.offsets, limit=60))
    if args.waterfall:
        print(waterfall_text(waterfall(job.step, [(naive(), job.naive), (keep(), job.keep)])))
    if args.dump:
        print(job.step.program["train"].dump())
    if args.save_plan is not None:
        write_json(Path(args.save_plan), job.step.plan.to_json() | {"recipe_hash": job.step.recipe.hash})
    if args.json is not None:
        write_json(Path(args.json), job.figures() | provenance(job.args.seed))
    return 0


def search(args: Namespace) -> str:
    """The largest batch under a budget, or the smallest budget for a batch, by the policy of the options."""
    if args.plan is not None:
        raise UserError(f"--plan {args.plan} was made for one batch and budget: give a --policy to search with")
    facts = known_facts(args.data)
    args.lr = 0.1  # a number; no byte depends on it
    policy = args.policy or "auto"
    same = request_options(args)
    if args.max_batch:
        if args.memory is None:
            raise UserError("--max-batch needs a budget: give --memory, for example --memory 4GiB")

        def build(batch: int) -> Graph:
            return build_graph(Namespace(**{**vars(args), "batch_size": batch}), facts)

        found = layup.max_batch(build, args.memory, policy, start=2, **same)
        return f"the largest batch of {args.arch} under {args.memory} with policy {policy} is {found}"
    nbytes = layup.minimum_memory(build_graph(args, facts), policy, **same)
    size = f"{nbytes} B ({human_bytes(nbytes)})"
    return f"the smallest budget of {args.arch} at batch {args.batch_size} with policy {policy} is {size}"


if __name__ == "__main__":
    sys.exit(run(main))
