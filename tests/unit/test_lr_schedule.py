"""Learning rates are pure functions of the update: nothing can restart, repeat or drift after a resume (E4, E5)."""

from __future__ import annotations

import math

import pytest

from minidnn.errors import UserError
from minidnn.lr_schedule import Constant, Cosine, LearningRate, MultiStep, Step, parse_shape


def rates(text: str, *, epochs: int = 8, warmup: float = 0.0, per_epoch: int = 5) -> list[float]:
    rate = LearningRate(0.4, per_epoch, epochs, parse_shape(text), warmup)
    return [rate(update) for update in range(epochs * per_epoch)]


def test_each_form_is_read() -> None:
    assert parse_shape("constant") == Constant()
    assert parse_shape("cosine") == Cosine()
    assert parse_shape("step:30:0.1") == Step(30, 0.1)
    assert parse_shape("multistep:3,6:0.5") == MultiStep((3, 6), 0.5)


@pytest.mark.parametrize(
    "text", ["step", "step:0:0.1", "step:3", "step:3:0", "step:a:b", "multistep:6,3:0.1", "multistep::0.1", "cosine:3"]
)
def test_a_malformed_schedule_is_one_sentence_with_the_forms(text: str) -> None:
    with pytest.raises(UserError, match=r"multistep:EPOCH,EPOCH:FACTOR") as error:
        parse_shape(text)
    assert text in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_schedule_gets_the_nearest_name() -> None:
    with pytest.raises(UserError, match="did you mean cosine"):
        parse_shape("cosin")


def test_step_and_multistep_fall_at_epoch_boundaries_only() -> None:
    assert rates("step:3:0.1") == pytest.approx([0.4] * 15 + [0.04] * 15 + [0.004] * 10)
    assert rates("multistep:2,6:0.5") == pytest.approx([0.4] * 10 + [0.2] * 20 + [0.1] * 10)


def test_the_cosine_goes_from_the_base_rate_towards_zero_and_never_rises() -> None:
    values = rates("cosine")
    assert values[0] == 0.4
    assert values == sorted(values, reverse=True)
    assert values[20] == pytest.approx(0.2)  # half way
    assert 0 < values[-1] < 0.01
    assert LearningRate(0.4, 5, 8, Cosine())(40) == pytest.approx(0.0)


@pytest.mark.parametrize("text", ["constant", "cosine", "step:3:0.1"])
def test_the_warm_up_rises_by_equal_steps_to_the_base_rate_and_ends(text: str) -> None:
    values = rates(text, warmup=2)
    assert values[:10] == pytest.approx([0.4 * (n + 1) / 10 for n in range(10)])
    assert values[10] == pytest.approx(0.4)
    assert values[10:] == sorted(values[10:], reverse=True)


def test_half_an_epoch_of_warm_up_is_counted_in_updates() -> None:
    assert rates("constant", warmup=0.4)[:3] == pytest.approx([0.2, 0.4, 0.4])


def test_a_longer_run_changes_only_the_cosine() -> None:
    """E5: what ``--epochs`` 4 -> 8 does to the rate is known, and only the cosine moves."""
    for text, same in (("step:3:0.1", True), ("multistep:2:0.1", True), ("constant", True), ("cosine", False)):
        short, long = (LearningRate(0.1, 5, n, parse_shape(text))(12) for n in (4, 8))
        assert (short == long) is same, text


@pytest.mark.parametrize("base, warmup", [(-0.1, 0.0), (math.nan, 0.0), (math.inf, 0.0), (0.1, 8.0), (0.1, -1.0)])
def test_impossible_rates_and_warm_ups_are_refused(base: float, warmup: float) -> None:
    with pytest.raises(UserError, match="give"):
        LearningRate(base, 5, 8, Cosine(), warmup)
