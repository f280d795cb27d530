"""No order that the waits allow changes a bit, and no wait can be left out: on rows that are scattered over all streams."""

from __future__ import annotations

import random

import numpy as np
import pytest

from minidnn.schedule.instruction import STREAMS
from tests.step.scatter import GRAPHS, Scattered, problems


@pytest.fixture(scope="module", params=GRAPHS)
def case(request: pytest.FixtureRequest) -> Scattered:
    """A residual, a densely connected and a dropout net."""
    return Scattered(request.param, seed=1)


def test_a_scattered_step_uses_all_streams_and_needs_a_hundred_waits_some_across_the_step_boundary(
    case: Scattered,
) -> None:
    assert {row.stream for row in case.schedule.rows} == set(STREAMS)
    assert len(case.deletions) >= 100
    assert any(wait.lag for row in case.schedule.rows for wait in row.waits)
    assert problems(case.schedule) == []


def test_fifty_adversarial_orders_leave_identical_bits(case: Scattered) -> None:
    assert case.expected is not None
    losses = np.frombuffer(case.expected["losses"])
    assert np.isfinite(losses).all() and losses[0] != losses[1]
    assert case.wrong(case.schedule, range(50)) is None


def test_the_static_reader_flags_every_single_deleted_wait(case: Scattered) -> None:
    assert [deletion for deletion in case.deletions if not problems(case.without(deletion))] == []


def test_most_deleted_waits_show_in_the_bits_of_some_order(case: Scattered) -> None:
    # a sample; the rest of them leave bytes for which both orders are harmless, or need a rarer order than these
    sample = random.Random(0).sample(case.deletions, 16)
    caught = [deletion for deletion in sample if case.wrong(case.without(deletion), range(6)) is not None]
    assert len(caught) >= len(sample) // 2
