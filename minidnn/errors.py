"""Errors a user can act on: one sentence with the value and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class UserError(ValueError):
    """A mistake of the user's that a sentence can mend.

    The command line prints the sentence, without a traceback, and exits with ``exit_code``.
    """

    exit_code = 2


class VerificationError(UserError):
    """The measured memory of a step differs from the predicted memory."""

    exit_code = 3


class DoesNotFit(Exception):
    """No step of the program may run: its memory exceeds the budget.

    Attributes:
        minimum_bytes: the smallest device budget under which this very request runs.
        minimum_host_bytes: the same for pinned host memory.
        row: the row of the schedule at which the budget is exceeded, as text.
        residents: ``(name, bytes)`` of the largest buffers alive there, largest first.
    """

    exit_code = 2

    def __init__(
        self,
        message: str,
        *,
        minimum_bytes: int,
        minimum_host_bytes: int,
        row: str,
        residents: Sequence[tuple[str, int]],
    ) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes
        self.minimum_host_bytes = minimum_host_bytes
        self.row = row
        self.residents = tuple(residents)


def nearest(name: str, known: Iterable[str], *, limit: int = 3) -> str:
    """Say which known names are closest to ``name``: ``"did you mean a, b?"``, or the whole list when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=limit, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(names)}."
