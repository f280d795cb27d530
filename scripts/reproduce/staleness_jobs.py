"""Several runs at the same time, each in a process of its own, so that they share a GPU which one alone leaves idle."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from multiprocessing import connection, get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from minidnn.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

_PATIENCE = 10.0  # seconds for an idle process to end by itself


class Failure(NamedTuple):
    """Why there is no result. ``users``: the text is a sentence for the user; else it is a traceback."""

    text: str
    users: bool


def carry_out(
    work: Callable[[Item], Result], choose: Callable[[Sequence[Item]], Item | None], jobs: int
) -> Generator[tuple[Item, Result], None, None]:
    """Yield every item with ``work(item)``, as each ends. With one job the work is done in this process.

    ``choose`` gets the items under way and returns the next to begin, or None: none for now or, with none under way, none at
    all. After a failure no further item is begun; the others under way are still yielded, then the error is raised. An
    interruption ends all processes at once.
    """
    if jobs == 1:
        while (item := choose(())) is not None:
            yield item, work(item)
        return
    error: Exception | None = None
    with Workers(work, jobs) as workers:
        while True:
            while error is None and workers.free and (item := choose(workers.under_way)) is not None:
                workers.begin(item)
            if not workers.under_way:
                break
            item, result = workers.ended()
            if isinstance(result, Failure):
                error = error or (UserError if result.users else RuntimeError)(result.text)
                if workers.under_way:
                    print(f"{item} failed; {len(workers.under_way)} others end first", file=sys.stderr, flush=True)
            else:
                yield item, result
    if error is not None:
        raise error


class Workers(Generic[Item, Result]):
    """At most ``count`` processes that do ``work``, a picklable function, for one item after another."""

    def __init__(self, work: Callable[[Item], Result], count: int) -> None:
        self._work, self._count = work, count
        self._idle: list[tuple[BaseProcess, Connection]] = []
        self._busy: dict[Connection, tuple[BaseProcess, Item]] = {}

    @property
    def free(self) -> bool:
        """Whether another item can be begun."""
        return len(self._busy) < self._count

    @property
    def under_way(self) -> tuple[Item, ...]:
        """The items begun and not ended."""
        return tuple(item for _, item in self._busy.values())

    def begin(self, item: Item) -> None:
        """Give an item to an idle process, or to a new one."""
        process, pipe = self._idle.pop() if self._idle else self._new()
        self._busy[pipe] = process, item
        pipe.send(item)

    def ended(self) -> tuple[Item, Result | Failure]:
        """Wait for an item to end."""
        pipe = next(pipe for pipe in connection.wait(list(self._busy)) if isinstance(pipe, Connection))
        process, item = self._busy.pop(pipe)
        try:
            result = pipe.recv()
        except (EOFError, ConnectionError):
            process.join()
            text = f"{item}: its process ended with code {process.exitcode}; if memory ran out, give fewer --jobs"
            return item, Failure(text, True)
        self._idle.append((process, pipe))
        return item, result

    def _new(self) -> tuple[BaseProcess, Connection]:
        context = get_context("spawn")  # a forked process could not use CUDA
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._work), daemon=True)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: a Ctrl-C is for us, who end the process
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        theirs.close()
        return process, ours

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        everybody = [*self._idle, *((process, pipe) for pipe, (process, _) in self._busy.items())]
        for process, pipe in everybody:
            if error is not None:
                process.kill()  # not SIGTERM, upon which training would first finish its step and save
            pipe.close()
        for process, _ in everybody:
            process.join(_PATIENCE)
            process.kill()
            process.join()


def _serve(pipe: Connection, work: Callable[[Any], Any]) -> None:
    """What a process does until the pipe is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        try:
            answer = work(item)
        except KeyboardInterrupt:  # training notices Ctrl-C although it was to be ignored
            return
        except UserError as error:
            answer = Failure(str(error), True)
        except Exception:
            answer = Failure(f"{item}\n{traceback.format_exc()}", False)
        pipe.send(answer)


def _end_with_parent() -> None:
    """End this process when the one that started it was killed and could not do so: nothing may be left on the GPU."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
