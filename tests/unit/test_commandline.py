"""Options: what is not given comes from the checkpoint, then from the data set; what cannot act is refused."""

from __future__ import annotations

import errno
from argparse import Namespace
from collections.abc import Callable, Sequence

import pytest

from minidnn.commandline import TRAINING, Parser, add_memory, add_model, add_training, complete, run
from minidnn.defaults import DEFAULTS, Facts, known_facts
from minidnn.errors import DoesNotFit, UserError, VerificationError


def parsed(text: str) -> Namespace:
    parser = Parser("a test")
    for add in (add_model, add_memory, add_training):
        add(parser)
    return parser.parse_args(text.split())


@pytest.mark.parametrize("name", DEFAULTS)
def test_options_that_are_not_given_are_those_of_the_data_set(name: str) -> None:
    data = name if name in ("digits", "synthetic") else f"{name}:somewhere"
    args = complete(parsed(f"--data {data} -a lenet"))
    for option in ("batch_size", "epochs", "opt", "lr_sched", "wd", "augment"):
        assert getattr(args, option) == getattr(DEFAULTS[name], option), option


def test_the_command_line_wins_over_the_checkpoint_and_the_checkpoint_over_the_defaults() -> None:
    saved = {"data": "cifar10:x", "arch": "resnet20", "batch_size": 7, "epochs": 3, "lr": 0.3, "augment": False}
    args = complete(parsed("--epochs 5"), saved)
    assert (args.data, args.arch, args.batch_size, args.epochs, args.lr) == ("cifar10:x", "resnet20", 7, 5, 0.3)
    assert args.augment is False and args.opt == DEFAULTS["cifar10"].opt


def test_every_option_that_decides_the_result_can_be_told_from_one_that_is_not_given() -> None:
    """Otherwise a resumed run would take a default over what its checkpoint says."""
    args = parsed("")
    assert {name for name in TRAINING if getattr(args, name) is not None} == set()


def test_the_memory_of_known_data_is_known_without_reading_it() -> None:
    assert known_facts("cifar100:nowhere") == Facts(50000, 32, 32, 3, 100)
    assert known_facts("synthetic:9,8,7,3,2") == Facts(9, 8, 7, 3, 2)
    for wrong in ("synthetic:9,8,7,3", "synthetic:9,8,7,3,0", "synthetic:a", "cifar:x"):
        with pytest.raises(UserError, match=wrong.partition(":")[0]):
            known_facts(wrong)


def test_the_published_sizes_are_those_of_the_digits() -> None:
    from minidnn.data import load

    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    assert known_facts("digits") == Facts.of(load("digits").train)


def raising(error: BaseException) -> Callable[[Sequence[str] | None], int]:
    def main(argv: Sequence[str] | None) -> int:
        raise error

    return main


@pytest.mark.parametrize(
    "error, code, line",
    [
        (UserError("no such thing"), 2, "error: no such thing\n"),
        (DoesNotFit("too small", minimum_bytes=1, minimum_host_bytes=1, row="", residents=()), 2, "error: too small\n"),
        (VerificationError("differs"), 3, "error: differs\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "run/x.json"),
            2,
            "error: run/x.json: No space left on device\n",
        ),
    ],
)
def test_a_mistake_ends_in_one_line_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
) -> None:
    assert run(raising(error)) == code
    assert capsys.readouterr().err == line


def test_our_own_bugs_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run(raising(ZeroDivisionError()))
