"""From options to a compiled step: the one place where models, the engine and the makers of plans meet."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minidnn
import models
from minidnn.data import Augment, Batches, Splits, load
from minidnn.defaults import DEFAULTS, Facts, known_facts, name_of
from minidnn.errors import UserError, nearest
from minidnn.layers import BatchNorm, Graph, SoftmaxCrossEntropy
from minidnn.optim import SGD, Adam, Optimizer
from minidnn.schedule.instruction import Op
from minidnn.schedule.plan import Plan, keep, naive
from minidnn.schedule.recipe import Recipe
from minidnn.schedule.simulate import MemoryProfile
from minidnn.screen import byte_table
from minidnn.step import CompiledStep
from minidnn.trainer import unusable_tail

POLICIES = {"auto": keep, "keep": keep, "naive": naive}
"""``auto`` is ``keep`` until there is a planner."""


@dataclass(frozen=True, slots=True)
class Job:
    """A compiled step and what it was compiled from.

    Attributes:
        args: all options, none open.
        facts: the sizes of the data set that the step was compiled for.
        device: what it was compiled for; None: planned only.
        naive, keep: what the same step takes under these two plans.
        dropped: the batch norm that cannot use the last batch of an epoch, which is therefore left out; or None.
        notes: what a person should know before it runs.
    """

    args: Namespace
    facts: Facts
    graph: Graph
    step: CompiledStep
    device: str | None
    naive: MemoryProfile
    keep: MemoryProfile
    dropped: str | None
    notes: tuple[str, ...]

    @property
    def drop_last(self) -> bool:
        """Whether training leaves out a smaller last batch."""
        return bool(self.args.drop_last) or self.dropped is not None

    def batches(self, splits: Splits) -> tuple[Batches, Batches]:
        """Training batches, shuffled and augmented, and test batches, in order and whole."""
        args, defaults = self.args, DEFAULTS[name_of(self.args.data)]
        augment = Augment(defaults.pad, defaults.flip) if args.augment else None
        common = {"seed": args.seed, "workers": args.workers}
        train = Batches(splits.train, args.batch_size, augment=augment, drop_last=self.drop_last, **common)
        return train, Batches(splits.test, args.batch_size, shuffle=False, **common)

    def table(self) -> str:
        """The bytes of the step: under other plans, predicted and measured."""
        rows = (
            ("naive", self.naive),
            ("keep", self.keep),
            ("predicted", self.step.profile),
            ("measured", self.step.measured),
        )
        return byte_table(
            ("peak", "reserved", "pinned host"),
            [(name, (row.peak_bytes, row.reserved_bytes, row.host_bytes)) for name, row in rows],
        )

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
            "outside_bytes": 0,  # the emulated device has neither context nor libraries
            "offloaded_bytes": sum(v.spec.nbytes for row in rows if row.op is Op.OFFLOAD for v in row.reads),
            "recompute_fraction": repeated / forward if forward else 0.0,
            "ranks": 1,
        }


def _bytes_and_time(profile: Any) -> dict[str, Any]:
    return {key: getattr(profile, key) for key in ("peak_bytes", "reserved_bytes", "host_bytes", "step_seconds")}


def assemble(args: Namespace, *, device: str | None, facts: Facts | None = None) -> Job:
    """Build the graph, choose the plan and compile; reads no data.

    Args:
        args: completed; the learning rate, which may depend on the net, is filled in here.
        device: None plans only.
        facts: sizes of the data set; None: the known ones.

    Raises:
        UserError, DoesNotFit: before any data is read.
    """
    facts = known_facts(args.data) if facts is None else facts
    graph = build_graph(args, facts)
    has_norm = any(isinstance(node.layer, BatchNorm) for node in graph.nodes)
    if args.lr is None:
        args.lr = 1e-3 if args.opt == "adam" else DEFAULTS[name_of(args.data)].lr * (1.0 if has_norm else 0.1)
    tail = None if args.drop_last else facts.train % args.batch_size or None
    dropped = unusable_tail(graph, tail)
    common: dict[str, Any] = {
        "optimizer": optimizer(args),
        "profile": args.profile,
        "precision": args.precision,
        "seed": args.seed,
        "tail": None if dropped else tail,
        "accumulate": args.accum,
        "workspace_limit": args.workspace_limit,
    }
    if args.recipe is not None and args.workspace_limit is not None:
        raise UserError(f"--recipe {args.recipe} has a workspace limit of its own: leave out --workspace-limit")
    recipe = None if args.recipe is None else Recipe.from_json(read_json(args.recipe))
    plan, planned_for = choose_plan(args)
    step = minidnn.compile(
        graph, plan, device=device, memory=args.memory, host_memory=args.host_memory, recipe=recipe,
        allocator=args.allocator, **common,
    )  # fmt: skip

    notes = []
    if dropped is not None:
        notes.append(
            f"the last batch of an epoch has one image, of which {dropped} sees one value per channel: left out in training "
            "(not in evaluation), and counted"
        )
    if planned_for not in (None, step.recipe.hash):
        notes.append(f"the plan {args.plan} was made for the recipe {planned_for}; this run has {step.recipe.hash}")

    def profile_of(plan: Plan) -> MemoryProfile:
        return minidnn.compile(graph, plan, device=None, recipe=step.recipe, **common).profile

    return Job(args, facts, graph, step, device, profile_of(naive()), profile_of(keep()), dropped, tuple(notes))


def build_graph(args: Namespace, facts: Facts) -> Graph:
    """The model for this data. Raises UserError for what does not go together."""
    size = args.image_size
    if size is None and facts.height != facts.width:
        raise UserError(
            f"the images of {args.data} are {facts.height}x{facts.width} and models take square ones: give --image-size"
        )
    classes = facts.classes if args.num_classes is None else args.num_classes
    if classes < facts.classes:
        raise UserError(
            f"--num-classes {classes} is less than the {facts.classes} classes of {args.data}: leave it out"
        )
    graph = models.build(
        args.arch, batch=args.batch_size, image_size=size or facts.height, in_channels=facts.channels, classes=classes,
        blocks=args.blocks,
    )  # fmt: skip
    if args.label_smoothing:
        graph.loss_node.layer = SoftmaxCrossEntropy(args.label_smoothing)
    return graph


def optimizer(args: Namespace) -> Optimizer:
    """The optimizer of the options."""
    if args.opt == "adam":
        return Adam(lr=args.lr, weight_decay=args.wd)
    return SGD(lr=args.lr, momentum=args.momentum, nesterov=args.opt == "nesterov", weight_decay=args.wd)


def choose_plan(args: Namespace) -> tuple[Plan, str | None]:
    """The plan of ``--plan`` or ``--policy``, and the hash of the recipe a file says it was made for.

    It looks at no budget yet.
    """
    if args.plan is not None:
        if args.policy is not None:
            raise UserError(f"--plan {args.plan} and --policy {args.policy} both say what is planned: give one of them")
        data = read_json(args.plan)
        made_for = data.pop("recipe_hash", None)
        return Plan.from_json(data), made_for
    policy = args.policy or "auto"
    if policy not in POLICIES:
        raise UserError(f"unknown policy {policy!r}; {nearest(policy, POLICIES)}")
    return POLICIES[policy](), None


def choose_device(name: str, profile: str) -> tuple[str, str]:
    """What to compile for, and the line that says so. ``auto`` is the emulated device: this version has no other."""
    if name not in ("auto", "emulated"):
        return name, f"device: {name}"
    why = "; this version has no CUDA device" if name == "auto" else ""
    return "emulated", f"device: emulated, NumPy on this computer{why}; predicted times are those of {profile}"


def load_data(job: Job) -> tuple[Job, Splits]:
    """Read the data; where it is not of the size the step was compiled for, compile again."""
    args = job.args
    splits = load(args.data, image_size=args.image_size, seed=args.seed)
    stored = Facts.of(splits.train)
    facts = stored if args.image_size is None else stored._replace(height=job.facts.height, width=job.facts.width)
    if facts == job.facts:
        return job, splits
    job.step.close()
    return assemble(args, device=job.device, facts=facts), splits


def read_json(path: str) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError naming the file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give an existing file") from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}): give a file that a run has written") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds {type(data).__name__}, not a JSON object: give a file that a run has written")
    return data
