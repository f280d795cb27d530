"""What a person sees of a run: a progress bar on a terminal, plain lines in a file or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from minidnn.schedule.text import human_bytes


class Screen:
    """Lines and progress. Unless standard output and the error stream are terminals: no bar, no carriage return.

    Args:
        interactive: None asks the two streams.
    """

    def __init__(self, interactive: bool | None = None) -> None:
        self.interactive = sys.stdout.isatty() and sys.stderr.isatty() if interactive is None else interactive

    def line(self, text: str) -> None:
        """One line, at once, above the bar if there is one."""
        if self.interactive:
            tqdm.write(text)
        else:
            print(text, flush=True)

    def progress(self, title: str, total: int, done: int) -> Progress:
        """A bar of ``total`` batches of which ``done`` are done; without a terminal, nothing but its lines."""
        return Progress(self, tqdm(total=total, initial=done, desc=title, leave=False) if self.interactive else None)


class Progress:
    """The progress of one epoch."""

    def __init__(self, screen: Screen, bar: Any) -> None:
        self._screen = screen
        self._bar = bar

    def advance(self) -> None:
        """One batch more."""
        if self._bar is not None:
            self._bar.update()

    def show(self, text: str) -> None:
        """Figures: beside the bar, or as a line."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        else:
            self._screen.line(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()


def byte_table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[int | None]]], of: str = "one step") -> str:
    """Bytes for people and exactly, right under each other; None is a dash."""
    cells = [[f"memory of {of}, bytes", *columns]]
    for name, values in rows:
        cells.append([name, *("-" if v is None else f"{v:,} ({human_bytes(v)})" for v in values)])
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    )
