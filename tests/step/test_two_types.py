"""16-bit training has two element types, a master copy and perhaps a loss scale. NumPy runs the same rows with types that it
computes in: float32 in place of the 16 bits, float64 in place of float32. Whatever a pass mixes up then differs from fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import minidnn
from minidnn.device.emulated import EmulatedDevice
from minidnn.precision import PRECISIONS, Precision
from minidnn.schedule.plan import Decision, Plan
from minidnn.state import LOSS_SCALING
from tests.step import nets

BATCH = 6
TYPES = {
    "bf16": Precision("bf16", "float32", "float64", master=True),
    "fp16": Precision("fp16", "float32", "float64", master=True, scaled=True),
}
NETS = ("residual", "dense", "dropout")


@pytest.fixture(params=TYPES)
def two_types(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a precision of two types."""
    name: str = request.param
    monkeypatch.setitem(PRECISIONS, name, TYPES[name])
    return name


def trained(net: str, precision: str, plan: Plan | None = None, **options: Any) -> dict[str, NDArray[Any]]:
    graph = nets.NETS[net](BATCH)
    step = minidnn.compile(
        graph, plan, optimizer=nets.MOMENTUM, device=EmulatedDevice(seed=3), precision=precision, tail=2, **options
    )
    for number in range(4):
        step.run(*nets.batch(graph, number))
    step.run(*nets.batch(graph, 99, 2))
    step.verify(*nets.batch(graph, 7))
    return nets.state(step)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip_grad_norm": 0.5}], ids=str)
@pytest.mark.parametrize("net", NETS)
def test_two_types_train_as_one_does(net: str, options: dict[str, Any], two_types: str) -> None:
    found, expected = trained(net, two_types, **options), trained(net, "fp32", **options)
    assert (LOSS_SCALING in found) == TYPES[two_types].scaled
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("decision", [Decision.OFFLOAD, Decision.RECOMPUTE])
@pytest.mark.parametrize("net", NETS)
def test_plans_have_the_bits_of_keep(net: str, decision: Decision, two_types: str) -> None:
    plan = Plan({node.name: decision for node in nets.NETS[net](BATCH).nodes})
    assert nets.differing(trained(net, two_types, plan), trained(net, two_types)) == []
