"""What the options of the command line mean to the engine: graph, optimizer, recipe, plan and device. Compiles nothing."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import models
from minidnn.defaults import Facts
from minidnn.device.cuda_libraries import describe_gpu
from minidnn.errors import UserError
from minidnn.layers import Graph, SoftmaxCrossEntropy
from minidnn.optim import SGD, Adam, Optimizer
from minidnn.schedule.plan import Plan
from minidnn.schedule.recipe import Recipe


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


def request_options(args: Namespace) -> dict[str, Any]:
    """The options that ``layup.plan`` and its kin take besides graph, budget and policy. Reads a recipe file."""
    if args.recipe is not None and args.workspace_limit is not None:
        raise UserError(f"--recipe {args.recipe} has a workspace limit of its own: leave out --workspace-limit")
    return {
        "optimizer": optimizer(args),
        "profile": args.profile,
        "precision": args.precision,
        "seed": args.seed,
        "accumulate": args.accum,
        "clip_grad_norm": args.clip_grad_norm,
        "workspace_limit": args.workspace_limit,
        "recipe": None if args.recipe is None else Recipe.from_json(read_json(args.recipe)),
        "host_memory": args.host_memory,
        "process_memory": getattr(args, "process_memory", None),
        "streamed": ("*",) if args.stream else (),
        "theta": theta_of(args),
    }


def optimizer(args: Namespace) -> Optimizer:
    """The optimizer of the options."""
    if args.opt == "adam":
        return Adam(lr=args.lr, weight_decay=args.wd)
    return SGD(lr=args.lr, momentum=args.momentum, nesterov=args.opt == "nesterov", weight_decay=args.wd)


def theta_of(args: Namespace) -> float:
    """Theta of the thesis' rule. Raises UserError where no policy would look at it."""
    if args.theta is None:
        return 1.0
    policy = getattr(args, "policy", None)  # where several are compared there is no such option
    if policy not in (None, "auto", "layup"):
        raise UserError(f"--theta {args.theta:g} is of policy layup and has no effect on {policy}: leave it out")
    return float(args.theta)


def read_plan(args: Namespace) -> tuple[Plan, str | None] | None:
    """The plan of ``--plan``, and the hash of the recipe it says it was made for; None if a policy makes the plan."""
    if args.plan is None:
        return None
    for option, given in (("--policy", args.policy), ("--theta", args.theta), ("--stream", args.stream or None)):
        if given is not None:
            raise UserError(f"--plan {args.plan} and {option} both say what is planned: give one of them")
    data = read_json(args.plan)
    made_for = data.pop("recipe_hash", None)
    return Plan.from_json(data), made_for


def choose_device(name: str, profile: str) -> tuple[str, str]:
    """What to compile for, and the line that says so. ``auto``: the first GPU if it can be used, else the emulated device.

    Raises UserError for a GPU that was asked for and cannot be had.
    """
    why = ""
    if name != "emulated":
        wanted = "cuda:0" if name == "auto" else name
        try:
            return wanted, f"device: {wanted}, {describe_gpu(wanted)}"
        except UserError as error:
            if name != "auto":
                raise
            why = f"; {error}".removesuffix(", or use the device 'emulated'")
    return "emulated", f"device: emulated, NumPy on this computer{why}; predicted times are those of {profile}"


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
