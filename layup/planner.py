"""Planner: the fastest plan of a policy that fits the budgets, and the fewest bytes it can do with.

A policy makes candidates without looking at a device budget; ``auto`` has those of all other policies besides its own chain. A
budget then selects the fastest candidate whose whole program fits. So ``auto`` is never slower than another policy at the same
budget, a larger budget is never slower, and the fewest bytes of any candidate are the smallest budget that runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from heapq import heappop, heappush

from layup.chain import chain
from layup.context import Context
from layup.estimate import Estimate, estimate_plan
from layup.evaluate import Candidate
from layup.policies import POLICIES, find
from minidnn.schedule.plan import Plan, keep

_LARGE = 1500
"""Units from which on a candidate takes seconds to evaluate, so that estimates are trusted more."""

_TRIALS = 20_000
"""Units that are timed in all, in a large net whose parameters are streamed: three candidates of 2,504 layers, one of 9,998."""


class Planner:
    """The candidates of one policy for one request, evaluated no further than choices have needed so far."""

    def __init__(self, context: Context, policy: str = "auto") -> None:
        """Raises UserError for an unknown policy, with the nearest names."""
        self.context = context
        self.policy = find(policy)

    @cached_property
    def keep(self) -> Candidate:
        """The plan ``keep``, of which percentages are."""
        return Candidate(self.context, keep())

    @cached_property
    def candidates(self) -> list[Candidate]:
        """Plans of the policy; of ``auto``: of all policies. Equal ones once."""
        if self.policy.name != "auto":
            return self._distinct([(plan, None) for plan in self.policy.plans(self.context)])
        others = (policy for policy in POLICIES.values() if policy.name != "auto")
        plans: list[tuple[Plan, Estimate | None]] = [(p, None) for policy in others for p in policy.plans(self.context)]
        return self._distinct([*plans, *chain(self.context)])

    def _distinct(self, plans: Sequence[tuple[Plan, Estimate | None]]) -> list[Candidate]:
        found: dict[str, Candidate] = {}
        for plan, guess in plans:
            text = repr(sorted({**plan.to_json(), "policy": ""}.items(), key=lambda entry: entry[0]))
            if text not in found:
                guess = guess or estimate_plan(self.context.costs, plan)
                found[text] = self.keep if plan == keep() else Candidate(self.context, plan, guess)
        return list(found.values())

    def select(self, memory: int | None, host_memory: int | None = None) -> Candidate | None:
        """The fastest candidate whose whole program fits both budgets; None if none does.

        ``keep`` is as fast as any plan can be, since it runs the fewest rows and waits for no copy: where it fits, no other
        candidate of ``auto`` is looked at.
        """
        limit = float("inf") if memory is None else memory
        host_limit = float("inf") if host_memory is None else host_memory
        if self.policy.name == "auto" and self.keep.fits(limit, host_limit):
            return self.keep
        waiting = self._by_bound(limit)
        timed: list[tuple[float, int, int, Candidate]] = []  # a heap, the fastest first
        units = len(self.context.costs.units)
        trials = max(1, _TRIALS // units) if self._large and self.context.streamed else len(waiting)
        while waiting or timed:
            if waiting and (not timed or (trials > 0 and waiting[-1].bounds.seconds < timed[0][0])):
                candidate = waiting.pop()
                if self._slow(candidate, timed[0][0] if timed else float("inf")) or self._hopeless(
                    candidate, limit, self._doubtful
                ):
                    continue
                if candidate.runs_in(limit, host_limit):
                    trials -= 1
                    reserved = candidate.train.profile.reserved_bytes
                    heappush(timed, (candidate.seconds, reserved, len(waiting), candidate))
                continue
            candidate = heappop(timed)[-1]  # nothing else can be faster: is there room for its other schedules, too?
            if candidate.fits(limit, host_limit):
                return candidate
        return None

    def _by_bound(self, limit: float) -> list[Candidate]:
        """Candidates to be looked at from the last on: the lowest bound first; in a large net before it the best estimate."""

        def seconds(candidate: Candidate) -> tuple[float, float]:
            return candidate.bounds.seconds, candidate.guess.seconds if candidate.guess else 0.0

        if self._large and self.context.streamed:  # parameters share the links: bounds exclude little
            return sorted(self.candidates, key=lambda c: seconds(c)[::-1], reverse=True)
        ordered = sorted(self.candidates, key=seconds, reverse=True)
        fitting = [c for c in ordered if c.guess is not None and c.guess.peak_bytes <= limit]
        if self._large and fitting:
            likely = min(fitting, key=lambda c: c.guess.seconds if c.guess else 0.0)
            ordered.remove(likely)
            ordered.append(likely)
        return ordered

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

    def _slow(self, candidate: Candidate, seconds: float) -> bool:
        """In a large net: whether a candidate is not worth the seconds of timing it, by its estimate: one of another policy if
        it is much slower than what is known, one of the chain if it is not clearly faster."""
        if not self._large or candidate.guess is None:
            return False
        return candidate.guess.seconds > (0.98 if candidate.plan.policy == "auto" else 1.3) * seconds

    def smallest(self, host_memory: int | None = None) -> Candidate | None:
        """The candidate whose program reserves the fewest device bytes within the host budget; None if none keeps to that."""
        host_limit = float("inf") if host_memory is None else host_memory
        best: Candidate | None = None
        for candidate in self._promising(host_limit):
            least = float("inf") if best is None else best.program.reserved_bytes
            if candidate.peaks[0] >= least or candidate.train.profile.reserved_bytes >= least:
                continue
            if candidate.fits(least, host_limit) and candidate.program.reserved_bytes < least:
                best = candidate
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
