"""Request: what is asked of a training step besides plan and budgets, the same for all plans that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minidnn import profiles
from minidnn.budget import ProcessMemory, device_limit, parse_bytes, process_memory
from minidnn.device.base import Device
from minidnn.fuse import fuse
from minidnn.layers import Graph
from minidnn.optim import Optimizer
from minidnn.parallel.communicator import Communicator
from minidnn.precision import Precision
from minidnn.recipes import numpy_recipe
from minidnn.schedule.persistent import Persistent
from minidnn.schedule.plan import Plan, keep
from minidnn.schedule.program import Program, Schedule, build
from minidnn.schedule.ranks import Ranks
from minidnn.schedule.recipe import Recipe

if TYPE_CHECKING:
    from minidnn.device.cuda import CudaDevice

LEAST_WORKSPACE_LIMIT = 1
"""The smallest there is, in bytes: on a GPU engines without workspace alone, in NumPy convolutions of one image at a time."""

_UNASKED = 0  # as a limit: ``CudaDevice.select_engine`` answers without asking the libraries


@dataclass(frozen=True, slots=True)
class Request:
    """Graph, recipe and all else that a plan and a budget do not change. Made by ``prepare``; holds no array.

    ``source`` is the graph as it was given, of several ranks for this rank's share of the batch; ``graph`` what the recipe's
    fusions make of it: what is planned and lowered; ``tail_graph`` the same for a smaller last batch. ``owns_device``: the device
    was opened for this request, since it was named; one that was given is its giver's.
    """

    source: Graph
    graph: Graph
    tail_graph: Graph | None
    optimizer: Optimizer
    precision: Precision
    gpu: profiles.Profile
    recipe: Recipe
    tail_recipe: Recipe | None
    accumulate: int
    seed: int
    allocator: str
    device: Device | None
    ranks: Ranks | None = None
    communicator: Communicator | None = None
    capture: str = "auto"
    process_memory: int | None = None
    clip_grad_norm: float | None = None
    owns_device: bool = True

    @property
    def tail(self) -> int | None:
        """Samples of the smaller last batch; None: there is none."""
        return None if self.tail_graph is None else self.tail_graph.inputs[0].shape[0]

    def translate(self, plan: Plan) -> Plan:
        """A plan for the graph as it was given, said of the fused one."""
        return fuse(self.source, self.recipe.fusions).plan(plan)

    def with_least_workspace(self) -> Request:
        """The same request under ``LEAST_WORKSPACE_LIMIT``: another recipe, other bits. Its bytes are to be counted, no more.

        On a GPU every engine is counted as without workspace, as it is under that limit; which one it is is not asked, since
        that takes seconds.
        """
        limit = _UNASKED if hasattr(self.device, "select_engine") else LEAST_WORKSPACE_LIMIT
        tail = None if self.tail is None else self._recipe(self.source.with_batch(self.tail), limit)
        return replace(self, recipe=self._recipe(self.source, limit), tail_recipe=tail)

    def _recipe(self, graph: Graph, workspace_limit: int | None) -> Recipe:
        """The recipe of another batch or limit, without measuring, so that it is the same every time."""
        deterministic, fusions = self.recipe.deterministic, self.recipe.fusions
        return make_recipe(graph, self.precision, workspace_limit, deterministic, fusions, self.device, tune=False)

    def with_batch(self, batch: int) -> Request:
        """The same request for another batch, without a smaller last one."""
        source = self.source.with_batch(batch)
        recipe = self._recipe(source, self.recipe.workspace_limit)
        graph = fuse(source, recipe.fusions).graph
        return replace(self, source=source, graph=graph, tail_graph=None, recipe=recipe, tail_recipe=None)

    def persistent(self, plan: Plan) -> Persistent:
        """The persistent region under a plan. It depends on what the plan streams and on nothing else of it."""
        return Persistent(
            self.graph, self.precision, self.optimizer, accumulate=self.accumulate > 1, plan=plan, ranks=self.ranks,
            clip_grad_norm=self.clip_grad_norm,
        )  # fmt: skip

    def program(
        self, plan: Plan, persistent: Persistent | None = None, made: Mapping[str, Schedule] | None = None
    ) -> Program:
        """Build all schedules under a plan; ``made`` are those that exist already, on the same ``persistent``."""
        return build(
            self.graph, self.tail_graph, plan, self.recipe, self.tail_recipe, persistent or self.persistent(plan), self.gpu,
            self.accumulate, made or {}, self.source,
        )  # fmt: skip

    def device_budget(self, memory: int | str | None) -> int | None:
        """The device budget in bytes; a percentage is of what ``keep`` reserves. None on a GPU: what is free there.

        Raises UserError for what a GPU does not have, and where ``process_memory`` leaves nothing.
        """
        asked = None if memory is None else parse_bytes(memory, whole=lambda: self.program(keep()).reserved_bytes)
        return device_limit(self.device, asked, self.process())

    def process(self) -> ProcessMemory | None:
        """What ``process_memory`` leaves for the slab; None without such a bound. Measures, so it may vary by some bytes."""
        if self.process_memory is None:
            return None
        captured = self.capture != "off" and self.allocator == "slab"
        return process_memory(self.device, self.process_memory, len(self.graph.nodes), captured)

    def close_device(self) -> None:
        """Close the device if it was opened for this request."""
        if self.owns_device and self.device is not None:
            self.device.close()


def make_recipe(
    graph: Graph, precision: Precision, limit: int | None, deterministic: bool, fusions: Sequence[str] | None,
    device: Device | None, *, tune: bool = True, room: int | None = None,
) -> Recipe:  # fmt: skip
    """The recipe of a graph on a device; ``fusions`` None: those that pay there.

    ``tune``: measure which engines are fastest, in ``room`` bytes at a time if they are bounded.
    """
    if not hasattr(device, "select_engine"):
        return numpy_recipe(graph, precision, limit, deterministic, fusions or ())
    from minidnn.cuda_recipes import cuda_recipe

    cuda: CudaDevice = device  # type: ignore[assignment]  # no other device selects engines
    return cuda_recipe(graph, precision, limit, deterministic, fusions, device=cuda, tune=tune, room=room)
