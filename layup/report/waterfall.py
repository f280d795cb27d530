"""Waterfall: from ``naive`` to the final plan, one technique after another, with the bytes and milliseconds of each.

Every stage is a plan of its own, compiled like the final one (same graph, recipe, optimizer, profile), so its figures are
those of the engine. What a technique is worth depends on what is on already; the order is that of ``STAGES``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from minidnn.schedule.plan import Decision, Plan, naive
from minidnn.schedule.simulate import MemoryProfile
from minidnn.schedule.text import human_bytes
from minidnn.step import CompiledStep

REUSES = {
    "lifetimes": "every buffer dies at its last use",
    "in_place": "element-wise layers overwrite their input",
    "workspace": "one scratch range serves all convolutions",
    "gradient_window": "gradients of activations die at their last use",
    "layerwise_update": "weights are updated as soon as their gradient exists",
}
"""Fields of ``Reuse`` in the order in which they are switched on, and what each does."""

KEEP = "keep"
_MOVES = {
    Decision.OFFLOAD: "stored values wait in pinned host memory",
    Decision.RECOMPUTE: "stored values are dropped and made again",
}
_STREAMING = "parameters and optimizer state live in pinned host memory"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: the technique that was added last, and what a step takes with it and all before it.

    ``used`` is False for a technique that the final plan does not use: its stage is the one before it.
    """

    name: str
    what: str
    used: bool
    plan: Plan
    peak_bytes: int
    reserved_bytes: int
    host_bytes: int
    step_seconds: float


class Known(NamedTuple):
    """A plan that was compiled before, and its prediction."""

    plan: Plan
    profile: MemoryProfile


def waterfall(step: CompiledStep, known: Iterable[tuple[Plan, MemoryProfile]] = ()) -> list[Stage]:
    """The stages from ``naive`` to the plan of ``step``. Each that is used takes about as long as compiling ``step`` did.

    Args:
        step: the final plan, compiled, with or without a device.
        known: plans of the same request that are compiled already, such as naive and keep, and their predictions.
    """
    found = [Known(*entry) for entry in known] + [Known(step.plan, step.profile)]
    layerwise = step.plan.reuse.layerwise_update is not False and not step.whole_gradients
    stages: list[Stage] = []
    for name, what, used, plan in _plans(step.plan, layerwise):
        if stages and (not used or _same(plan, stages[-1].plan)):
            stages.append(replace(stages[-1], name=name, what=what, used=False))
            continue
        profile = next((k.profile for k in found if _same(k.plan, plan)), None)
        if profile is None:
            profile = step.request.program(plan).prediction
            found.append(Known(plan, profile))
        sizes = (profile.peak_bytes, profile.reserved_bytes, profile.host_bytes)
        stages.append(Stage(name, what, True, plan, *sizes, profile.step_seconds))
    return stages


def _plans(final: Plan, layerwise: bool) -> Iterable[tuple[str, str, bool, Plan]]:
    """Name, meaning, whether the final plan uses it, and plan of every stage."""
    reuse = naive().reuse
    yield "naive", "every value and every workspace alive for the whole step", True, naive()
    for name, what in REUSES.items():
        wanted = layerwise if name == "layerwise_update" else bool(getattr(final.reuse, name))
        if wanted:
            reuse = replace(reuse, **{name: getattr(final.reuse, name)})
        yield _title(name), what, wanted, Plan(reuse=reuse)
    plan = replace(final, decisions={}, streamed=(), reuse=final.reuse)
    chosen = set(final.decisions.values())
    for decision, what in _MOVES.items():
        wider = {k: d for k, d in final.decisions.items() if d is decision or k in plan.decisions}
        plan = replace(plan, decisions=wider)
        yield decision.value, what, decision in chosen, plan
    yield "streaming", _STREAMING, bool(final.streamed), final


def _title(name: str) -> str:
    return {"in_place": "in-place", "layerwise_update": "layer-wise update"}.get(name, name.replace("_", " "))


def _same(one: Plan, other: Plan) -> bool:
    """Whether two plans make the same rows: their policy's name apart, and what governs only moves they do not make."""
    return _essence(one) == _essence(other)


def _essence(plan: Plan) -> Plan:
    decisions = {k: d for k, d in plan.decisions.items() if d is not Decision.KEEP}
    plan = replace(plan, policy="", decisions=decisions)
    if Decision.OFFLOAD not in decisions.values():
        plan = replace(plan, lag=0, distance=0, lags={}, distances={})
    if Decision.RECOMPUTE not in decisions.values():
        plan = replace(plan, memory_centric=False)
    return plan if plan.streamed else replace(plan, group_bytes=0)


def text(stages: Sequence[Stage]) -> str:
    """The waterfall as a table: what each technique leaves, and what it saves and costs against the stage before."""
    head = ("", "peak", "reserved", "saves", "pinned host", "step, ms", "costs, ms")
    cells = [head]
    before: Stage | None = None
    for stage in stages:
        name = stage.name if before is None else f"+ {stage.name}"
        if not stage.used:
            cells.append((name, "", "", "not used", "", "", ""))
            continue
        saved = "" if before is None else _signed_bytes(before.reserved_bytes - stage.reserved_bytes)
        cost = "" if before is None else f"{(stage.step_seconds - before.step_seconds) * 1e3:+.3f}"
        sizes = (human_bytes(stage.peak_bytes), human_bytes(stage.reserved_bytes), saved, human_bytes(stage.host_bytes))
        cells.append((name, *sizes, f"{stage.step_seconds * 1e3:.3f}", cost))
        before = stage
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in cells
    )


def _signed_bytes(nbytes: int) -> str:
    return human_bytes(nbytes) if nbytes >= 0 else f"-{human_bytes(-nbytes)}"
