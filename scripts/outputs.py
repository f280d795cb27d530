"""What a command says and sees to before long work: where its results go, and what a person waits for."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

from minidnn.errors import UserError


def make_folders(args: Namespace, *names: str) -> None:
    """Make the folders of the files that options name. Raises UserError naming the option."""
    for name in names:
        if (text := getattr(args, name)) is None:
            continue
        path, option = Path(text), f"--{name.replace('_', '-')}"
        if path.is_dir():
            raise UserError(f"{option} {path} is a folder: give a file in it")
        make_folder(path.parent, f"{option} {path}")


def make_folder(path: Path, what: str) -> None:
    """Make a folder. Raises UserError, which begins with ``what``, where it cannot be made or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{what} cannot be written ({error.strerror}): give another place") from error
    if not os.access(path, os.W_OK):
        raise UserError(f"{what} cannot be written (no permission in {path}): give another place")


def waiting(text: str) -> None:
    """Say on a terminal what takes a while; nothing in a file or a pipe."""
    if sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)
