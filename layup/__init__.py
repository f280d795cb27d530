"""Layup: the memory optimiser that writes the plan of a step, so that it fits a byte budget.

``compile`` is ``minidnn.compile`` with a budget instead of a plan; ``plan`` says what it would do, and why; ``minimum_memory``
and ``max_batch`` say how far it goes. The training that results is the same to the bit as with unlimited memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layup.context import Context
from layup.planned import Planned, planned
from layup.planner import Planner
from layup.refusal import refuse
from minidnn.budget import parse_bytes
from minidnn.compile import make_step
from minidnn.errors import UserError
from minidnn.layers import Graph
from minidnn.prepare import prepare
from minidnn.profiles import Profile
from minidnn.request import Request
from minidnn.schedule.program import uncollected
from minidnn.step import CompiledStep

__all__ = ["Context", "Planned", "Planner", "compile", "max_batch", "minimum_memory", "plan"]


def plan(
    graph: Graph,
    memory: int | str | None = None,
    policy: str = "auto",
    cost: str | Path | Profile | None = None,
    host_memory: int | str | None = None,
    theta: float = 1.0,
    streamed: tuple[str, ...] = (),
    **same: Any,
) -> Planned:
    """Plan a training step under byte budgets. Allocates nothing.

    Args:
        graph: ends in one loss.
        memory: device budget: bytes, ``"4GiB"``, or ``"60%"`` of what ``keep`` reserves; None: no limit.
        policy: a name of ``layup.policies.POLICIES``.
        cost: profile by whose costs plans are compared, such as a measured profile file; None: ``profile``, default h200.
        host_memory: budget of pinned host memory: bytes or ``"4GiB"``; None: no limit.
        theta: of the thesis' rule, for ``policy="layup"``.
        streamed: layers whose parameters and optimizer state live in pinned host memory; ``("*",)``: all.
        same: the other arguments of ``minidnn.compile``.

    Raises:
        DoesNotFit: no plan of the policy fits; the message names what would.
        UserError: anything else that cannot be done as asked, in one sentence.
    """
    with _request(graph, cost, same) as request, uncollected():
        return _choose(_planner(request, policy, host_memory, theta, streamed), memory)


def compile(
    graph: Graph,
    memory: int | str | None = None,
    policy: str = "auto",
    cost: str | Path | Profile | None = None,
    host_memory: int | str | None = None,
    theta: float = 1.0,
    streamed: tuple[str, ...] = (),
    **same: Any,
) -> CompiledStep:
    """Plan a training step under byte budgets and compile it. The arguments are those of ``plan``.

    Raises DoesNotFit and UserError as ``plan`` does; nothing was allocated then.
    """
    with _request(graph, cost, same, lasts=True) as request:
        with uncollected():
            chosen = _choose(_planner(request, policy, host_memory, theta, streamed), memory)
        return make_step(request, chosen.plan, chosen.program, chosen.memory)


def minimum_memory(
    graph: Graph,
    policy: str = "auto",
    cost: str | Path | Profile | None = None,
    host_memory: int | str | None = None,
    theta: float = 1.0,
    streamed: tuple[str, ...] = (),
    **same: Any,
) -> int:
    """The smallest device budget in bytes under which ``compile`` with this policy succeeds; so does every larger one.

    Raises DoesNotFit if the host budget alone cannot be kept.
    """
    with _request(graph, cost, same) as request, uncollected():
        planner = _planner(request, policy, host_memory, theta, streamed)
        smallest = planner.smallest(planner.context.host_memory)
        if smallest is None:
            raise refuse(planner, None, planner.context.host_memory)
        return smallest.program.reserved_bytes


def max_batch(
    build: Callable[[int], Graph],
    memory: int | str,
    policy: str = "auto",
    *,
    start: int = 1,
    limit: int = 1 << 20,
    **same: Any,
) -> int:
    """The largest batch whose step fits ``memory`` bytes under a policy, by doubling and bisection.

    ``build(batch)`` makes the graph; ``start``: a batch to begin with, which some nets need above 1; ``same``: arguments of
    ``minimum_memory``. Raises DoesNotFit if not even ``start`` fits; UserError for a percentage, which is of a batch.
    """
    budget = parse_bytes(memory)

    def fits(batch: int) -> bool:
        return minimum_memory(build(batch), policy, **same) <= budget

    if not fits(start):
        plan(build(start), budget, policy, **same)  # raises with all that is to be said
    good, bad = start, start * 2
    while bad <= limit and fits(bad):
        good, bad = bad, bad * 2
    bad = min(bad, limit + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


@contextmanager
def _request(
    graph: Graph, cost: str | Path | Profile | None, same: dict[str, Any], *, lasts: bool = False
) -> Iterator[Request]:
    """A request whose device, if it is opened here, is closed in the end; ``lasts``: only after an error."""
    if "plan" in same:
        raise UserError("layup makes the plan: leave plan= out, or use minidnn.compile")
    request = prepare(graph, **(same if cost is None else {**same, "profile": cost}))
    done = False
    try:
        yield request
        done = True
    finally:
        if not (lasts and done):
            request.close_device()


def _planner(
    request: Request, policy: str, host_memory: int | str | None, theta: float, streamed: tuple[str, ...]
) -> Planner:
    if not theta > 0:
        raise UserError(f"theta={theta!r} must be above 0; 1.0 is usual")
    host = None if host_memory is None else parse_bytes(host_memory, what="host_memory")
    return Planner(Context(request, theta=theta, host_memory=host, streamed=streamed), policy)


def _choose(planner: Planner, memory: int | str | None) -> Planned:
    context = planner.context
    asked = None if memory is None else parse_bytes(memory, whole=lambda: planner.keep.program.reserved_bytes)
    budget = context.request.device_budget(asked)
    chosen = planner.select(budget, context.host_memory)
    if chosen is None:
        raise refuse(planner, budget, context.host_memory)
    looked_at = [planner.keep] if chosen is planner.keep else planner.candidates
    return planned(context, chosen, looked_at, budget)
