"""Planner: the fastest plan of a policy that fits the budgets, and the fewest bytes it can do with.

A policy makes candidates without looking at a device budget; ``auto`` has those of all other policies besides its own chain. A
budget then selects the fastest candidate whose whole program fits. So ``auto`` is never slower than another policy at the same
budget, a larger budget is never slower, and the fewest bytes of any candidate are the smallest budget that runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from heapq import heappop, heappush

from layup.chain import chain
from layup.context import Context
from layup.estimate import estimate_plan
from layup.evaluate import Candidate
from layup.policies import POLICIES, Policy, find
from minidnn.schedule.plan import Reuse, keep

_LARGE = 1500
"""Units from which on a candidate takes seconds to time."""

_TRIALS = 14_000
"""Units of the chain that are timed in a large net: two candidates of 2,504 layers, one of 9,998."""


class Planner:
    """The candidates of one policy for one request, evaluated no further than choices have needed so far."""

    def __init__(self, context: Context, policy: str = "auto") -> None:
        """Raises UserError for an unknown policy, with the nearest names."""
        self.context = context
        self.policy = find(policy)
        self._smallest: dict[float, Candidate | None] = {}

    @cached_property
    def keep(self) -> Candidate:
        """The plan ``keep``, of which percentages are."""
        return Candidate(self.context, keep())

    @cached_property
    def candidates(self) -> list[Candidate]:
        """Plans of the policy; of ``auto``: of all policies."""
        return [candidate for group in self._groups.values() for candidate in group]

    @cached_property
    def _groups(self) -> dict[str, list[Candidate]]:
        """Candidates by policy, those of the chain first."""
        if self.policy.name != "auto":
            return {self.policy.name: self._of(self.policy)}
        own = [Candidate(self.context, link.plan, link.found) for link in chain(self.context)]
        return {"auto": own} | {name: self._of(policy) for name, policy in POLICIES.items() if name != "auto"}

    def _of(self, policy: Policy) -> list[Candidate]:
        found: list[Candidate] = []
        for plan in policy.plans(self.context):
            if plan == keep():
                found.append(self.keep)
            elif plan.memory_centric or plan.reuse != Reuse():
                found.append(Candidate(self.context, plan))
            else:
                found.append(Candidate(self.context, plan, estimate_plan(self.context.costs, plan)))
        return found

    def select(self, memory: int | None, host_memory: int | None = None) -> Candidate | None:
        """The fastest candidate whose whole program fits both budgets; None if none does.

        ``keep`` is as fast as any plan can be, since it runs the fewest rows and waits for no copy: where it fits, no other
        candidate of ``auto`` is looked at. In a net of more than 1,500 units a policy's plan is the first that fits in the order
        of their estimates; ``auto`` times as many of its chain as take a few seconds, and then, of every other policy, the plan
        that this policy would select, unless its bound says that it cannot be faster.
        """
        limit = float("inf") if memory is None else memory
        host_limit = float("inf") if host_memory is None else host_memory
        if self.policy.name == "auto" and self.keep.fits(limit, host_limit):
            return self.keep
        found = None
        for name, group in self._groups.items():
            trials = len(group)
            if self._large:
                trials = max(1, _TRIALS // len(self.context.costs.units)) if name == "auto" else 1
            found = self._first(group, limit, host_limit, trials, found) or found
        if found is None and self.policy.name == "auto":  # an estimate may have hidden it
            smallest = self.smallest(host_memory)
            found = smallest if smallest is not None and smallest.fits(limit, host_limit) else None
        return found

    def _first(
        self, group: list[Candidate], limit: float, host_limit: float, trials: int, best: Candidate | None = None
    ) -> Candidate | None:
        """Time the first ``trials`` candidates that may be the fastest; return the fastest of them that fits.

        ``best``: one that fits; None is returned, too, if this is as fast as what would be chosen here.
        """
        goal = float("inf") if best is None else best.seconds
        waiting = [c for c in group if c.bounds.seconds < goal]
        waiting.sort(key=self._order, reverse=True)
        timed: list[tuple[float, int, int, Candidate]] = []  # a heap, the fastest first
        while waiting or timed:
            if waiting and (not timed or (trials > 0 and waiting[-1].bounds.seconds < timed[0][0])):
                candidate = waiting.pop()
                if not self._hopeless(candidate, limit, self._margin(group)) and candidate.runs_in(limit, host_limit):
                    trials -= 1
                    reserved = candidate.train.profile.reserved_bytes
                    heappush(timed, (candidate.seconds, reserved, len(waiting), candidate))
                continue
            seconds, _, _, candidate = heappop(timed)  # is there room for its other schedules, too?
            if seconds >= goal and not waiting:
                return None
            if candidate.fits(limit, host_limit):
                return candidate if seconds < goal else None
        return None

    def _margin(self, group: list[Candidate]) -> float:
        """How far an estimate may exceed the budget. Of other policies than ``auto`` none is left out that may fit, so that each
        selects the same by itself and for ``auto``."""
        if self.policy.name == "auto" and group is self._groups["auto"]:
            return self._doubtful
        return 1.25 if self._large else float("inf")

    def _order(self, candidate: Candidate) -> tuple[float, float]:
        """What is timed first: in a large net the best estimate, so that few are; else the lowest bound, so that all may be."""
        bound = candidate.bounds.seconds
        guess = bound if candidate.guess is None else candidate.guess.seconds
        return (guess, bound) if self._large else (bound, guess)

    @property
    def _large(self) -> bool:
        return len(self.context.costs.units) > _LARGE

    @property
    def _doubtful(self) -> float:
        """How far an estimate may exceed a budget before the candidate is not looked at: a factor on what is not persistent.
        Estimates are rarely 1 % off."""
        return 1.01 if self._large else 1.05

    def _hopeless(self, candidate: Candidate, limit: float, margin: float) -> bool:
        base = self.context.base_bytes
        return candidate.guess is not None and candidate.guess.peak_bytes - base > margin * max(limit - base, 0)

    def smallest(self, host_memory: int | None = None) -> Candidate | None:
        """The candidate whose program reserves the fewest device bytes within the host budget; None if none keeps to that."""
        host_limit = float("inf") if host_memory is None else host_memory
        if host_limit in self._smallest:
            return self._smallest[host_limit]
        best: Candidate | None = None
        for candidate in self._promising(host_limit):
            least = float("inf") if best is None else best.program.reserved_bytes
            if candidate.peaks[0] >= least or candidate.train.profile.reserved_bytes >= least:
                continue
            if candidate.fits(least, host_limit) and candidate.program.reserved_bytes < least:
                best = candidate
        self._smallest[host_limit] = best
        return best

    def _promising(self, host_limit: float) -> Iterator[Candidate]:
        """Candidates within the host budget, those that take the fewest bytes first; no more rows are made than needed."""

        def likely(candidate: Candidate) -> int:
            return candidate.bounds.peak_bytes if candidate.guess is None else candidate.guess.peak_bytes

        known: list[Candidate] = []
        least = float("inf")
        for candidate in sorted(self.candidates, key=likely):
            # Placement may need up to 5 % more than the peak, which a candidate with a higher peak may not.
            if candidate.bounds.peak_bytes > 1.05 * least or self._hopeless(candidate, least, 1.05 * self._doubtful):
                continue
            if candidate.peaks[1] <= host_limit:
                known.append(candidate)
                least = min(least, candidate.peaks[0])
            candidate.forget_rows()
        yield from sorted(known, key=lambda c: c.peaks[0])
