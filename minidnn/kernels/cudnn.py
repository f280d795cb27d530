"""cuDNN through its frontend: one handle, one cache of plans, and the choice of an engine for every convolution direction and
every matrix product.

A plan is a graph of one operation, built for exact shapes. Which engine computes it, under which knobs, is recorded in the
recipe as plain integers and can be built again from them, so a recipe replays the same bits. Neither the GPU's memory nor
a budget is looked at: a plan states its workspace, the caller provides it. cuDNN's own modules lie outside any slab.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from minidnn.errors import UserError
from minidnn.kernels.cuda_folded import folded_engines
from minidnn.kernels.cuda_parts import part_engines
from minidnn.kernels.cuda_turned import turned_engines
from minidnn.kernels.cudnn_graphs import ALIGNMENT, OperationGraphs
from minidnn.kernels.problem import FIRST, OWN, Problem, Product, asked, split
from minidnn.schedule.recipe import Engine

Work = Callable[[], None]

NO_LIMIT = 1 << 40
KNOB = "knob_"


class Plan:
    """A built graph with its engine, and the bytes of workspace a run of it takes."""

    __slots__ = ("graph", "workspace_bytes")

    def __init__(self, graph: Any, workspace_bytes: int) -> None:
        self.graph = graph
        self.workspace_bytes = workspace_bytes


class PlanRun:
    """A plan bound to addresses: hands cuDNN a ready array of pointers, in the order of the operands' numbers."""

    __slots__ = ("_call", "_pointers")

    def __init__(self, plan: Plan, handle: int, pointers: Mapping[int, int], workspace: int) -> None:
        graph = plan.graph
        self._pointers: Any = dict(pointers)
        if hasattr(graph, "_execute_with_raw_ptrs"):
            graph._prepare_variant_pack_template()
            order = [pointers[number] for number in graph._get_variant_pack_uids_sorted()]
            self._pointers = (ctypes.c_int64 * len(order))(*order)
            address = ctypes.addressof(self._pointers)
            self._call = partial(graph._execute_with_raw_ptrs, address, len(order), workspace, handle)
        else:  # frontends before 1.26
            self._call = partial(graph.execute, self._pointers, workspace, handle=handle)

    def __call__(self) -> None:
        self._call()


