"""Print what a training step takes, before it runs: no data, no arrays, no device."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outputs import make_folders, waiting

import layup
from arguments import build_graph, request_options
from job import Job, assemble
from layup.classify import classify, table
from layup.report import waterfall, waterfall_text
from minidnn.budget import parse_bytes
from minidnn.commandline import Parser, add_memory, add_model, complete, run
from minidnn.defaults import known_facts
from minidnn.errors import UserError
from minidnn.layers import Graph
from minidnn.lifetime_map import lifetime_map
from minidnn.metrics import provenance, write_json
from minidnn.parallel.cost import Estimate, Links, counts, estimate
from minidnn.parallel.inprocess import InProcess
from minidnn.profiles import load
from minidnn.schedule.plan import keep, naive
from minidnn.schedule.ranks import Strategy
from minidnn.schedule.text import human_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises what ``minidnn.commandline.run`` prints."""
    parser = Parser((__doc__ or "").strip())
    add_model(parser)
    add_memory(parser)
    add_ranks(parser)
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
    links = links_of(args)
    make_folders(args, "json", "save_plan")
    args = complete(args)
    if args.max_batch or args.min_memory:
        waiting(f"searching: {args.arch} is planned for every {'batch' if args.max_batch else 'budget'} that is tried")
        print(search(args))
        return 0
    whole = args.batch_size if args.scaling == "strong" else args.batch_size * (args.ranks or 1)
    waiting(f"planning {args.arch}")
    job = job_of(args, args.ranks, whole)
    profile = job.step.profile
    if args.ranks is not None:
        print(f"what follows is rank 0's, of {args.ranks} ranks, strategy {args.strategy}, global batch {whole}")
    print(job.table())
    for line in (*job.decisions(), *(f"notice: {note}" for note in job.notes)):
        print(line)
    print(f"predicted time of a step on {args.profile}: {profile.step_seconds * 1e3:.3f} ms")
    print(f"alive at the peak, {profile.peak_text}, the largest first ({job.graph.parameter_count:,} parameters):")
    for resident in profile.residents_at_peak[:10]:
        print(f"  {human_bytes(resident.nbytes):>12}  {resident.role:<18}  {resident.layer or resident.name}")
    if rest := profile.residents_at_peak[10:]:
        print(f"  {human_bytes(sum(resident.nbytes for resident in rest)):>12}  {len(rest)} smaller")
    scaled = [] if links is None else scaling(args, links, job)
    if links is not None:
        print(scaling_text(args, links, scaled))
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
        waiting("planning once for each technique")
        print(waterfall_text(waterfall(job.step, [(naive(), job.naive), (keep(), job.keep)])))
    if args.dump:
        print(job.step.program["train"].dump())
    if args.save_plan is not None:
        write_json(Path(args.save_plan), job.step.plan.to_json() | {"recipe_hash": job.step.recipe.hash})
    if args.json is not None:
        figures = job.figures() | ({} if links is None else {"links": asdict(links), "scaling": scaled})
        write_json(Path(args.json), figures | provenance(job.args.seed))
    return 0


def add_ranks(parser: ArgumentParser) -> None:
    """Data parallelism, by prediction."""
    add = parser.add_argument_group("ranks: predicted speed-up of data parallelism").add_argument
    add("--ranks", type=int, metavar="N", help="predict steps of 1 to N ranks, one GPU each")
    add("--strategy", metavar="NAME", help="as of train.py: ring_delayed, ring, all_reduce, master_slave, tree")
    add("--scaling", choices=("strong", "weak"), default="strong",
        help="strong: -b is the batch of all ranks together; weak: of each rank (default: strong)")  # fmt: skip
    add("--latency", type=float, metavar="S", help="seconds of an empty message (default: the profile's interconnect)")
    add(
        "--bandwidth",
        metavar="B",
        help="bytes a second each way between two ranks: 25GB; scripts/reproduce/ring.py measures",
    )
    add("--ranks-per-node", type=int, metavar="N", help="ranks that are joined so; between nodes it takes what follows")
    add("--node-latency", type=float, metavar="S", help="seconds of an empty message between nodes")
    add("--node-bandwidth", metavar="B", help="bytes a second each way between nodes")


