"""The frames of the report's ring page are what the engine and lesson 10 do."""

from __future__ import annotations

import numpy as np
import pytest

import minidnn
import models
from layup.report.ring import MOST_RANKS, RATE, frames, ring_data
from minidnn.parallel.inprocess import InProcess, run_ranks
from tests.cli.test_ring_scripts import import_from


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("strategy", ["ring", "ring_delayed"])
def test_frames_sum_every_chunk_at_its_owner_and_carry_the_weights_to_all(strategy: str, ranks: int) -> None:
    source = np.random.default_rng(ranks)
    gradients, weights = source.integers(-9, 9, (ranks, ranks)) / 10, source.integers(-9, 9, ranks) / 10
    found = frames(strategy, gradients.tolist(), weights.tolist())
    steps = ["reduce"] * (ranks - 1), ["gather"] * (ranks - 1)
    assert [frame["phase"] for frame in found] == ["start", *steps[0], "update", *steps[1], "done"]
    after = weights - RATE * gradients.sum(0)
    for frame in found:
        for rank, marks in enumerate(frame["from"]):
            for k, mark in enumerate(marks):
                members = [r for r in range(ranks) if mark >> r & 1]
                assert frame["sums"][rank][k] == pytest.approx(gradients[members, k].sum(), abs=1e-6)
                new = after if frame["new"][rank][k] else weights
                assert frame["weights"][rank][k] == pytest.approx(new[k], abs=1e-6)
    update = found[ranks]
    assert [[bool(n) for n in row] for row in update["new"]] == np.eye(ranks, dtype=bool).tolist()
    assert [row[rank] for rank, row in enumerate(update["from"])] == [2**ranks - 1] * ranks
    assert found[-1]["new"] == [[1] * ranks] * ranks
    for frame in found:
        assert all((k is not None) == (frame["phase"] in ("reduce", "gather")) for k in frame["sends"])


def test_the_page_and_lesson_10_show_the_same_steps() -> None:
    """The lesson's rank r begins with 10^r in every chunk, so that its digits say who is in a sum."""
    lesson = import_from("lessons", "10_ring")
    shown = [f["from"] for f in frames("ring", [[0.0] * 4] * 4, [0.0] * 4) if f["phase"] in ("start", "reduce")]
    for rank, lines in enumerate(run_ranks(4, lesson.reduce_scatter)):
        for step, line in enumerate(lines):
            chunks = [int(word) for word in line.strip("[]").split()]
            assert chunks == [sum(10**r for r in range(4) if mark >> r & 1) for mark in shown[step][rank]]


def test_the_page_is_of_this_net_and_its_own_ranks() -> None:
    graph = models.build("lenet", batch=24, image_size=28, in_channels=1)
    alone = ring_data(minidnn.compile(graph, device=None))
    nbytes = graph.parameter_count * 4
    assert (alone["ranks"], alone["strategy"], alone["net"]["exposed_ns"]) == (4, None, None)
    assert (alone["net"]["parameter_bytes"], alone["net"]["sent_bytes"]) == (nbytes, nbytes * 3 // 2)
    step = minidnn.compile(graph, device=None, strategy="ring", communicator=InProcess.group(12)[0])
    many = ring_data(step)
    assert many["ranks"] == len(many["weights"]) == MOST_RANKS and many["net"]["ranks"] == 12
    assert many["strategy"] == "ring" and many["net"]["exposed_ns"] == pytest.approx(many["net"]["ring_ns"], rel=0.01)
