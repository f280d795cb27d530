"""Every policy trains every net to the bits of unlimited memory, in the bytes that were predicted: a covering set of the matrix.

The whole matrix is ``scripts/reproduce/equality.py``.
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import minidnn
from layup.context import Context
from layup.cost import Costs
from minidnn.prepare import prepare
from minidnn.schedule.plan import Decision, Plan, Reuse
from tests.step import nets

REPRODUCE = Path(__file__).parents[2] / "scripts" / "reproduce"


def _load() -> ModuleType:
    sys.path.insert(0, str(REPRODUCE))
    try:
        import equality  # type: ignore[import-not-found, unused-ignore]
    finally:
        sys.path.remove(str(REPRODUCE))
    return equality


EQUALITY = _load()
COVERING = EQUALITY.covering(EQUALITY.cases(), budgets_by_net=False)


def test_the_covering_sets_have_every_pair_of_values_and_at_most_120_cases() -> None:
    matrix = EQUALITY.cases()
    for chosen, apart in ((EQUALITY.covering(matrix), None), (COVERING, (0, 2))):  # net and budget
        assert len(chosen) <= 120
        for pair in combinations(range(4), 2):
            if pair != apart:
                a, b = pair
                assert {(case[a], case[b]) for case in chosen} == {(case[a], case[b]) for case in matrix}


@pytest.mark.parametrize("net", EQUALITY.NETS)
def test_every_plan_trains_to_the_bits_of_keep_in_the_predicted_bytes(net: str) -> None:
    bench = EQUALITY.Bench()
    light = net in ("lenet", "resnet20")
    for case in (case for case in COVERING if case.net == net):
        if case.policy == "keep" and not light:
            continue  # what the others are compared with
        outcome = bench.check(case, whole=light, measure=light or case.policy in ("auto", "superneurons_memory"))
        assert outcome.right, outcome
        assert outcome.memory_bytes is None or outcome.reserved_bytes <= outcome.memory_bytes
        if case.policy in ("vdnn", "vdnn_conv", "superneurons") or (case.policy, case.budget) == ("auto", 0):
            assert outcome.offloaded or outcome.recomputed, outcome


@pytest.mark.parametrize("seed", range(24))
def test_random_plans_train_to_the_bits_of_keep_in_the_predicted_bytes(seed: int) -> None:
    """Any decisions, lags, distances, reuse switches and either kind of recomputation."""
    rng = np.random.default_rng(seed)
    make = list(nets.NETS.values())[seed % len(nets.NETS)]
    plan = random_plan(Context(prepare(make(), nets.MOMENTUM, device=None)).costs, rng)
    steps = [minidnn.compile(make(), given, nets.MOMENTUM, tail=2) for given in (minidnn.keep(), plan)]
    losses = [nets.train(step, 3) for step in steps]
    assert losses[0] == losses[1]
    assert nets.differing(nets.state(steps[0]), nets.state(steps[1])) == []
    steps[1].verify(*nets.batch(steps[1].graph))


def random_plan(costs: Costs, rng: np.random.Generator) -> Plan:
    decisions = {
        unit.name: list(Decision)[rng.integers(3)] for unit in costs.units if unit.name != costs.nodes[-1].name
    }
    lags, distances = ({name: int(rng.integers(12)) for name in decisions} for _ in range(2))
    on = (bool(rng.integers(4)) for _ in range(5))
    return Plan(decisions, Reuse(*on), "random", 1, 4, lags, distances, memory_centric=bool(rng.integers(2)))