class Cudnn:
    """A cuDNN handle on one stream of the current device. Used by one thread.

    ``precision`` "fp32" forbids tensor cores, ``deterministic`` every engine that adds in a varying order.
    ``refuse`` names what is to be refused by force, "convolution" or "matmul", so that the fallbacks can be tested.
    """

    def __init__(self, stream: int, precision: str, deterministic: bool, refuse: frozenset[str] = frozenset()) -> None:
        import cudnn

        self._cudnn = cudnn
        self._refuse = refuse
        self.single = precision == "fp32"
        self.blas: Any = None  # a ``cuda_columns.BlasEngines``, where there is cuBLAS
        self._plans: dict[Any, Plan] = {}  # by what cuDNN is asked
        self._kept: set[Any] = set()
        self._choices: dict[tuple[Problem, int | None], Engine] = {}
        self.handle: int = cudnn.create_handle()
        cudnn.set_stream(handle=self.handle, stream=stream)
        note = cudnn.numerical_note
        self.restrictions = (
            f"{precision} deterministic={deterministic}"  # what decides besides a problem which engines may be
        )
        self._barred = [note.DOWN_CONVERT_INPUTS, note.REDUCED_PRECISION_REDUCTION]
        if precision == "fp32":
            self._barred.append(note.TENSOR_CORE)
        if deterministic:
            self._barred.append(note.NONDETERMINISTIC)
        self._refusals = (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError)
        self._graphs = OperationGraphs(cudnn)

    def versions(self) -> dict[str, str]:
        """Versions of the frontend and of the library behind it."""
        found = {"cudnn_frontend": str(self._cudnn.__version__), "cudnn": str(self._cudnn.backend_version())}
        return found | ({} if self.blas is None else {"cublas": str(self.blas.version())})

    def close(self) -> None:
        """Destroy the handle. Idempotent."""
        self._plans.clear()
        if self.blas is not None:
            self.blas.close()
        if self.handle:
            self._cudnn.destroy_handle(self.handle)
            self.handle = 0

    # -- engines ----------------------------------------------------------------------------------------------------
    def select(self, problem: Problem, workspace_limit: int | None) -> Engine:
        """The first engine in the order of cuDNN's heuristics that builds, stays under the limit and can be built again.

        Where there is none, our own kernel: Engine "direct". Does not measure.
        """
        key = (problem, workspace_limit)
        if key not in self._choices:
            self._choices[key] = self._select(problem, workspace_limit)
        return self._choices[key]

    def _select(self, problem: Problem, workspace_limit: int | None) -> Engine:
        engine = next(self.engines(problem, workspace_limit), None)
        if engine is None and isinstance(problem, Product):
            return self._first(problem, workspace_limit)
        if engine is not None or isinstance(problem, Product) or problem.direction != "forward_relu":
            return engine or OWN
        return split(next(self.engines(problem._replace(direction="forward"), workspace_limit), OWN))

    def _first(self, problem: Product, workspace_limit: int | None) -> Engine:
        """The engine that the heuristics name first, though it cannot be built again from its number and knobs; else our own."""
        options = (("engine", FIRST), ("limit", NO_LIMIT if workspace_limit is None else workspace_limit))
        try:
            return (
                OWN
                if self.refuses(problem)
                else Engine("cudnn", self.plan(problem, dict(options)).workspace_bytes, options)
            )
        except UserError:
            return OWN

    def refuses(self, problem: Problem) -> bool:
        """Whether problems of this kind are refused by force."""
        return ("matmul" if isinstance(problem, Product) else "convolution") in self._refuse

    def engines(self, problem: Problem, workspace_limit: int | None) -> Iterator[Engine]:
        """The engines that build, stay under the limit and can be built again from their options, best first."""
        yield from self.offered(problem, workspace_limit)
        yield from self.others(problem, workspace_limit)

    def offered(self, problem: Problem, workspace_limit: int | None) -> Iterator[Engine]:
        """Those that cuDNN's heuristics name for the problem as it is."""
        if self.refuses(problem):
            return
        if isinstance(problem, Product) and self.single:
            return  # its only engine computes that in TF32, whatever is barred
        for options in self.candidates(problem, workspace_limit):
            try:
                plan = self.plan(problem, dict(options))
            except UserError:  # an engine with a knob that this frontend cannot name
                continue
            if workspace_limit is None or plan.workspace_bytes <= workspace_limit:
                yield Engine("cudnn", plan.workspace_bytes, options)

    def others(self, problem: Problem, workspace_limit: int | None) -> Iterator[Engine]:
        """The engines of cuBLAS, and cuDNN's own otherwise: on folded operands, which need tensor cores to pay; in true fp32 on
        parts of the batch, because the fast ones take more workspace there than a whole net, and turned, because the fast ones
        are for the other direction."""
        if self.refuses(problem):
            return
        if self.blas is not None:
            yield from self.blas.engines(problem, workspace_limit)
        for kind in (part_engines, turned_engines) if self.single else (folded_engines,):
            yield from kind(self, problem, workspace_limit)

    def candidates(self, problem: Problem, workspace_limit: int | None) -> Iterator[tuple[tuple[str, int], ...]]:
        """Engines with their knobs, as options of a recipe's ``Engine``, best first by cuDNN's heuristics. Each one builds,
        and is given once, though several heuristics name it."""
        try:
            graph = self._graphs.build(problem, self.handle)
        except self._refusals:  # no engine takes these shapes at all
            return
        given = set()
        for number in self._buildable(graph, workspace_limit):
            engine, knobs = graph.get_engine_and_knobs_at_index(number)
            named = {f"{KNOB}{knob.name}": int(value) for knob, value in knobs.items()}
            options = tuple(sorted({"engine": int(engine), **named}.items()))
            if f"{KNOB}NOT_SET" not in named and options not in given:
                given.add(options)
                yield options

    def plan(self, problem: Problem, options: Mapping[str, int]) -> Plan:
        """Build the plan of an engine and its knobs, folded, turned or for a part of the images where they say so.

        Raises UserError if this cuDNN, on this GPU, has no such engine.
        """
        key = asked(problem, options)
        if key not in self._plans:
            try:
                self._plans[key] = self._built(key[0], dict(key[1]))
            except self._refusals as error:
                raise UserError(
                    f"cuDNN {self._cudnn.backend_version()} on this GPU cannot build engine {dict(options)} for {problem}: "
                    f"{_first_line(error)}; the recipe was made elsewhere, leave --recipe out to choose anew"
                ) from None
        return self._plans[key]

    def _built(self, problem: Problem, options: Mapping[str, int]) -> Plan:
        graph, number = self._graphs.build(problem, self.handle), 0
        if options["engine"] == FIRST:
            number = next(self._buildable(graph, options["limit"]), -1)
            if number < 0:
                raise RuntimeError("none of its engines builds under the limit")
        else:
            kinds = self._cudnn.knob_type
            knobs = {getattr(kinds, k.removeprefix(KNOB)): v for k, v in options.items() if k.startswith(KNOB)}
            graph.create_execution_plan(options["engine"], knobs)
            graph.build_plan_at_index(0)
        return Plan(graph, int(graph.get_workspace_size_plan_at_index(number)))

    def keep(self, problem: Problem, engine: Engine) -> None:
        """Drop all plans but this engine's and those kept before. A plan that is wanted again is built again."""
        if engine.name.startswith("cudnn"):
            self._kept.add(asked(problem, dict(engine.options)))
        self._plans = {key: plan for key, plan in self._plans.items() if key in self._kept}

    def run(self, plan: Plan, pointers: Mapping[int, int], workspace: int) -> Work:
        """Bind a plan to addresses."""
        assert all(pointer % ALIGNMENT == 0 for pointer in pointers.values()), "cuDNN's operands are 16-byte aligned"
        return PlanRun(plan, self.handle, pointers, workspace)

    def _buildable(self, graph: Any, workspace_limit: int | None) -> Iterator[int]:
        """Numbers of the plans that the precision, determinism and the limit allow and that build, best first.

        All heuristics are asked and all plans tried: in true fp32 most of the first ones are barred.
        """
        mode = self._cudnn.heur_mode
        try:
            graph.create_execution_plans([mode.A, mode.B, mode.FALLBACK])
        except self._refusals:
            return
        graph.deselect_numeric_notes(self._barred)
        if workspace_limit is not None:
            graph.deselect_workspace_greater_than(workspace_limit)
        for number in range(graph.get_execution_plan_count()):
            try:
                graph.build_plan_at_index(number)
            except self._refusals:
                continue
            yield number


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
