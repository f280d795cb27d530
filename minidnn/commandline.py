"""The command line: options in the words of PyTorch's example scripts, sizes in bytes, and errors as one sentence.

An option is None where it was not given, so that a resumed run can take it from its checkpoint, and any run from the
defaults of its data set. Models and plans are joined to it in ``scripts/job.py``: this package knows neither.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from minidnn.budget import parse_bytes
from minidnn.defaults import DEFAULTS, name_of, table
from minidnn.errors import DoesNotFit, UserError, nearest
from minidnn.lr_schedule import FORMS, parse_shape
from minidnn.precision import PRECISIONS

TRAINING = (
    "data", "arch", "blocks", "image_size", "num_classes", "batch_size", "epochs", "opt", "lr", "lr_sched", "warmup",
    "momentum", "wd", "accum", "clip_grad_norm", "seed", "precision", "drop_last", "label_smoothing", "augment",
    "workspace_limit",
)  # fmt: skip
"""Options that decide the result. A resumed run takes those that are not given from its checkpoint."""


OPEN = "where an option is not given (--lr: a tenth without batch norm, 0.001 of adam):\n" + table()
"""What ``--help`` ends with: the defaults of every data set."""

LEAST_BYTES = 1000
"""A number of bytes below this, without a unit, is a unit forgotten: no step takes so little."""


class Parser(ArgumentParser):
    """argparse whose complaint is a UserError, one sentence, instead of a usage text."""

    def __init__(self, description: str, epilog: str | None = OPEN) -> None:
        super().__init__(
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Name the option; an unknown one gets the nearest names."""
        unknown = re.match(r"unrecognized arguments: (-[^\s=]+)", message)
        if unknown:
            known = [text for text in self._option_string_actions if text.startswith("--")]
            raise UserError(f"unknown option {unknown[1]}; {nearest(unknown[1], known)}")
        if message.startswith("unrecognized arguments: "):
            words = message.removeprefix("unrecognized arguments: ")
            raise UserError(
                f"{words!r} belongs to no option: a value has no blanks, as in --memory 6MiB, or stands in quotes"
            )
        if message.endswith(": expected one argument"):
            option = message.removeprefix("argument ").removesuffix(": expected one argument")
            raise UserError(f"{option} has no value: one has to follow, and not to begin with a minus sign")
        raise UserError(f"{message.removeprefix('argument ')} (--help lists the options)")


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text) or int(text) < least:
            raise ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return parse


def _real(least: float, below: float = float("inf")) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value < below:
            limit = "" if below == float("inf") else f" and below {below:g}"
            raise ArgumentTypeError(f"{text!r} is no number of at least {least:g}{limit}")
        return value

    return parse


def _norm(text: str) -> float:
    value = _real(0)(text)
    if not value:
        raise ArgumentTypeError(f"{text!r} is no norm above 0: leave the option out to clip nothing")
    return value