def links_of(args: Namespace) -> Links | None:
    """What joins the ranks; None without --ranks. Raises UserError for what has no effect or is missing."""
    given = [option for option in ("strategy", "latency", "bandwidth", "ranks_per_node", "node_latency", "node_bandwidth")
             if getattr(args, option) is not None]  # fmt: skip
    if args.ranks is None:
        if given or args.scaling == "weak":
            option = (given or ["scaling"])[0].replace("_", "-")
            raise UserError(
                f"--{option} has no effect without --ranks: leave it out, or give --ranks 4 --strategy ring"
            )
        return None
    if args.ranks < 1:
        raise UserError(f"--ranks {args.ranks}: give at least 1")
    if args.strategy is None:
        raise UserError(f"--ranks {args.ranks} needs a --strategy, for example --strategy ring_delayed")
    Strategy.parse(args.strategy)
    if args.max_batch or args.min_memory:
        raise UserError(
            f"--ranks {args.ranks} cannot be combined with --max-batch or --min-memory: leave one of them out"
        )
    if (args.latency is None) != (args.bandwidth is None):
        raise UserError("--latency and --bandwidth describe one link: give both, or neither for the profile's")
    node = [args.ranks_per_node, args.node_latency, args.node_bandwidth]
    if None in node and node != [None] * 3:
        raise UserError("--ranks-per-node, --node-latency and --node-bandwidth describe one machine: give all three")
    inside = Links.of(load(args.profile))
    if args.latency is not None:
        inside = Links(args.latency, parse_bytes(args.bandwidth, what="--bandwidth"))
    if None in node:
        return inside
    across = parse_bytes(args.node_bandwidth, what="--node-bandwidth")
    return Links(inside.latency_seconds, inside.bandwidth, args.ranks_per_node, args.node_latency, across)


def job_of(args: Namespace, ranks: int | None, batch: int) -> Job:
    """The planned step of rank 0 of so many, on a global batch."""
    if ranks is None:
        return assemble(args, device=None)
    args = Namespace(**{**vars(args), "batch_size": batch})
    return assemble(args, device=None, communicator=InProcess.group(ranks)[0], strategy=Strategy.parse(args.strategy))


def scaling(args: Namespace, links: Links, last: Job) -> list[dict[str, Any]]:
    """Predictions for 1 to --ranks ranks, each planned for itself under the same budget and policy.

    One rank trains without a strategy. ``last``: the job of them all.
    """
    rows: list[dict[str, Any]] = []
    one: Estimate | None = None
    for ranks in counts(args.ranks):
        batch = args.batch_size * (ranks if args.scaling == "weak" else 1)
        job = job_of(args, None, batch) if ranks == 1 else last if ranks == args.ranks else job_of(args, ranks, batch)
        found = estimate(job.step, links)
        one = one or found
        rows.append({
            **asdict(found), "images_per_second": found.images_per_second, "exposed_seconds": found.exposed_seconds,
            "speed_up": found.speed_up(one), "efficiency": found.speed_up(one) / ranks,
        })  # fmt: skip
    return rows


def scaling_text(args: Namespace, links: Links, rows: Sequence[dict[str, Any]]) -> str:
    """The predictions as a table."""
    text = f"links: {links.latency_seconds * 1e6:.1f} us, {links.bandwidth / 1e9:.1f} GB/s each way"
    if links.ranks_per_node is not None:
        text += (
            f" among {links.ranks_per_node} ranks of a node; {links.node_latency_seconds * 1e6:.1f} us, "
            f"{links.node_bandwidth / 1e9:.1f} GB/s between nodes"
        )
    lines = [f"{args.scaling} scaling of {args.strategy}, predicted for {args.profile}; {text}"]
    head = "ranks  batch   step ms   comm ms   exposed   images/s  speed-up efficiency"
    lines.append(head)
    for r in rows:
        times = " ".join(f"{r[key] * 1e3:9.3f}" for key in ("step_seconds", "communication_seconds", "exposed_seconds"))
        speed = f"{r['images_per_second']:10,.0f} {r['speed_up']:9.2f} {r['efficiency']:10.1%}"
        lines.append(f"{r['ranks']:5} {r['batch']:6} {times} {speed}")
    return "\n".join(lines)


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
