"""One training step of VGG-16, ResNet-18 and AlexNet, at their own widths, is the one that PyTorch computed in float64."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minidnn
from tests.golden import ours, rule

CASES = {case.model: case for case in rule.CASES}
TOLERANCE = {"fp32": 1e-5, "fp64": 1e-10}
"""Relative to the norm of a tensor. Where PyTorch's own float32 is not that near, behind batch norm, twice its error."""


def stored(model: str) -> dict[str, Any]:
    """The file of a net."""
    content: dict[str, Any] = json.loads((Path(__file__).parent / f"{model}.json").read_text())
    return content


def assert_close(computed: Mapping[str, Any], expected: Mapping[str, list[float]], tolerance: float) -> None:
    """Compare the fingerprints of all expected tensors, relative to their norms, and name the first that differs."""
    for name, fingerprint in expected.items():
        error = rule.difference(rule.fingerprint(name, computed[name]), fingerprint)
        assert error < tolerance, f"{name} is off by {error:.1e} of its norm"


RUNS = [(model, precision) for model in CASES for precision in TOLERANCE if (model, precision) != ("vgg16", "fp64")]
"""VGG-16 has no layer that AlexNet has not, and twice its weights."""


@pytest.mark.parametrize(("model", "precision"), RUNS)
def test_outputs_gradients_and_statistics_of_a_step_are_pytorch_s(model: str, precision: str) -> None:
    golden = stored(model)
    tolerance = dict.fromkeys(("outputs", "gradients", "statistics"), TOLERANCE[precision])
    if precision == "fp32":
        tolerance.update({kind: max(1e-5, 2 * error) for kind, error in golden["float32_errors"].items()})
    step = minidnn.compile(
        ours.build(CASES[model]), minidnn.naive(), minidnn.SGD(lr=0.1), precision=precision, seed=golden["seed"]
    )
    ours.set_parameters(step, golden["seed"])
    x, y = rule.batch(golden["seed"], golden["image_size"])
    gradients = step.gradients(x, y)
    outputs = ours.activations(step)
    # PyTorch's file names every layer with parameters and every ReLU and pool; addition has no module of its own there.
    kinds = {node.name: node.layer.kind for node in step.graph.nodes}
    assert set(outputs) - set(golden["outputs"]) == {n for n in outputs if kinds[n] in ("add", "softmax_cross_entropy")}
    assert_close(outputs, golden["outputs"], tolerance["outputs"])
    assert float(outputs["loss"]) == pytest.approx(golden["loss"], rel=TOLERANCE[precision])
    assert list(gradients) == list(golden["gradients"])
    assert_close(gradients, golden["gradients"], tolerance["gradients"])
    assert_close(step.state_dict(), golden["statistics"], tolerance["statistics"])
    step.close()


@pytest.mark.parametrize("axes", [(1, 0, 2, 3), (0, 1, 3, 2), (0, 3, 1, 2)])
def test_a_fingerprint_sees_a_wrong_layout_and_one_wrong_element(axes: Iterable[int]) -> None:
    array = rule.generator(0, "any").standard_normal((3, 3, 3, 3))
    expected = rule.fingerprint("a", array)
    assert rule.difference(rule.fingerprint("a", array.astype(np.float32)), expected) < 1e-6
    assert rule.difference(rule.fingerprint("a", array.transpose(*axes)), expected) > 1e-2
    array[1, 2, 0, 1] *= 1.001
    assert rule.difference(rule.fingerprint("a", array), expected) > 1e-5
