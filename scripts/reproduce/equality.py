"""Bit-identity: every policy, net, budget and optimizer trains to the same bits as unlimited memory.

    python scripts/reproduce/equality.py [--nets lenet,resnet20] [--policies auto,layup] [--tiny]

Three steps under a plan and under ``keep`` without a budget; then weights, running statistics, optimizer state and losses are
compared to the bit, and the memory of the step is measured independently and compared with its prediction, on device and host.
A policy with a memory knob runs under six budgets, from the smallest that runs to what its largest plan takes; one without
is one point. Images are small, so that the emulated device does it in minutes; channels are those of the papers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import models
from layup.context import Context
from layup.evaluate import Candidate
from layup.planner import Planner
from layup.policies import POLICIES, find
from minidnn.commandline import run
from minidnn.compile import make_step
from minidnn.device.emulated import EmulatedDevice
from minidnn.errors import UserError, nearest
from minidnn.layers import Graph
from minidnn.measure import measure_schedule
from minidnn.optim import SGD, Adam, Optimizer
from minidnn.prepare import prepare
from minidnn.schedule.program import Program, layout
from minidnn.step import CompiledStep

BUDGETS = 6
STEPS = 3
CLASSES = 10

NETS: dict[str, Callable[[], Graph]] = {
    "lenet": lambda: models.build("lenet", batch=4, in_channels=1, classes=CLASSES),
    "vgg11_bn": lambda: models.build("vgg11_bn", batch=2, image_size=32, classes=CLASSES),
    "resnet20": lambda: models.build("resnet20", batch=4, image_size=16, classes=CLASSES),
    "googlenet": lambda: models.build("googlenet", batch=2, image_size=32, classes=CLASSES),
    "densenet121": lambda: models.build("densenet121", batch=2, image_size=32, classes=CLASSES),
    "alexnet_2012": lambda: models.build("alexnet_2012", batch=2, image_size=67, classes=CLASSES),
}
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(lr=0.01, momentum=0.9, weight_decay=1e-4),
    "nesterov": SGD(lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adam": Adam(lr=1e-3),
}


class Case(NamedTuple):
    """One training. ``budget``: 0, the smallest that runs, to 5, the policy's own maximum; None: a policy that is one point."""

    net: str
    policy: str
    budget: int | None
    optimizer: str


class Outcome(NamedTuple):
    """What a case came to; ``differing``: names of arrays whose bits are not those of ``keep``, which must be none."""

    case: Case
    memory_bytes: int | None
    reserved_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_host_bytes: int
    measured_host_bytes: int
    offloaded: int
    recomputed: int
    differing: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Same bits, and bytes as predicted."""
        same = self.predicted_peak_bytes == self.measured_peak_bytes
        return not self.differing and same and self.predicted_host_bytes == self.measured_host_bytes


def cases(
    nets: Iterable[str] = NETS, policies: Iterable[str] = POLICIES, optimizers: Iterable[str] = OPTIMIZERS
) -> list[Case]:
    """The whole matrix."""
    budgets = {name: range(BUDGETS) if find(name).knob else (None,) for name in policies}
    return [Case(n, p, b, o) for n in nets for p, some in budgets.items() for b in some for o in optimizers]


def covering(matrix: Sequence[Case], *, budgets_by_net: bool = True) -> list[Case]:
    """Some cases in which every two values of any two columns that meet in the matrix meet: pairwise covering, greedily.

    ``budgets_by_net``: also every budget with every net; False leaves that pair of columns to chance.
    """

    def pairs(case: Case) -> set[tuple[object, ...]]:
        columns = [c for c in combinations(range(len(case)), 2) if budgets_by_net or c != (0, 2)]
        return {(a, case[a], b, case[b]) for a, b in columns}

    missing = set().union(*map(pairs, matrix))
    left, chosen = list(matrix), []
    while missing:
        best = max(left, key=lambda case: len(pairs(case) & missing))
        left.remove(best)
        missing -= pairs(best)
        chosen.append(best)
    return sorted(chosen, key=lambda case: (list(NETS).index(case.net), case.optimizer, case.policy, case.budget or 0))


def batch(graph: Graph, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Random pixels and labels."""
    rng = np.random.default_rng(seed)
    shape = graph.inputs[0].shape
    return rng.standard_normal(shape, np.float32), rng.integers(0, CLASSES, shape[0])


