"""Refusal: no plan fits. Say what would: the fewest bytes, the row that binds, and three flags with their predicted bytes."""

from __future__ import annotations

from dataclasses import replace

from layup.chain import leanest
from layup.context import Context
from layup.evaluate import Candidate
from layup.planner import Planner
from minidnn.errors import DoesNotFit, UserError
from minidnn.optim import SGD
from minidnn.request import LEAST_WORKSPACE_LIMIT, Request
from minidnn.schedule.program import Program
from minidnn.schedule.text import human_bytes

_LARGE = 3000
"""Layers from which on only one smaller batch is tried: each trial plans again."""


def refuse(planner: Planner, memory: int | None, host_memory: int | None) -> DoesNotFit:
    """The error for budgets that no candidate fits."""
    within = planner.smallest(host_memory)
    if within is None:
        return _host_refusal(planner, memory, host_memory)
    assert memory is not None, "without a device budget the smallest candidate fits"
    program = within.program
    schedule = program.largest
    residents = schedule.profile.residents_at_peak
    largest = ", ".join(f"{r.label} {human_bytes(r.nbytes)}" for r in residents[:5])
    host = _fewest_host_bytes(planner, memory)
    message = (
        f"no plan of policy {planner.policy.name} fits in {memory} B ({human_bytes(memory)}): the smallest reserves "
        f"{program.reserved_bytes} B ({human_bytes(program.reserved_bytes)}), at {schedule.profile.peak_text} of schedule "
        f"{schedule.name!r}, with {human_bytes(program.host_bytes)} of pinned host memory; largest residents there: {largest}; "
        f"try {'; '.join(_advice(planner, program.reserved_bytes, memory, host, host_memory))}"
    )
    return _error(message, program, program.reserved_bytes, host or program.host_bytes)


def _host_refusal(planner: Planner, memory: int | None, host_memory: int | None) -> DoesNotFit:
    """Not even the plan that moves nothing keeps to the host budget, or the policy has no other."""
    limit = float("inf") if memory is None else memory
    fewest = _fewest_host_bytes(planner, limit)
    smallest = planner.smallest()
    assert smallest is not None
    program = smallest.program
    wanted = fewest or program.host_bytes
    advice = [f"--host-memory {wanted} ({human_bytes(wanted)})"]
    if planner.policy.name != "auto":
        advice.append(f"--policy auto, which recomputes instead ({_auto_host(planner)})")
    advice += _smaller_batches(planner, limit)
    message = (
        f"pinned host memory: policy {planner.policy.name} needs {wanted} B ({human_bytes(wanted)}), the host budget is "
        f"{host_memory} B; try {'; '.join(advice[:3])}"
    )
    return _error(message, program, program.reserved_bytes, wanted)


def _auto_host(planner: Planner) -> str:
    auto = Planner(planner.context, "auto").keep
    return f"from {human_bytes(auto.train.profile.host_bytes)}"


def _error(message: str, program: Program, minimum: int, host: int) -> DoesNotFit:
    profile = program.largest.profile
    residents = [(r.name, r.nbytes) for r in profile.residents_at_peak]
    return DoesNotFit(
        message, minimum_bytes=minimum, minimum_host_bytes=host, row=profile.peak_text, residents=residents
    )


def _fewest_host_bytes(planner: Planner, memory: float) -> int | None:
    """Pinned bytes with which some candidate fits the device budget; None if none does."""
    for candidate in sorted(planner.candidates, key=lambda c: c.peaks[1]):
        if candidate.fits(memory, float("inf")):
            return candidate.program.host_bytes
    return None


def _advice(planner: Planner, minimum: int, memory: int, host: int | None, host_memory: int | None) -> list[str]:
    """Flags with the bytes that they lead to, the plainest first; the first three are said."""
    found = [f"--memory {minimum} ({human_bytes(minimum)}: the smallest that runs)"]
    if host is not None and host_memory is not None and host > host_memory:
        found.append(f"--host-memory {host} ({human_bytes(host)} of it would make the budget enough)")
    found += _smaller_batches(planner, memory)
    if planner.policy.name != "auto":
        auto = Planner(planner.context, "auto").smallest(host_memory)
        if auto is not None:
            found.append(f"--policy auto (from {human_bytes(auto.program.reserved_bytes)})")
    request = planner.context.request
    lean = _minimum(planner, request.with_least_workspace())
    if lean is not None and lean < minimum:
        found.append(
            f"--workspace-limit {LEAST_WORKSPACE_LIMIT} ({human_bytes(lean)}, but another recipe means other bits)"
        )
    if request.optimizer.slots:
        plain = _minimum(planner, replace(request, optimizer=SGD(lr=request.optimizer.lr)))
        if plain is not None and plain < minimum:
            found.append(f"--opt sgd --momentum 0 ({human_bytes(plain)}, without optimizer state)")
    return found[:4]


def _smaller_batches(planner: Planner, memory: float) -> list[str]:
    """The largest of the batches b/2, b/4, b/8 that fits, or the last of them."""
    request = planner.context.request
    batch = request.graph.inputs[0].shape[0]
    found = ""
    for part in (2, 4, 8):
        if batch // part < 1:
            break
        try:
            nbytes = _minimum(planner, request.with_batch(batch // part))
        except UserError:  # such as batch norm of a single value
            break
        if nbytes is None:
            break
        verdict = "fits" if nbytes <= memory else "still too much"
        found = f"-b {batch // part} ({human_bytes(nbytes)}: {verdict})"
        if nbytes <= memory or len(request.graph.nodes) > _LARGE:
            break
    return [found] if found else []


def _minimum(planner: Planner, request: Request) -> int | None:
    """Bytes under which another request runs with the same policy. Of ``auto``: those of its leanest plan by estimate."""
    context = planner.context
    other = Context(request, theta=context.theta, host_memory=context.host_memory, streamed=context.streamed)
    if planner.policy.name == "auto":
        return Candidate(other, leanest(other)).program.reserved_bytes
    smallest = Planner(other, planner.policy.name).smallest(context.host_memory)
    return None if smallest is None else smallest.program.reserved_bytes
