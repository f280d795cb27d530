"""Watchdog: all ranks end soon after one has failed, and the first to fail is named. Never relies on an orderly end.

A thread of every rank sends signs of life to rank 0, which knows who fell silent. A rank that fails says so the same way.
Rank 0 gives one verdict, prints it, and passes it on; each process then ends by ``os._exit``, because a rank can be stuck in
a call that nobody answers any more. Rank 0's own silence ends the others. Where all are alive and none gets on, because each
waits for another, it is rank 0 that notices: a sign of life says how far a rank has got.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from minidnn.parallel.communicator import PeerLost, Signs

STALL_FACTOR = 10
"""Timeouts without any rank getting on, after the first step, until all are taken to wait for each other."""


class Channel(Protocol):
    """A way for small messages besides the communicator. Used by one thread."""

    def send(self, message: Any, peer: int) -> None:
        """Send without waiting."""

    def poll(self) -> list[tuple[int, Any]]:
        """What has come in: sender and message."""


class Verdict(NamedTuple):
    """How all ranks end."""

    code: int
    text: str


class Monitor:
    """What a rank knows of the others; apart from threads and time, so that it can be tested.

    ``limit``: seconds of silence after which a rank is taken for lost; ``stall``: seconds without any rank getting on.
    """

    def __init__(self, rank: int, size: int, limit: float, now: float, stall: float = float("inf")) -> None:
        self.rank, self.size, self.limit, self.stall = rank, size, limit, stall
        self._far = dict.fromkeys(range(size), (0, 0))  # marks and last step
        self._moved = now
        self._heard = dict.fromkeys(range(size), now)
        self._seen = now

    def step(
        self,
        channel: Channel,
        now: float,
        failure: Verdict | None,
        done: bool = False,
        far: tuple[int, int] = (0, 0),
    ) -> tuple[Verdict, bool] | None:
        """Send a sign of life and read those of the others. Returns how to end, and whether this rank shall say so.

        ``far``: marks and last step of this rank.
        """
        verdict: Verdict | None = None
        if (
            now - self._seen > self.limit / 2
        ):  # this process itself was stopped: what the others did meanwhile comes first
            self._heard, self._moved = dict.fromkeys(self._heard, now), now
        self._seen = now
        self._mark(self.rank, far, now)
        for sender, (kind, content) in channel.poll():
            self._heard[sender] = now
            if kind == "end":
                return Verdict(*content), False
            if kind == "fail" and verdict is None:
                verdict = Verdict(*content)
            if kind == "beat":
                self._mark(sender, content, now)
            if kind == "done":
                del self._heard[sender]
        if self.rank:
            message = ("done", None) if done else ("beat", far) if failure is None else ("fail", tuple(failure))
            channel.send(message, 0)
            if 0 in self._heard and now - self._heard[0] > self.limit:
                return self._lost(0), True
            return None
        verdict = verdict or failure
        if verdict is None:
            lost = [r for r, heard in self._heard.items() if r and now - heard > self.limit]
            verdict = self._lost(min(lost, key=self._heard.__getitem__)) if lost else self._stalled(now)
        for peer in range(1, self.size):
            message = ("end", tuple(verdict)) if verdict else ("done", None) if done else ("beat", far)
            channel.send(message, peer)
        return None if verdict is None else (verdict, True)

    def _mark(self, rank: int, far: Sequence[int], now: float) -> None:
        if self._far[rank] != tuple(far):
            self._far[rank], self._moved = (far[0], far[1]), now

    def _stalled(self, now: float) -> Verdict | None:
        """No rank has got on for long, though training has begun and nobody is done."""
        steps = [step for _, step in self._far.values()]
        if now - self._moved <= self.stall or not any(steps) or len(self._heard) < self.size:
            return None
        last = ", ".join(f"rank {rank} in step {step}" for rank, step in enumerate(steps))
        return Verdict(PeerLost.exit_code, f"the ranks wait for each other: none got on for {self.stall:g} s; {last}")

    def _lost(self, rank: int) -> Verdict:
        return Verdict(PeerLost.exit_code, f"rank {rank} was lost: no sign of life for {self.limit:g} s")


class Watchdog:
    """Runs a ``Monitor`` in a thread until ``stop``. ``timeout``: seconds within which all ranks are gone after a failure."""

    def __init__(
        self,
        channel: Channel,
        rank: int,
        size: int,
        timeout: float = 30.0,
        end: Callable[[int], None] = os._exit,
        signs: Signs | None = None,
    ) -> None:
        self._channel, self._rank, self._end, self._signs = channel, rank, end, signs or Signs()
        self._monitor = Monitor(rank, size, timeout / 2, time.monotonic(), STALL_FACTOR * timeout)
        self._interval = min(1.0, timeout / 20)
        self._failure: Verdict | None = None
        self._wake, self._done = threading.Event(), False
        self._timeout = timeout
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            done, far = self._done, (self._signs.marks, self._signs.step)
            self._check()
            ending = self._monitor.step(self._channel, time.monotonic(), self._failure, done, far)
            if ending is not None:
                self._finish(*ending)
                return
            if done:
                return
            self._wake.wait(self._interval)
            self._wake.clear()

    def _check(self) -> None:
        """Whether a library has noticed a failure while the rank waits in it."""
        try:
            for check in tuple(self._signs.checks):
                check()
        except PeerLost as error:
            self._failure = self._failure or Verdict(PeerLost.exit_code, str(error))

    def _finish(self, verdict: Verdict, says: bool) -> None:
        if says:
            print(f"error: {verdict.text}", file=sys.stderr, flush=True)
        elif self._rank:
            time.sleep(self._interval)  # rank 0 speaks first: launchers kill the rest of a job that ends
        self._end(verdict.code)

    def fail(self, code: int, text: str) -> None:
        """This rank cannot go on: tell all, and end. Does not return."""
        self._failure = Verdict(code, text)
        self._wake.set()
        self._thread.join(self._timeout)
        print(f"error: {text}", file=sys.stderr, flush=True)  # nobody has given a verdict
        self._end(code)

    def stop(self) -> None:
        """The orderly end, after all ranks have met for the last time."""
        self._done = True
        self._wake.set()
        self._thread.join(self._timeout)
