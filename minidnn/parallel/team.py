"""Team: what a script that runs on several ranks needs: its communicator, its watchdog, and one way for all to end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from minidnn.errors import DoesNotFit, UserError
from minidnn.parallel.communicator import Communicator, PeerLost
from minidnn.parallel.gloo import Gloo
from minidnn.parallel.gpus import own_device
from minidnn.parallel.inprocess import InProcess
from minidnn.parallel.launch import Place, place
from minidnn.parallel.mpi import Mpi
from minidnn.parallel.watchdog import Watchdog

PATIENCE_SECONDS = 1.0
"""That a rank waits with a mistake of the user's: most are everybody's, and rank 0 tells of those."""


class Team:
    """This process among its peers. As a context: an error ends all ranks, and is said once.

    Without a launcher: a team of one, in which nothing is different. ``device``: what this rank computes on, see
    ``gpus.own_device``.
    """

    def __init__(self, here: Place, device: str = "emulated", timeout: float = 30.0) -> None:
        self.place, self.device = here, device
        self.communicator: Communicator
        self._watchdog: Watchdog | None = None
        if here.size == 1 and not here.has_mpi:
            self.communicator = InProcess.group(1)[0]
            return
        communicator = Mpi(here) if here.has_mpi else Gloo(here)
        self.communicator = communicator
        if communicator.threads and communicator.size > 1:
            channel, signs = communicator.channel(), communicator.signs
            self._watchdog = Watchdog(channel, here.rank, here.size, timeout, signs=signs)
        try:
            self.device = own_device(communicator, here, device)
        except UserError as error:
            self.fail(error)
            raise

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
        if error is not None:
            self.fail(error)
        elif self.size > 1:
            self.communicator.barrier()
            if self._watchdog is not None:
                self._watchdog.stop()

    def leave(self, code: int) -> int:
        """Behind the context: end here and now where NCCL was used, whose orderly end can hang; else return the exit code."""
        if self.communicator.signs.opened:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code

    def fail(self, error: BaseException) -> None:
        """End all ranks, and say why once. Returns where there is but one."""
        if self.size == 1:
            return
        code, text = describe(error, self.rank)
        sys.stdout.flush()
        if self.rank and isinstance(error, UserError | DoesNotFit):
            time.sleep(PATIENCE_SECONDS)  # if rank 0 has made it, the watchdog ends this process here
            text = f"rank {self.rank}: {text}"
        if not isinstance(error, UserError | DoesNotFit | KeyboardInterrupt | PeerLost):
            sys.__excepthook__(type(error), error, error.__traceback__)
        if self._watchdog is not None:
            self._watchdog.fail(code, text)
        self.communicator.abort(text)


def describe(error: BaseException, rank: int) -> tuple[int, str]:
    """Exit code and sentence for the error that ends a rank. A user's mistake is told as on one rank."""
    if isinstance(error, UserError | DoesNotFit):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, f"rank {rank} was interrupted"
    if isinstance(error, PeerLost):
        return error.exit_code, str(error)
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
    return Team(here, device, timeout)
