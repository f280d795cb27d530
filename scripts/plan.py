"""Print what a training step takes, before it runs: no data, no arrays, no device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from job import assemble
from minidnn.commandline import Parser, add_memory, add_model, complete, run
from minidnn.metrics import provenance, write_json
from minidnn.schedule.text import human_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises what ``minidnn.commandline.run`` prints."""
    parser = Parser((__doc__ or "").strip())
    add_model(parser)
    add_memory(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--dump", action="store_true", help="print the schedule of a training step, row by row")
    group.add_argument("--explain", action="store_true", help="print decision, bytes and workspace of every layer")
    group.add_argument("--json", metavar="FILE", help="write the numbers, with machine, versions and command")
    group.add_argument("--save-plan", metavar="FILE", help="write the plan for --plan")
    args = parser.parse_args(argv)
    args.epochs = args.lr = args.lr_sched = args.warmup = args.augment = None  # of training alone
    job = assemble(complete(args), device=None)
    profile = job.step.profile
    print(job.table())
    print(f"predicted time of a step on {args.profile}: {profile.step_seconds * 1e3:.3f} ms")
    print(f"at the peak, {profile.peak_text}, of {job.graph.parameter_count:,} parameters and the rest:")
    for resident in profile.residents_at_peak[:10]:
        print(f"  {human_bytes(resident.nbytes):>12}  {resident.role:<18}  {resident.layer or resident.name}")
    if args.explain:
        print(job.step.explain())
    if args.dump:
        print(job.step.program["train"].dump())
    if args.save_plan is not None:
        write_json(Path(args.save_plan), job.step.plan.to_json() | {"recipe_hash": job.step.recipe.hash})
    if args.json is not None:
        write_json(Path(args.json), job.figures() | provenance(job.args.seed))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
