"""Ranks that were not started alike: refused on every rank with one sentence, and the launcher's exit code is 2."""

import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import minidnn
import ranked
from minidnn.commandline import Parser, add_memory, add_model, add_training
from minidnn.errors import UserError
from minidnn.parallel.agree import disagreement
from minidnn.parallel.launch import Place, is_first
from minidnn.parallel.mpi import Mpi
from tests.parallel.launching import MISSING, REASON, ROOT, mpiexec, mpiexec_apart
from tests.parallel.test_launch import OPEN_MPI, SLURM, TORCHRUN

needs_mpi = pytest.mark.skipif(MISSING, reason=REASON)
PROGRAM = ROOT / "tests" / "parallel" / "train_tiny.py"
COMMON = ("-a", "tiny", "-b", "4", "--epochs", "2", "--strategy", "ring", "--ring-timeout", "6")
DATA = ("--data", "synthetic:21,8,8,3,4")


def parsed(*argv: str) -> Namespace:
    parser = Parser("")
    for add in (add_model, add_training, add_memory):
        add(parser)
    return parser.parse_args(argv)


def difference(one: tuple[str, ...], other: tuple[str, ...]) -> str | None:
    return disagreement([ranked.in_common(parsed(*options)) for options in (one, other)])


# Every one of these either made ranks wait for each other or train on different terms.
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("--epochs", "2"), ("--epochs", "1")),
        (("--max-steps", "3"), ()),
        (("-p", "2"), ("-p", "3")),
        (("--dry-run",), ()),
        (("--verify",), ()),
        (("-e",), ()),
        (("--augment",), ("--no-augment",)),
        (("--lr-sched", "cosine"), ("--lr-sched", "constant")),
        (("--memory", "1MiB"), ("--memory", "2MiB")),
        (("--device", "emulated"), ("--device", "auto")),
        (("--weights", "here"), ()),
        (("--data", "mnist:here"), ("--data", "cifar10:here")),
        (("--data", "synthetic:21,8,8,3,4"), ("--data", "synthetic:22,8,8,3,4")),
    ],
)
def test_an_option_that_differs_is_named_with_both_values(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    text = difference(one, other)
    assert text is not None and text.startswith("the ranks do not agree on the option --") and "rank 1 has " in text


def test_places_of_files_and_the_number_of_threads_may_differ_between_hosts() -> None:
    one = ("--data", "mnist:here", "--weights", "a", "--output", "x", "-j", "1", "--plan", "p")
    other = ("--data", "mnist:there", "--weights", "b", "--output", "y", "-j", "4", "--plan", "q")
    assert difference(one, other) is None


def test_another_version_of_the_program_is_seen_by_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.py").write_text("x = 1\n")
    before = ranked.sources(tmp_path)
    (tmp_path / "notes.txt").write_text("no program")
    assert ranked.sources(tmp_path) == before
    (tmp_path / "inner" / "a.py").write_text("x = 2\n")
    assert ranked.sources(tmp_path) != before

    ours = ranked.in_common(parsed())
    monkeypatch.setattr(minidnn, "__file__", str(tmp_path / "__init__.py"))
    text = disagreement([ours, ranked.in_common(parsed())])
    assert text is not None and text.startswith(
        f"the ranks do not agree on the program: rank 0 has version {minidnn.__version__}"
    )


def test_a_checkpoint_that_one_rank_does_not_see_is_noticed_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minidnn.checkpoint import LAST, Metadata, Progress, save

    save(tmp_path / LAST, {"x": np.zeros(1)}, Metadata(Progress(epoch=3, batch=1, steps=19)))
    text = difference(("--resume", "auto", "--output", str(tmp_path)), ("--resume", "auto", "--output", "elsewhere"))
    assert text is not None and text.startswith(
        "the ranks do not agree on the checkpoint to go on from: rank 0 has one of epoch 3, batch 1, 19 steps in all, rank 1 "
        "has none;"
    )


# -- processes --------------------------------------------------------------------------------------------------------
def mnist(folder: Path, images: int) -> Path:
    """The four IDX files."""
    folder.mkdir()
    for split, count in (("train", images), ("t10k", 8)):
        pixels, labels = np.zeros((count, 28, 28), np.uint8), (np.arange(count) % 10).astype(np.uint8)
        for name, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
            (folder / f"{split}-{name}-ubyte").write_bytes(head + array.tobytes())
    return folder


@needs_mpi
@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (
            (*DATA,),
            (*DATA, "--epochs", "1"),
            "the ranks do not agree on the option --epochs: rank 0 has 2, rank 1 has 1;",
        ),
        (
            ("--data", "mnist:{a}"),
            ("--data", "mnist:{b}"),
            "the ranks do not agree on the training data: rank 0 has 12 ",
        ),
        ((*DATA,), (*DATA, "--bogus"), "rank 1: unknown option --bogus"),
        (("--data", "mnist:{a}"), ("--data", "mnist:nowhere"), "rank 1: mnist:nowhere is not a directory"),
    ],
)
def test_ranks_started_differently_are_refused_once(
    tmp_path: Path, one: tuple[str, ...], other: tuple[str, ...], words: str
) -> None:
    here = {"a": mnist(tmp_path / "a", 12), "b": mnist(tmp_path / "b", 11)}
    commands = [(PROGRAM, *COMMON, *(word.format(**here) for word in options)) for options in (one, other)]
    ended = mpiexec_apart(*commands, cwd=tmp_path)
    assert ended.code == 2 and ended.err.count("error: ") == ended.err.count(f"error: {words}") == 1, ended.err
    assert "Traceback" not in ended.err and ended.seconds < 30 and not (tmp_path / "runs").exists()


@needs_mpi
def test_mpi_missing_is_said_once_with_the_pip_line(tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('libmpi.so: cannot open shared object file')\n")
    path = ":".join(map(str, (tmp_path, ROOT, ROOT / "scripts")))
    ended = mpiexec_apart(*[(PROGRAM, *COMMON, *DATA)] * 2, cwd=tmp_path, PYTHONPATH=path)
    assert ended.code == 2 and ended.err.count("error: ") == 1
    assert "libmpi.so: cannot open shared object file); install it with: pip install 'minidnn-layup[mpi]'" in ended.err


@needs_mpi
def test_an_environment_with_the_remains_of_another_launcher_is_refused_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    ended = mpiexec(2, PROGRAM, *COMMON, *DATA, cwd=tmp_path)
    assert ended.code == 2 and ended.err.count("error: the environment has RANK=0 but no WORLD_SIZE") == 1
    assert ended.err.count("error: ") == 1


@pytest.mark.parametrize(
    ("environ", "first"),
    [
        ({}, True),
        (OPEN_MPI, False),
        (OPEN_MPI | {"RANK": "0"}, False),
        (OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "1"}, False),
        (TORCHRUN, False),
        (TORCHRUN | {"RANK": "0"}, True),
        (SLURM, True),
    ],
)
def test_who_speaks_is_known_from_an_environment_that_contradicts_itself(environ: dict[str, str], first: bool) -> None:
    assert is_first(environ) is first


def test_an_mpi_that_counts_otherwise_than_the_launcher_is_refused_with_the_pip_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = SimpleNamespace(Dup=lambda: SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1))
    package = ModuleType("mpi4py")
    package.MPI = SimpleNamespace(COMM_WORLD=world)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    words = r"MPICH says rank 1 of 2, MPI says rank 0 of 1: .* pip install 'minidnn-layup\[mpi\]'"
    with pytest.raises(UserError, match=words):
        Mpi(Place(1, 2, None, 1, "MPICH"))
