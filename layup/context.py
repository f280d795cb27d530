"""Context: what a policy is told: the request, the costs of its layers, theta and the host budget."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from layup.cost import Costs
from minidnn.request import Request
from minidnn.schedule.analysis import Analysis
from minidnn.schedule.instruction import HOST, Instruction
from minidnn.schedule.lower import Step, lower
from minidnn.schedule.plan import Plan
from minidnn.schedule.program import with_lifetimes
from minidnn.schedule.simulate import total_footprint


class Context:
    """One request, looked at by a planner.

    Attributes:
        theta: of the thesis' rule: a layer is compute-sensitive if its copy takes less than theta times the forward time
            since the last one. 1.0 in one re-implementation of the paper, 2.0 in another.
        host_memory: bytes of pinned host memory a plan may take; None: no limit.
        streamed: layers whose parameters live in pinned host memory, in every plan; ``("*",)``: all.
    """

    def __init__(
        self,
        request: Request,
        *,
        theta: float = 1.0,
        host_memory: int | None = None,
        streamed: tuple[str, ...] = (),
    ) -> None:
        self.request = request
        self.theta = theta
        self.host_memory = host_memory
        self.streamed = streamed
        self.persistent = request.persistent(Plan(streamed=streamed))

    @cached_property
    def analysis(self) -> Analysis:
        """Facts of the graph."""
        return Analysis(self.request.graph, self.request.precision)

    @cached_property
    def base_bytes(self) -> int:
        """Device bytes of the persistent region."""
        return total_footprint(self.persistent.buffers)

    @cached_property
    def host_base_bytes(self) -> int:
        """Pinned bytes that every plan takes: batch and result slots, streamed parameters."""
        return total_footprint(self.persistent.host_buffers, HOST)

    @cached_property
    def costs(self) -> Costs:
        """Costs of all layers and units, from the rows of ``keep``."""
        rows = self.rows(Plan(streamed=self.streamed))
        streamed = Plan(streamed=self.streamed).streamed_layers(node.name for node in self.analysis.graph.nodes)
        return Costs(self.analysis, rows, self.base_bytes, self.request.gpu, streamed)

    @property
    def offload_bytes(self) -> float:
        """Pinned bytes left for activations; infinite without a host budget."""
        return float("inf") if self.host_memory is None else max(0, self.host_memory - self.host_base_bytes)

    def complete(self, plan: Plan) -> Plan:
        """The plan with what this context says of all plans."""
        return replace(plan, streamed=self.streamed) if self.streamed else plan

    def rows(self, plan: Plan) -> list[Instruction]:
        """Rows of a training step under a plan, with ALLOC and FREE. Raises PlanError for a plan that cannot be carried out."""
        rows = lower(self.analysis, self.persistent, plan, self.request.recipe, Step())
        return with_lifetimes(rows, self.persistent)
