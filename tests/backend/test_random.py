"""Random words: Philox4x32-10 as published, and dropout as a function of position alone."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tests.backend.reference as ref
from minidnn.errors import UserError
from minidnn.kernels import numpy_kernels, numpy_pointwise
from minidnn.random import dropout_threshold, philox_rounds

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
    ids=["zeros", "ones", "pi"],
)  # fmt: skip
def test_philox_gives_the_published_words(counter: Any, key: Any, words: Any) -> None:
    lanes = np.repeat(np.array(counter, np.uint64)[:, None], 3, axis=1)
    philox_rounds(lanes, np.empty((2, 3), np.uint64), *key)
    for lane, word in zip(lanes, words, strict=True):
        np.testing.assert_array_equal(lane, [word] * 3)


def test_dropout_keeps_its_share(kernels: ModuleType, to_device: Any, to_host: Any) -> None:
    x = to_device(np.ones(400_001, np.float32))
    y = to_device(np.empty(400_001, np.float32))
    for p in (0.0, 0.25, 0.5, 1.0):
        counters = to_device(np.array([3, 0, 11, 0], np.uint32))
        kernels.dropout(y, x, counters, node=2, threshold=dropout_threshold(p), scale=2.0)
        host = to_host(y)
        assert set(np.unique(host)) <= {0.0, 2.0}
        assert abs((host > 0).mean() - (1 - p)) < 5 * (p * (1 - p) / host.size) ** 0.5 + 1e-12


def test_mask_changes_with_every_part_of_its_key(kernels: ModuleType, to_device: Any, to_host: Any) -> None:
    x = to_device(np.ones(4096, np.float32))

    def mask(node: int, *counters: int) -> bytes:
        y = to_device(np.empty(4096, np.float32))
        kernels.dropout(y, x, to_device(np.array(counters, np.uint32)), node=node, threshold=2**31, scale=1.0)
        return bytes(to_host(y).tobytes())

    keys = [(0, 0, 0, 0, 0), (1, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 0, 1, 0, 0), (0, 0, 0, 1, 0), (0, 0, 0, 0, 1)]
    assert len({mask(*key) for key in keys}) == len(keys)
    assert mask(*keys[0]) == mask(*keys[0])


def test_mask_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, counters = np.ones(5003, np.float32), np.array([9, 2, 77, 1], np.uint32)
    expected = (ref.philox_words(x.size, 6, counters) >= 2**31).astype(np.float32)
    for counters_per_chunk in (2048, 7, 100_000):
        monkeypatch.setattr(numpy_pointwise, "COUNTERS_PER_CHUNK", counters_per_chunk)
        y = np.full_like(x, np.nan)
        numpy_kernels.dropout(y, x, counters, node=6, threshold=2**31, scale=1.0)
        np.testing.assert_array_equal(y, expected)


def test_threshold_is_an_integer_and_refuses_what_is_no_probability() -> None:
    assert [dropout_threshold(p) for p in (0.0, 0.5, 1.0)] == [0, 2**31, 2**32]
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(UserError, match=str(p)):
            dropout_threshold(p)
