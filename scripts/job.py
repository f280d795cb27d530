"""From options to a compiled step: the one place where models, the engine and the makers of plans meet."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import layup
import minidnn
from arguments import build_graph, read_plan, request_options
from minidnn.batch_rules import unusable_tail
from minidnn.compile import make_step
from minidnn.cuda_recipes import fallback_notes
from minidnn.data import Augment, Batches, Splits, load
from minidnn.defaults import DEFAULTS, Facts, known_facts, name_of
from minidnn.device.base import Device
from minidnn.errors import UserError
from minidnn.layers import BatchNorm, Graph
from minidnn.parallel.agree import compare
from minidnn.parallel.communicator import Communicator
from minidnn.parallel.step import ParallelStep
from minidnn.schedule.instruction import Op
from minidnn.schedule.plan import Decision, Plan, keep, naive
from minidnn.schedule.ranks import Strategy
from minidnn.schedule.simulate import MemoryProfile
from minidnn.screen import byte_table
from minidnn.step import CompiledStep

GPU_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Job:
    """A compiled step and what it was compiled from.

    Attributes:
        args: all options, none open.
        facts: the sizes of the data set that the step was compiled for.
        device: what it was compiled for; None: planned only.
        planned: how the plan was made, with a reason for every decision; None: it was read from a file.
        naive, keep: what the same step takes under these two plans.
        dropped: the batch norm that cannot use the last batch of an epoch, which is therefore left out; or None.
        notes: what a person should know before it runs.
    """

    args: Namespace
    facts: Facts
    graph: Graph
    step: CompiledStep
    planned: layup.Planned | None
    device: str | None
    naive: MemoryProfile
    keep: MemoryProfile
    dropped: str | None
    notes: tuple[str, ...]

    @property
    def drop_last(self) -> bool:
        """Whether training leaves out a smaller last batch."""
        return bool(self.args.drop_last) or self.dropped is not None

    def close(self) -> None:
        """Give the step's memory back, and close the device, which was opened for it."""
        self.step.close()
        if self.step.request.device is not None:
            self.step.request.device.close()

    def batches(self, splits: Splits, rank: int = 0, ranks: int = 1) -> tuple[Batches, Batches]:
        """Training batches, a rank's share of each, shuffled and augmented, and test batches, in order and whole."""
        args, defaults = self.args, DEFAULTS[name_of(self.args.data)]
        augment = Augment(defaults.pad, defaults.flip) if args.augment else None
        common = {"seed": args.seed, "workers": args.workers}
        mine = {**common, "drop_last": self.drop_last, "rank": rank, "ranks": ranks}
        train = Batches(splits.train, args.batch_size, augment=augment, **mine)
        return train, Batches(splits.test, args.batch_size, shuffle=False, **common)

    def table(self) -> str:
        """The bytes of the step: under other plans, predicted and, where it was, measured."""
        rows = (
            ("naive", self.naive),
            ("keep", self.keep),
            ("predicted", self.step.profile),
            ("measured", self.step.measured),
        )[: 4 if self.step.measured.peak_bytes is not None else 3]
        return byte_table(
            ("peak", "reserved", "pinned host"),
            [(name, (row.peak_bytes, row.reserved_bytes, row.host_bytes)) for name, row in rows],
            "one step of rank 0" if isinstance(self.step, ParallelStep) and self.step.ranks.size > 1 else "one step",
        )

    def decisions(self) -> list[str]:
        """What the plan moves and repeats, a line each kind, with one layer and the reason for it."""
        lines = []
        for decision, what in ((Decision.OFFLOAD, "offloaded"), (Decision.RECOMPUTE, "recomputed")):
            layers = [name for name, made in self.step.plan.decisions.items() if made is decision]
            if layers:
                reasons = {} if self.planned is None else self.planned.reasons
                first = next((name for name in layers if name in reasons), layers[0])
                why = reasons.get(first, "as the plan file says")
                lines.append(f"{len(layers)} layers {what}, such as {first} ({why})")
        if self.step.plan.streamed:
            groups = self.step.program.persistent.groups
            lines.append(f"parameters live in pinned host memory and visit in {len(groups)} groups")
        return lines

    def figures(self) -> dict[str, Any]:
        """The same as plain data, and what the plan moves and repeats."""
        measured = self.step.measured
        rows = self.step.program["train"].rows
        forward = sum(row.flops for row in rows if row.op is Op.FORWARD)
        repeated = sum(row.flops for row in rows if row.op is Op.RECOMPUTE)
        return {
            "naive_bytes": self.naive.reserved_bytes,
            "keep_bytes": self.keep.reserved_bytes,
            "predicted": _bytes_and_time(self.step.profile),
            "measured": None if measured.peak_bytes is None else _bytes_and_time(measured),
            "outside_bytes": 0 if self.device is None else self.step.executor.device.outside_bytes(),
            "offloaded_bytes": sum(v.spec.nbytes for row in rows if row.op is Op.OFFLOAD for v in row.reads),
            "recompute_fraction": repeated / forward if forward else 0.0,
            "ranks": self.step.ranks.size if isinstance(self.step, ParallelStep) else 1,
            "strategy": str(self.step.ranks.strategy.name) if isinstance(self.step, ParallelStep) else None,
        }


def _bytes_and_time(profile: Any) -> dict[str, Any]:
    return {key: getattr(profile, key) for key in ("peak_bytes", "reserved_bytes", "host_bytes", "step_seconds")}


