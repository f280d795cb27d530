"""Team: what a script that runs on several ranks needs: its communicator, its watchdog, and one way for all to end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from minidnn.errors import DoesNotFit, UserError
from minidnn.parallel.communicator import Communicator
from minidnn.parallel.inprocess import InProcess
from minidnn.parallel.launch import Place, place
from minidnn.parallel.mpi import Mpi
from minidnn.parallel.watchdog import Watchdog


class Team:
    """This process among its peers. As a context: an error ends all ranks, and is said once.

    Without a launcher: a team of one, in which nothing is different.
    """

    def __init__(self, here: Place, timeout: float = 30.0) -> None:
        self.place = here
        self.communicator: Communicator
        self._watchdog: Watchdog | None = None
        if here.size == 1 and not here.has_mpi:
            self.communicator = InProcess.group(1)[0]
            return
        mpi = Mpi(here)
        self.communicator = mpi
        if mpi.threads and mpi.size > 1:
            self._watchdog = Watchdog(mpi.channel(), mpi.rank, mpi.size, timeout)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.communicator.size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.size == 1:
            return
        if error is None:
            self.communicator.barrier()
            if self._watchdog is not None:
                self._watchdog.stop()
            return
        code, text = describe(error, self.rank)
        sys.stdout.flush()
        if not isinstance(error, UserError | DoesNotFit | KeyboardInterrupt):
            sys.__excepthook__(type(error), error, at)
        if self._watchdog is not None:
            self._watchdog.fail(code, text)
        self.communicator.abort(text)


def describe(error: BaseException, rank: int) -> tuple[int, str]:
    """Exit code and sentence for the error that ends a rank. A user's mistake is told as on one rank."""
    if isinstance(error, UserError | DoesNotFit):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, f"rank {rank} was interrupted"
    return 5, f"rank {rank} failed: {type(error).__name__}: {error}"


def gather(environ: Mapping[str, str], strategy: str | None, device: str, timeout: float = 30.0) -> Team | None:
    """The team of this process; None where it trains alone, without a strategy.

    Raises UserError where what was started and what is asked for do not go together.
    """
    here = place(environ)
    if strategy is None:
        if here.size > 1:
            raise UserError(
                f"{here.launcher} started {here.size} processes, but there is no --strategy: name one, for example --strategy "
                "ring_delayed, or start one process"
            )
        return None
    if device.startswith("cuda"):
        raise UserError(
            f"--strategy {strategy} does not run on {device} in this version: use --device emulated, or leave out --strategy"
        )
    if here.size > 1 and not here.has_mpi:
        raise UserError(
            f"torchrun started {here.size} processes, but NumPy arrays travel by MPI, which it does not start: use mpiexec -n "
            f"{here.size}, or srun"
        )
    return Team(here, timeout)


def agreed(exchange: Any, flag: bool) -> bool:
    """Whether any rank raises the flag. Collective."""
    return any(exchange(flag))
