"""Every kernel against its definition in float64, on odd shapes, into poisoned outputs; its bits wherever its arrays lie."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.backend.cases import Case, Maker

Array = Any
SHAPES = ((3, 7, 13, 5), (2, 13, 8, 3))
CHUNKED_SHAPE = (2, 31, 40, 7)  # several chunks of every kernel, and a remainder


@functools.cache
def cases(shape: tuple[int, int, int, int], dtype: str) -> dict[str, Case]:
    made = Maker(shape, dtype).all()
    table = {case.id: case for case in made}
    assert len(table) == len(made), "two cases share a name"
    return table


IDS = sorted(cases(SHAPES[0], "float32"))


def poison(array: Array) -> Array:
    """An array of the same shape that no correct kernel leaves behind: NaN, or 255 in bytes."""
    fresh = np.empty_like(array)
    fresh.reshape(-1).view(np.uint8)[...] = 255
    return fresh


def written(case: Case, backend: Any) -> list[Array]:
    """Run the case and return its outputs on the host."""
    outputs = [backend.to_device(out if case.updates else poison(out)) for out in case.outputs]
    inputs = [backend.to_device(x) for x in case.inputs]
    getattr(backend.kernels, case.kernel)(*outputs, *inputs, **case.attrs)
    for x, before in zip(inputs, case.inputs, strict=True):
        np.testing.assert_array_equal(backend.to_host(x), before, err_msg="an input was written")
    return [backend.to_host(out) for out in outputs]


def close(actual: Array, expected: Array, dtype: Any, factor: float = 1.0) -> None:
    """Equal to a few roundings of the largest value; exactly for integers."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    if actual.dtype.kind in "iu":
        np.testing.assert_array_equal(actual, expected)
        return
    scale = max(1e-6, float(np.abs(expected).max()))
    tolerance = factor * scale * (2e-6 if np.dtype(dtype).itemsize == 4 else 1e-13)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def same_bits(actual: Array, expected: Array) -> None:
    assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("shape", [*SHAPES, CHUNKED_SHAPE], ids=str)
@pytest.mark.parametrize("name", IDS)
def test_kernel_computes_its_definition(backend: Any, dtype: Any, shape: Any, name: str) -> None:
    case = cases(shape, dtype.name)[name]
    for actual, expected in zip(written(case, backend), case.expected(), strict=True):
        close(actual, expected, dtype, factor=10.0 if shape == CHUNKED_SHAPE else 2.0)


@pytest.mark.parametrize("name", [name for name in IDS if cases(SHAPES[0], "float32")[name].overwrites])
def test_in_place_call_has_the_bits_of_the_other(backend: Any, name: str) -> None:
    case = cases(CHUNKED_SHAPE, "float32")[name]
    (expected,) = written(case, backend)
    for position in case.overwrites:
        inputs = [backend.to_device(x) for x in case.inputs]
        getattr(backend.kernels, case.kernel)(inputs[position], *inputs, **case.attrs)
        same_bits(backend.to_host(inputs[position]), expected)