def assemble(
    args: Namespace,
    *,
    device: str | None,
    facts: Facts | None = None,
    communicator: Communicator | None = None,
    strategy: Strategy | None = None,
) -> Job:
    """Build the graph, choose the plan and compile; reads no data.

    Args:
        args: completed; the learning rate, which may depend on the net, and the number of workers, which depends on the device,
            are filled in here.
        device: None plans only.
        facts: sizes of the data set; None: the known ones.
        communicator, strategy: of data parallelism; rank 0's plan is that of all ranks.

    Raises:
        UserError, DoesNotFit: before any data is read.
    """
    facts = known_facts(args.data) if facts is None else facts
    graph = build_graph(args, facts)
    has_norm = any(isinstance(node.layer, BatchNorm) for node in graph.nodes)
    if args.lr is None:
        args.lr = 1e-3 if args.opt == "adam" else DEFAULTS[name_of(args.data)].lr * (1.0 if has_norm else 0.1)
    if getattr(args, "workers", 0) is None:
        args.workers = workers_of(device, 1 if communicator is None else communicator.size)
    tail = None if args.drop_last else facts.train % args.batch_size or None
    size = 1 if communicator is None else communicator.size
    smallest = None if tail is None else max(1, tail // size)  # share of a rank
    dropped = unusable_tail(graph, smallest)
    if args.batch_size // size == 1 < size and (norm := unusable_tail(graph, 1)) is not None:
        raise UserError(
            f"-b {args.batch_size} on {size} ranks leaves a rank with one image, of which {norm} sees one value per channel: "
            f"give a batch of at least {2 * size}"
        )
    same = {**request_options(args), "tail": None if dropped else tail, "allocator": args.allocator}
    same |= {"device": _open(device, args.precision), "capture": args.capture}
    same |= {} if communicator is None else {"communicator": communicator, "strategy": strategy}
    step, planned, made_for = _compile(graph, args, same)
    notes = []
    if dropped is not None:
        notes.append(
            f"the last batch of an epoch has one image{' a rank' * (size > 1)}, of which {dropped} sees one value per channel: "
            "left out in training (not in evaluation), and counted"
        )
    if made_for not in (None, step.recipe.hash):
        notes.append(f"the plan {args.plan} was made for the recipe {made_for}; this run has {step.recipe.hash}")
    if planned is not None:
        notes += planned.notices
    notes += fallback_notes(graph, step.recipe)

    common = _without(same, "streamed", "theta", "host_memory", "capture", "process_memory")
    common |= {"device": None, "recipe": step.recipe, "workspace_limit": None}
    common |= {"strategy": step.ranks.strategy} if isinstance(step, ParallelStep) else {}

    def profile_of(plan: Plan) -> MemoryProfile:
        return minidnn.compile(graph, plan, **common).profile

    return Job(
        args=args, facts=facts, graph=graph, step=step, planned=planned, device=device, naive=profile_of(naive()),
        keep=profile_of(keep()), dropped=dropped, notes=tuple(notes),
    )  # fmt: skip


def _compile(
    graph: Graph, args: Namespace, same: dict[str, Any]
) -> tuple[CompiledStep, layup.Planned | None, str | None]:
    """The step; how its plan was made; the hash of the recipe that a plan file says it was made for.

    All ranks carry out one plan: their own where they have shares of one size, else that of rank 0, the largest.
    """
    read = read_plan(args)
    if read is not None:
        plan, made_for = read
    else:
        planned, made_for = layup.plan(graph, args.memory, args.policy or "auto", **same), None
        plan, communicator = planned.plan, same.get("communicator")
        if communicator is not None and same["device"] is not None:
            plan = Plan.from_json(communicator.exchange(plan.to_json())[0])
        if plan == planned.plan:
            return make_step(planned.context.request, plan, planned.program, planned.memory), planned, None
    step = minidnn.compile(graph, plan, memory=args.memory, **_without(same, "streamed", "theta"))
    return step, None, made_for


def workers_of(device: str | None, ranks: int) -> int:
    """Threads that make the batches of a rank, where nothing was asked for.

    One makes some 4,000 images of 224 x 224 a second, half of what ResNet-50 takes on an H200; on NumPy more of them would
    take the step's cores.
    """
    cores = (os.cpu_count() or 1) // ranks
    return max(1, min(GPU_WORKERS, cores)) if device is not None and device.startswith("cuda") else 1


def _open(device: str | None, precision: str) -> str | Device | None:
    """A GPU is opened here, since planning and running share it: engines are measured on it."""
    if device is None or not device.startswith("cuda"):
        return device
    from minidnn.device.cuda import open_device

    return open_device(device, precision, deterministic=True)


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def load_data(job: Job) -> tuple[Job, Splits]:
    """Read the data; where it is not of the size the step was compiled for, compile again."""
    args = job.args
    splits = load(args.data, image_size=args.image_size, seed=args.seed)
    stored = Facts.of(splits.train)
    facts = stored if args.image_size is None else stored._replace(height=job.facts.height, width=job.facts.width)
    if isinstance(job.step, ParallelStep):  # else some ranks would compile again, and the others wait for them
        compare(job.step.communicator, {"training data": describe_facts(facts)})
    if facts == job.facts:
        return job, splits
    job.close()
    team: dict[str, Any] = {}
    if isinstance(job.step, ParallelStep):
        team = {"communicator": job.step.communicator, "strategy": job.step.ranks.strategy}
    return assemble(args, device=job.device, facts=facts, **team), splits


def describe_facts(facts: Facts) -> str:
    """The sizes of a data set."""
    sizes = f"{facts.train:,} training images of {facts.height}x{facts.width}x{facts.channels}"
    return f"{sizes} in {facts.classes} classes"
