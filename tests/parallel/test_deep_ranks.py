"""A deep net with batch norm and additions, by NCCL and captured in segments, has the bits of the emulated device."""

import pytest

import minidnn
import models
from minidnn.device.emulated import EmulatedDevice
from minidnn.parallel.inprocess import run_ranks
from minidnn.precision import PRECISIONS, Precision, precision
from minidnn.recipes import numpy_recipe
from tests.parallel.fake_gpus import FakeGpus, Processes, device
from tests.step import nets

RANKS, STEPS = 2, 5


def trained(strategy, on_gpus):
    """The state, the losses and the number of captured segments of every rank, in bf16."""
    graph = models.build("resnet20", batch=2 * RANKS, image_size=8, classes=10)
    recipe = numpy_recipe(graph.with_batch(2), precision("bf16"), None, True)

    def work(communicator):
        step = minidnn.compile(
            graph, strategy=strategy, recipe=recipe, precision="bf16", optimizer=minidnn.SGD(0.02, 0.9, nesterov=True),
            communicator=Processes(communicator) if on_gpus else communicator,
            device=device() if on_gpus else EmulatedDevice(), capture="on" if on_gpus else "off",
        )  # fmt: skip
        losses = [step.run(*nets.batch(graph, number)).loss for number in range(STEPS)]
        found = nets.state(step), losses, getattr(step.executor, "graphs", 0)
        step.close()
        return found

    return run_ranks(RANKS, work)


@pytest.mark.parametrize("strategy", ["ring_delayed:nccl", "ring_delayed:steps", "all_reduce:nccl"])
def test_segments_between_transfers_have_the_bits_of_rows(monkeypatch, strategy):
    """In two element types that NumPy computes in, so that gradients travel in two strips, as in 16 bit."""
    FakeGpus().install(monkeypatch)
    monkeypatch.setitem(PRECISIONS, "bf16", Precision("bf16", "float32", "float64", master=True))
    ours, theirs = trained(strategy, True), trained(strategy, False)
    for (state, losses, graphs), (expected, known, _) in zip(ours, theirs, strict=True):
        assert graphs > 1 and losses == known
        assert nets.differing(state, expected) == []