def _blocks(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ArgumentTypeError(f"{text!r} is no list of numbers of blocks: write 6,32,790,6")
    return [int(part) for part in text.split(",")]


def add_model(parser: ArgumentParser) -> None:
    """What is trained on what: these decide the graph."""
    group = parser.add_argument_group("data and model")
    add = group.add_argument
    sets = ", ".join(DEFAULTS)
    add("--data", metavar="SET", help=f"{sets}; files as mnist:DIR, cifar10:PATH; made up as synthetic:N,H,W,C,CLASSES")
    add("-a", "--arch", metavar="NAME", help="a model: resnet20, vgg16_bn, lenet; a wrong name lists the nearest")
    add("--blocks", type=_blocks, metavar="N,N,...", help="blocks a stage, for -a resnet: 6,32,790,6 is ResNet-2504")
    add("--image-size", type=_whole(1), metavar="N", help="height and width to which images are brought")
    add("--num-classes", type=_whole(2), metavar="N", help="outputs of the net; default: the classes of the data")
    add("-b", "--batch-size", type=_whole(1), metavar="N", help="samples of one forward and backward, of all ranks")
    add("--drop-last", action=BooleanOptionalAction, help="leave out a smaller last batch of an epoch in training")
    add("--accum", type=_whole(1), metavar="K", help="batches whose mean gradient makes one update (default: 1)")
    add("--clip-grad-norm", type=_norm, metavar="X", help="scale down a gradient whose L2 norm is above this")
    add("--label-smoothing", type=_real(0, 1), metavar="E", help="probability spread over all classes")
    add("--opt", choices=("sgd", "nesterov", "adam"), help="optimizer; sgd and nesterov with --momentum")
    add("--momentum", type=_real(0, 1), metavar="M", help="of sgd and nesterov (default: 0.9)")
    add("--wd", type=_real(0), metavar="W", help="weight decay, as PyTorch defines it")
    add("--precision", choices=tuple(PRECISIONS), help="element types (default: fp32)")
    add("--seed", type=_whole(0), metavar="N", help="of weights, order, augmentation and dropout (default: 0)")


def add_memory(parser: ArgumentParser) -> None:
    """Where it runs, how many bytes it may take, and what becomes of every value."""
    group = parser.add_argument_group("device and memory")
    add = group.add_argument
    add("--device", metavar="D", default="auto", help="auto, emulated or cuda:N (default: %(default)s)")
    add(
        "--profile", metavar="GPU", default="h200", help="GPU whose times are predicted: a name, a file (default: h200)"
    )
    add("--memory", metavar="SIZE",
        help="device bytes the step may reserve: 4GiB, 500MB, bytes, or 60%% of what keep reserves")  # fmt: skip
    add("--process-memory", metavar="SIZE",
        help="bytes the GPU's driver may count for the process: the slab and, measured, all outside it")  # fmt: skip
    add("--host-memory", metavar="SIZE", help="pinned host bytes it may take")
    add("--policy", metavar="NAME", help="rule that makes the plan: keep, layup, vdnn ... (default: auto, the fastest)")
    add("--theta", type=_real(0), metavar="T", help="of policy layup: offload what a layer computes T times as long as")
    add("--stream", action="store_true", help="parameters and optimizer state live in pinned host memory")
    add("--plan", metavar="FILE", help="a plan.json instead of a policy")
    add("--recipe", metavar="FILE", help="a recipe.json: repeats every choice that can change a bit")
    add("--workspace-limit", metavar="SIZE", help="scratch of one convolution")
    add("--capture", choices=("auto", "on", "off"), default="auto",
        help="replay training steps as CUDA graphs; auto: on a GPU (default: auto)")  # fmt: skip
    add("--allocator", choices=("slab", "pool"), default="slab", help="one planned slab, or a pool (default: slab)")


def add_training(parser: ArgumentParser) -> None:
    """How long, how fast, from where, and what is written."""
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--epochs", type=_whole(1), metavar="N", help="passes over the training data")
    add("--max-steps", type=_whole(1), metavar="N", help="stop at the update that ends N batches")
    add("--lr", type=_real(0), metavar="RATE", help="learning rate; never scaled by batch or ranks behind your back")
    add("--lr-sched", metavar="RULE", help=FORMS)
    add("--warmup", type=_real(0), metavar="EPOCHS", help="epochs of linear warm-up (default: 0)")
    add("--augment", action=BooleanOptionalAction, help="random crop and flip, as in the table below")
    add("-j", "--workers", type=_whole(0), metavar="N",
        help="threads that make batches ahead (default: 1; on a GPU up to 4)")  # fmt: skip
    add("-p", "--print-freq", type=_whole(1), metavar="N", default=50, help="batches between two lines (default: 50)")
    add("--weights", metavar="FILE", help="safetensors file of weights under torchvision's names to start from")
    add("--resume", metavar="FILE", help="go on from a checkpoint, bit for bit; auto: the newest in --output, if any")
    add("-e", "--evaluate", action="store_true", help="evaluate only, with --resume or --weights")
    add("--strategy", metavar="NAME", help="data parallelism under mpiexec, srun or torchrun: ring_delayed, ring, all_reduce, "
        "master_slave, tree; with :steps or :nccl, how")  # fmt: skip
    add("--ring-warmup", type=_whole(0), metavar="N", help="updates of ring_delayed without delay (default: 0)")
    add("--ring-timeout", type=_real(1), metavar="S", help="seconds in which all ranks end after one (default: 30)")
    add("--verify", action="store_true", help="measure one step before training (always on the emulated device)")
    add("--dry-run", action="store_true", help="print the memory and stop: no data, no device, no files")
    add("--output", metavar="DIR", help="folder of the run (default: the next free runs/DATA-ARCH-N)")


def complete(args: Namespace, saved: Mapping[str, Any] | None = None) -> Namespace:
    """Fill in what was not given: from the options of a checkpoint, then from the defaults of the data set.

    ``lr`` and ``num_classes`` stay None where they depend on the net and the data. Raises UserError for what is missing
    and for what can have no effect.
    """
    done = Namespace(**vars(args))
    for name in TRAINING:
        if getattr(done, name, None) is None and saved is not None:
            setattr(done, name, saved.get(name))
    for name, option in (("data", "--data"), ("arch", "-a/--arch")):
        if getattr(done, name) is None:
            raise UserError(f"{option} is missing, for example: --data digits -a resnet20")
    defaults = DEFAULTS[name_of(done.data)]
    for name in ("memory", "process_memory", "host_memory", "workspace_limit"):
        if (text := getattr(done, name, None)) is not None:  # a percentage is known once ``keep`` is planned
            whole = (lambda: 10**15) if name == "memory" else None
            option = f"--{name.replace('_', '-')}"
            nbytes = parse_bytes(text, what=option, whole=whole)
            if text.isdecimal() and nbytes < LEAST_BYTES and name != "workspace_limit":
                raise UserError(
                    f"{option} {text} is {text} bytes, and no step takes so few: add the unit, as in {text}MiB"
                )
    if args.momentum is not None and (done.opt or defaults.opt) == "adam":
        raise UserError(f"--momentum {args.momentum:g} has no effect on adam: leave it out, or use --opt sgd")
    delayed = (getattr(done, "strategy", None) or "").startswith("ring_delayed")
    if delayed and done.opt is None and defaults.opt == "sgd":
        done.opt = "nesterov"  # a delay of one leaves heavy-ball momentum hardly any stable rate
    common = {"warmup": 0.0, "momentum": 0.9, "accum": 1, "seed": 0, "precision": "fp32", "drop_last": False}
    for name, value in (defaults._asdict() | common | {"lr": None, "clip_grad_norm": None}).items():
        if name in TRAINING and getattr(done, name, None) is None:
            setattr(done, name, value)
    if done.opt == "adam":
        done.momentum = None
    parse_shape(done.lr_sched)
    return done


def run(main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None) -> int:
    """Call ``main`` and return the exit code of the process; a user's mistake becomes one line on the error stream."""
    try:
        return main(argv)
    except (UserError, DoesNotFit) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(f"error: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 2
