"""What a caller may pass as a batch: any strides and two pixel types; all else is refused in a sentence (cases C13, F3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import minidnn
from minidnn.device.emulated import EmulatedDevice
from minidnn.errors import UserError
from minidnn.layers import Graph
from tests.step import nets

BATCH = 6
Array = NDArray[Any]


def step_of(tail: int | None = None) -> minidnn.CompiledStep:
    return minidnn.compile(nets.chain(BATCH), optimizer=nets.MOMENTUM, tail=tail)


def bits(x: Array, y: Array) -> dict[str, bytes]:
    """What one training step on a batch leaves, its loss, its gradients, and the logits of the batch."""
    step = step_of()
    arrays: dict[str, Any] = {f"gradient of {name}": g for name, g in step.gradients(x, y).items()}
    arrays["logits"] = step.evaluate(x)
    arrays["loss"] = np.asarray(step.run(x, y).loss)
    arrays.update(nets.state(step))
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}


def strided(x: Array) -> Array:
    """The same pixels in every other column of a wider image."""
    wide = np.full((*x.shape[:2], 2 * x.shape[2], x.shape[3]), np.nan, x.dtype)
    wide[:, :, ::2] = x
    return wide[:, :, ::2]


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "every other sample": lambda x: np.repeat(x, 2, axis=0)[::2],
    "every other column": strided,
    "transposed": lambda x: np.ascontiguousarray(x.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1),
    "reversed twice": lambda x: np.ascontiguousarray(x[::-1, :, ::-1])[::-1, :, ::-1],
    "Fortran order": np.asfortranarray,
    "unaligned": lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
    "other byte order": lambda x: x.astype(x.dtype.newbyteorder()),
    "double": lambda x: x.astype(np.float64),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_order_and_width_of_the_pixels_change_no_bit(layout: str) -> None:
    x, y = nets.batch(nets.chain(BATCH))
    other = LAYOUTS[layout](x)
    assert np.array_equal(other, x)
    assert bits(other, y) == bits(x, y)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int32, np.uint64])
def test_labels_may_be_integers_of_any_width_and_any_strides(kind: type) -> None:
    x, y = nets.batch(nets.chain(BATCH))
    assert bits(x, np.repeat(y, 3).astype(kind)[::3]) == bits(x, y)


def test_bytes_are_scaled_by_a_255th_whatever_their_strides() -> None:
    x, y = nets.batch(nets.chain(BATCH))
    pixels = np.random.default_rng(1).integers(0, 256, x.shape, np.uint8)
    scaled = pixels * np.float32(1 / 255)
    assert scaled.dtype == np.float32
    assert bits(pixels, y) == bits(scaled, y)
    assert bits(np.asfortranarray(pixels), y) == bits(scaled, y)


def test_the_caller_may_reuse_his_arrays_at_once() -> None:
    x, y = nets.batch(nets.chain(BATCH))
    expected, step = step_of(), step_of()
    losses = [expected.run(x, y).loss for _ in range(3)]
    results = []
    for _ in range(3):
        mine, labels = x.copy(), y.copy()
        results.append(step.run(mine, labels))
        mine[:], labels[:] = np.nan, 0
    assert [result.loss for result in results] == losses


# -- refusals ---------------------------------------------------------------------------------------------------------
def refused(x: Array, y: Array, sentence: str, tail: int | None = None) -> None:
    """``run``, ``gradients`` and ``verify`` refuse a batch with a sentence, run nothing, and the step goes on."""
    step, untouched = step_of(tail), step_of(tail)
    before = nets.state(step)
    for use in (step.run, step.gradients, step.verify):
        with pytest.raises(ValueError, match=sentence) as caught:
            use(x, y)
        assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)
    assert step.steps == 0
    assert nets.differing(before, nets.state(step)) == []
    assert nets.train(step, 2) == nets.train(untouched, 2)


@pytest.mark.parametrize("samples", [0, 1, 5, 7, 12])
def test_another_number_of_samples_names_the_batch(samples: int) -> None:
    x, y = nets.batch(nets.chain(BATCH), samples=samples)
    refused(x, y, rf"x has shape \({samples}, 6, 6, 2\), this step wants \(N, 6, 6, 2\) with N = 6 .*tail=")


def test_another_number_of_samples_names_batch_and_tail() -> None:
    x, y = nets.batch(nets.chain(BATCH), samples=5)
    refused(x, y, r"x has shape \(5, .* with N = 6 or 2", tail=2)


@pytest.mark.parametrize(
    "shape", [(6, 2, 6, 6), (6, 6, 6), (6, 6, 6, 1), (6, 6, 6, 2, 1), (6, 72), (6, 7, 6, 2), ()], ids=str
)
def test_another_shape_is_named_beside_the_wanted_one(shape: tuple[int, ...]) -> None:
    sentence = rf"x has shape \({', '.join(map(str, shape))}\), this step wants \(N, 6, 6, 2\)"
    refused(np.zeros(shape, np.float32), np.zeros(6, np.int64), sentence)


@pytest.mark.parametrize("kind", [np.int32, np.complex64, np.bool_, object, "U1"], ids=str)
def test_pixels_of_another_type_are_refused_by_name(kind: Any) -> None:
    x = np.zeros((6, 6, 6, 2), kind)
    refused(x, np.zeros(6, np.int64), rf"x has type {np.dtype(kind)}; pass float32 .* or uint8")
    with pytest.raises(UserError, match=f"x has type {np.dtype(kind)}"):
        step_of().evaluate(x)


@pytest.mark.parametrize(
    "labels", [np.zeros(5, int), np.zeros((6, 1), int), np.zeros(6), np.zeros(6, bool), np.array(0)], ids=repr
)
def test_labels_of_another_shape_or_type_are_refused(labels: Array) -> None:
    x, _ = nets.batch(nets.chain(BATCH))
    shape = ", ".join(map(str, labels.shape)) + ("," if labels.ndim == 1 else "")
    refused(x, labels, rf"y has shape \({shape}\) and type {labels.dtype}, this step wants \(6,\) integers")


@pytest.mark.parametrize("wrong", [-1, nets.CLASSES, 255, -(2**40), 2**40])
def test_a_label_out_of_range_is_named_with_the_range_and_the_step_goes_on(wrong: int) -> None:
    x, y = nets.batch(nets.chain(BATCH))
    y[3] = wrong
    refused(x, y, f"label {wrong} is out of range; labels are 0 to {nets.CLASSES - 1}")


def test_labels_that_count_from_one_are_refused() -> None:
    x, _ = nets.batch(nets.chain(BATCH))
    refused(x, np.array([1, 2, 3, 4, 1, 2]), "label 4 is out of range; labels are 0 to 3")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "gpu"}, "device='gpu'.*emulated"),
        ({"precision": "fp31"}, "fp31"),
        ({"precision": "fp16"}, "fp16.*(needs a GPU|device=None)"),
        ({"allocator": "arena"}, "allocator='arena' is unknown; choose slab or pool"),
        ({"profile": "h300"}, "h300.*h200"),
        ({"tail": 0}, "tail=0 must be at least 1 and below the batch, 6"),
        ({"tail": 6}, "tail=6 must be at least 1 and below the batch, 6"),
        ({"accumulate": 0}, "accumulate=0 must be at least 1"),
        ({"seed": -1}, "non-negative integer, not -1"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_refused_by_value(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        minidnn.compile(nets.chain(BATCH), **options)
    assert "\n" not in str(caught.value)


def test_an_emulated_device_of_ones_own_is_refused_a_precision_that_it_has_not() -> None:
    with pytest.raises(UserError, match=r"bf16 needs a GPU.*on the emulated device use fp32"):
        minidnn.compile(nets.chain(BATCH), precision="bf16", device=EmulatedDevice())


def test_a_graph_that_cannot_train_is_refused_before_anything_else() -> None:
    g = Graph()
    g.linear(g.flatten(g.input((2, 4, 4, 1))), 3)
    with pytest.raises(UserError, match="no loss"):
        minidnn.compile(g)