class Bench:
    """Runs cases; plans, and what ``keep`` trains to, are made once."""

    def __init__(self) -> None:
        self.context = cache(self._context)
        self.planner = cache(self._planner)
        self.reference = cache(self._reference)

    def _context(self, net: str, optimizer: str) -> Context:
        return Context(prepare(NETS[net](), OPTIMIZERS[optimizer], device=None))

    def _planner(self, net: str, policy: str, optimizer: str) -> Planner:
        return Planner(self.context(net, optimizer), policy)

    def _reference(self, net: str, optimizer: str) -> dict[str, bytes]:
        keep = self.planner(net, "keep", optimizer).keep
        step = _step(keep, whole=False)
        trained = _train(step)
        step.close()
        return trained

    def memory(self, case: Case) -> int | None:
        """The budget of a case in bytes: between the smallest that runs and what the policy's fastest plan takes."""
        if case.budget is None:
            return None
        planner = self.planner(case.net, case.policy, case.optimizer)
        smallest, fastest = planner.smallest(), planner.select(None)
        assert smallest is not None and fastest is not None
        low, high = smallest.program.reserved_bytes, fastest.program.reserved_bytes
        return low + (high - low) * case.budget // (BUDGETS - 1)

    def check(self, case: Case, *, whole: bool = True, measure: bool = True) -> Outcome:
        """Train a case, compare and measure; ``whole``: measure all schedules of the program, not the training step alone;
        ``measure``: False takes the bytes as predicted, and compares bits alone.

        Raises VerificationError where the memory is not as predicted.
        """
        memory = self.memory(case)
        planner = self.planner(case.net, case.policy, case.optimizer)
        chosen = planner.candidates[0] if memory is None else planner.select(memory)
        assert chosen is not None, f"{case}: the budget must be one that runs"
        step = _step(chosen, whole=whole)
        trained = _train(step)
        reference = self.reference(case.net, case.optimizer)
        assert trained.keys() == reference.keys()
        x, y = batch(step.graph, STEPS)
        host_peaks = [s.profile.host_peak_bytes for s in step.program.schedules.values()]
        predicted = step.profile.peak_bytes
        peak, host = predicted, max(host_peaks)
        if measure and whole:
            step.verify(x, y)
            assert step.measured.peak_bytes is not None and step.measured.host_bytes is not None
            peak, host = step.measured.peak_bytes, step.measured.host_bytes
        elif measure:
            measured, _ = measure_schedule(step.executor, step.fill_slot, "train", x, y)
            peak, host = measured.peak_bytes, measured.host_peak_bytes
        step.close()
        decisions = [d.value for d in chosen.plan.decisions.values()]
        return Outcome(
            case,
            memory,
            step.program.reserved_bytes,
            predicted,
            peak,
            max(host_peaks),
            host,
            decisions.count("offload"),
            decisions.count("recompute"),
            tuple(name for name, bits in reference.items() if trained[name] != bits),
        )


def _step(candidate: Candidate, *, whole: bool) -> CompiledStep:
    """The step of a plan on a device of its own; not ``whole``: with the schedule of a training step alone."""
    request = candidate.context.request
    if whole:
        program = candidate.program
    else:
        train, persistent = candidate.train, candidate.context.persistent
        reserved, host = train.profile.reserved_bytes, train.profile.host_bytes
        program = Program({"train": train}, persistent, layout(persistent), reserved, host)
    return make_step(replace(request, device=EmulatedDevice()), candidate.plan, program, program.reserved_bytes)


def _train(step: CompiledStep) -> dict[str, bytes]:
    """All that three steps leave, as bytes."""
    losses = [step.run(*batch(step.graph, number)).loss for number in range(STEPS)]
    state: dict[str, Any] = {**step.state_dict(), **step.optimizer_state_dict(), "losses": np.array(losses)}
    return {name: np.asarray(array).tobytes() for name, array in state.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: exit code 0 if every case is right, 3 otherwise."""
    from figures import markdown, names_of, options, save  # beside this file

    parser = options(__doc__, "h200")
    parser.add_argument("--nets", metavar="NAMES", help="comma-separated (default: all)")
    parser.add_argument("--policies", metavar="NAMES", help="comma-separated (default: all)")
    args = parser.parse_args(argv)
    nets = list(NETS) if args.nets is None else args.nets.split(",")
    for net in nets:
        if net not in NETS:
            raise UserError(f"unknown net {net!r} in --nets; {nearest(net, NETS)}")
    matrix = cases(["lenet"] if args.tiny else nets, names_of(args.policies, list(POLICIES)))
    matrix = covering(matrix) if args.tiny else matrix
    bench, outcomes, net = Bench(), [], ""
    for case in matrix:
        if case.net != net:
            bench, net = Bench(), case.net  # give the plans of the last net back
        outcome = bench.check(case)
        outcomes.append(outcome)
        verdict = "same bits" if outcome.right else f"DIFFERS: {outcome.differing[:3]}"
        print(
            f"{len(outcomes)}/{len(matrix)} {case.net} {case.policy} {case.budget} {case.optimizer}: {verdict}",
            flush=True,
        )
    print(markdown(("net", "cases", "same bits, bytes as predicted", "reserved"), _summary(outcomes)))
    rows = [
        outcome.case._asdict() | {k: v for k, v in outcome._asdict().items() if k != "case"} for outcome in outcomes
    ]
    wrong = [row for row, outcome in zip(rows, outcomes, strict=True) if not outcome.right]
    path = Path(args.json) if args.json else None
    save("equality", {"cases": len(rows), "wrong": len(wrong), "steps": STEPS, "rows": rows}, path, args.tiny)
    return 3 if wrong else 0


def _summary(outcomes: Sequence[Outcome]) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for net in dict.fromkeys(outcome.case.net for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.case.net == net]
        low, high = (f(outcome.reserved_bytes for outcome in mine) for f in (min, max))
        found.append((net, len(mine), sum(outcome.right for outcome in mine), f"{low:,} to {high:,} B"))
    return found


if __name__ == "__main__":
    sys.exit(run(main))
