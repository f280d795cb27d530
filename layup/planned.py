"""Planned: a plan with what it takes, and one line of reason for every decision."""

from __future__ import annotations

from dataclasses import dataclass, field

from layup.context import Context
from layup.cost import Costs
from layup.evaluate import Candidate
from layup.needs import KEEP, OFFLOAD, RECOMPUTE, acts, decisions_of, needs
from layup.unit import Unit
from minidnn.profiles import Profile
from minidnn.schedule.instruction import COMPUTE, Instruction, Op
from minidnn.schedule.plan import Plan
from minidnn.schedule.program import Program
from minidnn.schedule.simulate import MemoryProfile, schedule_times
from minidnn.schedule.text import human_bytes


@dataclass(frozen=True, slots=True)
class Planned:
    """The result of planning. The plan itself is plain data.

    Attributes:
        profile: prediction for the whole program; ``program``: what it was predicted from.
        reasons: by layer, why it is kept, offloaded or recomputed; only layers that decide about bytes.
        notices: decisions and policies without effect; to be said loudly.
        candidates: what the plan was chosen from; each knows as much as the choice needed.
        memory, host_memory: the budgets in bytes; None: no limit.
    """

    plan: Plan
    profile: MemoryProfile
    program: Program
    policy: str
    memory: int | None
    host_memory: int | None
    context: Context
    reasons: dict[str, str]
    notices: tuple[str, ...]
    candidates: tuple[Candidate, ...]

    def text(self) -> str:
        """Plan and reasons for a person: totals, notices, one line a layer."""
        profile = self.profile
        lines = [
            f"policy {self.policy}: reserves {human_bytes(profile.reserved_bytes)} and {human_bytes(profile.host_bytes)} of "
            f"pinned host memory, a step takes {profile.step_seconds * 1e3:.3f} ms",
            *(f"notice: {notice}" for notice in self.notices),
        ]
        lines += [f"  {layer:<32} {reason}" for layer, reason in self.reasons.items()]
        return "\n".join(lines)


def planned(context: Context, candidate: Candidate, candidates: list[Candidate], memory: int | None) -> Planned:
    """Explain a chosen candidate."""
    plan = candidate.plan
    return Planned(
        plan=plan,
        profile=candidate.program.prediction,
        program=candidate.program,
        policy=plan.policy,
        memory=memory,
        host_memory=context.host_memory,
        context=context,
        reasons=reasons(context.costs, candidate, memory),
        notices=notices(context.costs, plan, candidate.program),
        candidates=tuple(candidates),
    )


# -- reasons ----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Copies:
    """How the copies of one layer went: the layers that were computed meanwhile, and how long computation waited."""

    under: dict[Op, str] = field(default_factory=dict)
    waited: float = 0.0


def reasons(costs: Costs, candidate: Candidate, memory: int | None) -> dict[str, str]:
    """One line for every unit that holds bytes for backward, by the name of its last layer."""
    plan = candidate.plan
    decisions = decisions_of(costs, plan)
    need = needs(costs, decisions)
    copies = _copies(candidate.train.rows, costs.gpu, costs) if OFFLOAD in decisions else {}
    reserved = candidate.program.reserved_bytes
    found = {}
    for unit in costs.units:
        decision = decisions[unit.number]
        if decision is KEEP:
            if unit.stored:
                found[unit.name] = f"keep: {human_bytes(unit.stored)} fits"
            continue
        if not acts(unit, decision, need):
            continue
        excess = 0 if memory is None else reserved + unit.footprint - memory
        beyond = (
            f"keeping it would exceed the budget by {human_bytes(excess)}"
            if excess > 0
            else "keeping it would take these bytes"
        )
        if decision is OFFLOAD:
            found[unit.name] = f"{_offload(unit, copies.get(unit.name, _Copies()))}; {beyond}"
        else:
            found[unit.name] = f"{_recompute(unit)}; {beyond}"
    return found