def packed(arrays: list[Array], first: int) -> list[Array]:
    """Copies of the arrays side by side in one piece of memory, from byte ``first`` on: each touches the next."""
    offset = first
    offsets = []
    for array in arrays:
        offset += -offset % array.itemsize
        offsets.append(offset)
        offset += array.nbytes
    memory = np.zeros(offset + 64, np.uint8)
    base = -memory.ctypes.data % 64
    copies = []
    for array, at in zip(arrays, offsets, strict=True):
        copy = memory[base + at : base + at + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        copies.append(copy)
    return copies


@pytest.mark.parametrize("name", IDS)
def test_bits_do_not_depend_on_addresses(kernels: ModuleType, backend: Any, name: str) -> None:
    """Neither on alignment nor on what lies next to what: both change with the plan."""
    if backend.name != "numpy":
        pytest.skip("device kernels get 512-byte aligned buffers")
    case = cases(CHUNKED_SHAPE, "float32")[name]
    expected = written(case, backend)
    for first, backwards in ((0, False), (4, True), (20, False), (36, True)):
        arrays = [*(out if case.updates else poison(out) for out in case.outputs), *case.inputs]
        order = list(range(len(arrays)))[:: -1 if backwards else 1]
        placed = dict(zip(order, packed([arrays[i] for i in order], first), strict=True))
        getattr(kernels, case.kernel)(*(placed[i] for i in range(len(arrays))), **case.attrs)
        for i, before in enumerate(expected):
            same_bits(placed[i], before)


def test_selection_hides_what_it_drops(kernels: ModuleType, to_device: Any, to_host: Any) -> None:
    """A gradient or activation that is not selected becomes 0 even when it is NaN or infinite."""
    dy = to_device(np.array([np.nan, np.inf, -np.inf, 2.0, np.nan], np.float32))
    y = to_device(np.array([0.0, -0.0, -1.0, 1.0, 1.0], np.float32))
    dx = to_device(np.empty(5, np.float32))
    kernels.relu_backward(dx, dy, y)
    np.testing.assert_array_equal(to_host(dx), np.array([0, 0, 0, 2, np.nan], np.float32))
    kernels.dropout(dx, dy, to_device(np.zeros(4, np.uint32)), node=0, threshold=2**32, scale=1.0)
    np.testing.assert_array_equal(to_host(dx), np.zeros(5, np.float32))


def test_relu_passes_nan(kernels: ModuleType, to_device: Any, to_host: Any) -> None:
    x = np.array([0.0, -1.0, np.nan, np.inf, -np.inf] * 7, np.float32)
    y = to_device(np.empty_like(x))
    kernels.relu_forward(y, to_device(x))
    np.testing.assert_array_equal(to_host(y), np.array([0.0, 0.0, np.nan, np.inf, 0.0] * 7, np.float32))


def test_max_pool_gives_nan_and_the_first_of_equals(kernels: ModuleType, to_device: Any, to_host: Any) -> None:
    nan = np.nan
    windows = [[1, 1, 1, 1], [0, 2, 2, 1], [1, nan, 3, nan], [nan, 5, 6, 7], [-np.inf, -np.inf, -np.inf, -np.inf]]
    x = np.array(windows, np.float32).reshape(5, 2, 2, 1)
    y, index = to_device(np.empty((5, 1, 1, 1), np.float32)), to_device(np.empty((5, 1, 1, 1), np.uint8))
    kernels.max_pool_forward(y, index, to_device(x), kernel=(2, 2), stride=(2, 2), padding=(0, 0))
    np.testing.assert_array_equal(to_host(y).reshape(-1), [1, 2, nan, nan, -np.inf])
    np.testing.assert_array_equal(to_host(index).reshape(-1), [0, 1, 1, 0, 0])


@pytest.mark.parametrize("channels", [1, 3, 16, 3000])
def test_sums_over_a_million_elements_keep_float32_precision(
    kernels: ModuleType, to_device: Any, to_host: Any, channels: int
) -> None:
    shape = (1, 1, 3_000_000 // channels, channels)
    x = (np.random.default_rng(0).standard_normal(shape, np.float32) + 100).astype(np.float32)
    sums, mean, rstd = (to_device(np.empty(channels, np.float32)) for _ in range(3))
    kernels.channel_sum(sums, to_device(x))
    kernels.batch_norm_statistics(mean, rstd, to_device(x), eps=0.0)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(to_host(sums), exact.sum(axis=(0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(to_host(mean), exact.mean(axis=(0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(to_host(rstd), 1 / exact.std(axis=(0, 1, 2)), rtol=1e-6)


def test_softmax_is_stable_for_large_logits(kernels: ModuleType, to_device: Any, to_host: Any) -> None:
    logits = np.array([[1e4, 0, -1e4], [-1e4, -1e4, -1e4]], np.float32)
    loss, p = to_device(np.empty((), np.float32)), to_device(np.empty((2, 3), np.float32))
    kernels.softmax_cross_entropy_forward(loss, p, to_device(logits), to_device(np.array([1, 2])), smoothing=0.0)
    np.testing.assert_allclose(to_host(p), [[1, 0, 0], [1 / 3, 1 / 3, 1 / 3]], rtol=1e-6)
    np.testing.assert_allclose(float(to_host(loss)), (1e4 + np.log(3)) / 2, rtol=1e-6)


def test_update_of_slices_has_the_bits_of_the_update_of_all(kernels: ModuleType, to_device: Any, to_host: Any) -> None:
    """Layer by layer or after the whole backward pass: the same parameters."""
    case = cases(CHUNKED_SHAPE, "float32")["adam_update"]
    whole = [to_device(out) for out in case.outputs]
    gradient, scalars = (to_device(x) for x in case.inputs)
    kernels.adam_update(*whole, gradient, scalars, **case.attrs)
    parts = [to_device(out) for out in case.outputs]
    for cut in (slice(0, 64), slice(64, 4096), slice(4096, None)):
        kernels.adam_update(*(part[cut] for part in parts), gradient[cut], scalars, **case.attrs)
    for a, b in zip(whole, parts, strict=True):
        same_bits(to_host(a), to_host(b))
