"""Probes: what the engine says of one policy at one depth, no more of it than a question needs, and remembered in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import models
from layup.context import Context
from layup.planner import Planner
from minidnn.metrics import write_json
from minidnn.prepare import prepare
from minidnn.schedule.plan import Plan

_LARGE, _DOUBTFUL, _DOUBTFUL_IN_LARGE = 1500, 1.05, 1.01
"""As in ``layup.planner``: units of a large net; how far an estimate may exceed what a budget leaves beside the persistent
bytes before the candidate is not looked at."""


@dataclass(frozen=True, slots=True)
class Net:
    """The family of nets, and what is the same for all of them. ``stages``: units of the first, second and last stage."""

    stages: tuple[int, int, int]
    batch: int
    image_size: int
    profile: str
    host_memory: int | None
    streamed: bool
    whole_gradients: bool

    @property
    def title(self) -> str:
        """How it is trained, in words."""
        update = "one update after backward" if self.whole_gradients else "layer-wise update"
        home = "parameters in pinned host memory" if self.streamed else "parameters on the device"
        return f"fp32, SGD with momentum, {update}, {home}, {self.profile}"

    def context(self, n3: int) -> Context:
        """The planning context at one depth."""
        first, second, last = self.stages
        blocks = (first, second, n3, last)
        graph = models.build("resnet", batch=self.batch, image_size=self.image_size, blocks=blocks)
        request = prepare(graph, device=None, profile=self.profile)
        streamed = ("*",) if self.streamed else ()
        kind = _Whole if self.whole_gradients else Context
        return kind(request, host_memory=self.host_memory, streamed=streamed)


class _Whole(Context):
    """A context of which every plan updates once, after backward."""

    def complete(self, plan: Plan) -> Plan:
        plan = super().complete(plan)
        return replace(plan, reuse=replace(plan.reuse, layerwise_update=False))


class Probes:
    """Facts about candidates, by policy and depth. Planned candidates are kept for the depth looked at last only."""

    def __init__(self, net: Net, cache: Path | None) -> None:
        self.net = net
        self.cache = cache
        self.facts: dict[str, dict[str, dict[str, Any]]] = {}
        self.chosen: dict[str, dict[str, dict[str, Any]]] = {}
        if cache is not None and cache.exists():
            known = json.loads(cache.read_text(encoding="utf-8"))
            self.facts, self.chosen = known["facts"], known["chosen"]
        self._open: tuple[tuple[str, int], Planner] | None = None

    def load(self, policy: str, n3: int, memory: int) -> float:
        """The budget that the leanest plan takes, as a share of it; at most 1 if it fits, device and host.

        Above 1 it is a lower bound: the peak of the training step may be all that was planned.
        """
        return self.scarcest(policy, n3, memory)[0]

    def scarcest(self, policy: str, n3: int, memory: int) -> tuple[float, bool]:
        """The load, and whether it is that of host memory."""
        least = (math.inf, False)
        host_limit = math.inf if self.net.host_memory is None else self.net.host_memory
        for number, facts in self._by_bytes(policy, n3):
            if _hopeless(facts, memory) or (facts["bound_bytes"] > memory and least[0] < math.inf):
                least = min(least, (max(facts["guess_bytes"], facts["bound_bytes"]) / memory, False))
                continue
            for fact in ("bound_bytes", "peak_bytes", "train_bytes", "reserved_bytes"):
                nbytes = self._fact(policy, n3, number, fact)
                host = facts.get("host_bytes", facts.get("host_peak_bytes", 0))
                share = max((nbytes / memory, False), (host / host_limit, True))
                if share[0] > 1:
                    break
            self._forget(policy, n3, number)
            if share[0] <= 1:
                return share
            least = min(least, share)
        return least

    def fastest(self, policy: str, n3: int, memory: int) -> dict[str, Any]:
        """Facts of the plan that the planner selects; there must be one.

        One that was selected for a larger budget and fits this one is not looked for again: less memory is never faster.
        """
        key = f"{policy} {n3}"
        chosen = self.chosen.setdefault(key, {})
        larger = min((m for m in map(int, chosen) if m >= memory), default=memory)
        if larger > memory >= chosen[str(larger)]["reserved_bytes"]:
            chosen[str(memory)] = chosen[str(larger)]
            self._save()
        elif str(memory) not in chosen:
            planner = self._planner(policy, n3)
            found = planner.select(memory, self.net.host_memory)
            assert found is not None, f"{policy} fits no plan at n3 = {n3}"
            chosen[str(memory)] = {
                "policy": found.plan.policy,
                "seconds": found.seconds,
                "keep_seconds": planner.context.costs.step_seconds,
                "peak_bytes": found.program.peak_bytes,
                "reserved_bytes": found.program.reserved_bytes,
                "host_bytes": found.program.host_bytes,
            }
            self._save()
        facts: dict[str, Any] = chosen[str(memory)]
        return facts

    def known(self, policy: str) -> list[int]:
        """Depths of which something is known: with them, a search that is repeated plans nothing again."""
        return sorted(int(n3) for name, n3 in (key.split() for key in self.facts) if name == policy)

    # -- facts ----------------------------------------------------------------------------------------------------------
    def _by_bytes(self, policy: str, n3: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Number and facts of every candidate, those that promise the fewest bytes first."""
        key = f"{policy} {n3}"
        if key not in self.facts:
            found = {}
            for number, candidate in enumerate(self._planner(policy, n3).candidates):
                found[str(number)] = {
                    "bound_bytes": candidate.bounds.peak_bytes,
                    "bound_seconds": candidate.bounds.seconds,
                    "guess_bytes": candidate.guess.peak_bytes if candidate.guess else 0,
                    "base_bytes": candidate.context.base_bytes,
                    "units": len(candidate.context.costs.units),
                    "keep_seconds": candidate.context.costs.step_seconds,
                    "policy": candidate.plan.policy,
                }
            self.facts[key] = found
        entries = self.facts[key]
        yield from sorted(
            entries.items(), key=lambda e: (e[1]["guess_bytes"] or e[1]["bound_bytes"], e[1]["bound_bytes"])
        )

    def _fact(self, policy: str, n3: int, number: str, name: str) -> int:
        facts = self.facts[f"{policy} {n3}"][number]
        if name not in facts:
            candidate = self._planner(policy, n3).candidates[int(number)]
            if name == "peak_bytes":
                facts["peak_bytes"], facts["host_peak_bytes"] = candidate.peaks
            elif name == "train_bytes":
                facts["train_bytes"], facts["seconds"] = candidate.train.profile.reserved_bytes, candidate.seconds
                facts["host_peak_bytes"] = candidate.train.profile.host_bytes
            else:
                facts["reserved_bytes"] = candidate.program.reserved_bytes
                facts["host_bytes"] = candidate.program.host_bytes
            self._save()
        return int(facts[name])

    def _save(self) -> None:
        if self.cache is not None:
            write_json(self.cache, {"facts": self.facts, "chosen": self.chosen})

    def _forget(self, policy: str, n3: int, number: str) -> None:
        if self._open is not None and self._open[0] == (policy, n3):
            self._open[1].candidates[int(number)].forget()

    def _planner(self, policy: str, n3: int) -> Planner:
        if self._open is None or self._open[0] != (policy, n3):
            self._open = None  # let the one before go first: thousands of layers take gigabytes
            self._open = ((policy, n3), Planner(self.net.context(n3), policy))
        return self._open[1]


def _hopeless(facts: dict[str, Any], memory: int) -> bool:
    base, margin = facts["base_bytes"], _DOUBTFUL_IN_LARGE if facts["units"] > _LARGE else _DOUBTFUL
    return bool(facts["guess_bytes"] - base > margin * max(memory - base, 0))
