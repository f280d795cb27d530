"""Evaluate a checkpoint of a run: python scripts/evaluate.py runs/digits-resnet20-1/best.safetensors"""

from __future__ import annotations

import threads  # noqa: F401  (before NumPy)

# isort: split
import sys
from collections.abc import Sequence
from pathlib import Path

from outputs import make_folders

from arguments import choose_device
from job import assemble, load_data
from minidnn.checkpoint import Checkpoint
from minidnn.commandline import Parser, add_memory, add_model, complete, run
from minidnn.metrics import provenance, write_json
from minidnn.trainer import evaluate


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises what ``minidnn.commandline.run`` prints."""
    parser = Parser((__doc__ or "").strip())
    parser.add_argument("checkpoint", type=Path, help="a .safetensors file of a training run")
    add_model(parser)
    add_memory(parser)
    group = parser.add_argument_group("evaluation")
    group.add_argument("-j", "--workers", type=int, metavar="N", help="threads that make batches ahead")
    group.add_argument("--json", metavar="FILE", help="write the accuracy, with machine, versions and command")
    args = parser.parse_args(argv)
    args.epochs = args.lr = args.lr_sched = args.warmup = args.augment = None  # of training alone
    make_folders(args, "json")
    with Checkpoint(args.checkpoint) as checkpoint:
        metadata = checkpoint.metadata
        device, line = choose_device(args.device, args.profile)
        print(line, flush=True)
        job, splits = load_data(assemble(complete(args, metadata.args), device=device))
        try:
            job.step.load_state_dict(checkpoint.weights())
            accuracy = evaluate(job.step, job.batches(splits)[1])
        finally:
            job.close()
    assert accuracy is not None
    count = len(splits.test)
    print(f"{job.args.arch} after {metadata.progress.steps:,} steps on {job.args.data}: "
          f"Acc@1 {accuracy:.2%} ({round(accuracy * count):,} of {count:,} test images)")  # fmt: skip
    if args.json is not None:
        write_json(Path(args.json), {"acc1": accuracy, "images": count} | provenance(job.args.seed))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