def _offload(unit: Unit, copies: _Copies) -> str:
    size = human_bytes(unit.stored or unit.footprint)
    under = copies.under.get(Op.OFFLOAD)
    if copies.waited > 1e-9:
        text = f"offload: {size}, computation waits {copies.waited * 1e3:.3g} ms for its copies"
    else:
        text = f"offload: {size}, hidden under {under}" if under else f"offload: {size}, hidden"
    return f"{text}; recompute would cost {unit.recompute_seconds * 1e3:.3g} ms"


def _recompute(unit: Unit) -> str:
    size = human_bytes(unit.stored or unit.footprint)
    both = (unit.offload_seconds + unit.prefetch_seconds) * 1e3
    return (
        f"recompute: {unit.recompute_seconds * 1e3:.3g} ms for {size}; its copies would take {both:.3g} ms of the link"
    )


def _copies(rows: tuple[Instruction, ...], gpu: Profile, costs: Costs) -> dict[str, _Copies]:
    """By unit: what its copies ran under, from the times of the schedule."""
    precision = costs.analysis.precision.name
    times = schedule_times(rows, gpu, precision)
    unit_of = {key.name: costs.units[key.unit].name for key in costs.keys}
    found: dict[str, _Copies] = {}
    busy = [
        (times[i][0], times[i][1], row.target) for i, row in enumerate(rows) if row.stream == COMPUTE and row.kernel
    ]
    at = {Op.OFFLOAD: 0, Op.PREFETCH: 0}
    for i, row in enumerate(rows):
        if row.op in at:
            middle = (times[i][0] + times[i][1]) / 2
            while at[row.op] < len(busy) - 1 and busy[at[row.op]][1] < middle:
                at[row.op] += 1
            copies = found.setdefault(unit_of[row.target], _Copies())
            copies.under.setdefault(row.op, busy[at[row.op]][2])
    idle_since = 0.0
    for i, row in enumerate(rows):
        if row.stream != COMPUTE:
            continue
        waited = times[i][0] - idle_since
        idle_since = max(idle_since, times[i][1])
        blockers = [w.row for w in row.waits if not w.lag and rows[w.row].op in at]
        if waited > 1e-9 and blockers:
            last = max(blockers, key=lambda w: times[w][1])
            found[unit_of[rows[last].target]].waited += waited
    return found


# -- notices ----------------------------------------------------------------------------------------------------------
def without_effect(costs: Costs, plan: Plan) -> tuple[str, ...]:
    """Decisions of a plan, from a file or a policy, that move nothing: said by name."""
    decisions = decisions_of(costs, plan)
    need = needs(costs, decisions)
    found = []
    for unit in costs.units:
        if plan.decision(unit.name) is not KEEP and not acts(unit, plan.decision(unit.name), need):
            why = "no backward reads what it makes" if unit.keys else "it makes nothing of its own"
            found.append(f"{decisions[unit.number].value} of {unit.name!r} has no effect: {why}")
    if plan.memory_centric and RECOMPUTE not in decisions:
        found.append("memory_centric has no effect: nothing is recomputed")
    offloaded = {name for unit in costs.units if decisions[unit.number] is OFFLOAD for name in unit.layers}
    for table in ("lags", "distances"):
        for name in getattr(plan, table):
            if name not in offloaded:
                found.append(f"{table} of {name!r} has no effect: it is not offloaded")
    return tuple(found)


def notices(costs: Costs, plan: Plan, program: Program) -> tuple[str, ...]:
    """What of a plan has no effect, and whether all of it has none."""
    found = list(without_effect(costs, plan))
    if plan.policy not in ("keep", "naive", "auto", "file") and not plan.decisions:
        found.append(f"policy {plan.policy} decides nothing for this net: it is the same as keep")
    elif plan.decisions and program.peak_bytes >= costs.peak_bytes:
        largest = program.largest.profile
        found.append(
            f"the plan moves or recomputes {len(plan.decisions)} layers and takes no fewer bytes than keep: the peak, "
            f"{largest.peak_text}, does not consist of them"
        )
    return tuple(found)
