"""Profiles: complete, sourced numbers; a roofline that reproduces what was measured; mistakes answered by one sentence."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from minidnn.errors import UserError
from minidnn.precision import PRECISIONS
from minidnn.profiles import Profile, available, load

SOME = {"value": 1.0, "source": "measured here"}
NUMBERS: dict[str, Any] = {
    "memory_bytes": {"value": 4096, "source": "made up"},
    "memory_bandwidth": {"value": 200.0, "source": "made up"},
    "memory_efficiency": {"value": 0.5, "source": "made up"},
    "flops.fp32": {"value": 1000.0, "source": "made up"},
    "efficiency.fp32": {"value": 0.8, "source": "made up"},
    "launch_seconds": {"value": 3.0, "source": "made up"},
    "copy_latency_seconds": {"value": 2.0, "source": "made up"},
    "h2d_bandwidth": {"value": 10.0, "source": "made up"},
    "d2h_bandwidth": {"value": 20.0, "source": "made up"},
    "h2d_bandwidth_both": {"value": 5.0, "source": "made up"},
    "d2h_bandwidth_both": {"value": 8.0, "source": "made up"},
}
MADE_UP = {"name": "toy", "device": "a toy", "numbers": NUMBERS}


def test_the_promised_gpus_are_bundled_and_every_number_names_its_source() -> None:
    assert set(available()) == {"k40", "p100", "v100", "rtx3070", "rtx4060", "rtx4090", "a100", "h200"}
    for name in available():
        profile = load(name)
        numbers = {field.name for field in dataclasses.fields(Profile)} - {"name", "device", "rows", "sources"}
        given = {key.split(".")[0] for key in profile.sources}
        assert profile.name == name and given >= numbers - {
            "interconnect_bandwidth",
            "interconnect_latency_seconds",
            "compute_slowdown",
        }
        assert all(len(source) >= 8 for source in profile.sources.values())


@pytest.mark.parametrize("name", available())
def test_bundled_numbers_are_those_of_a_gpu(name: str) -> None:
    """Wrong powers of ten and swapped fields are what a hand-written table gets wrong."""
    p = load(name)
    assert 7e9 < p.memory_bytes < 2e11 and p.memory_bytes % 2**16 == 0
    assert 2e11 < p.memory_bandwidth < 6e12 and 0.5 <= p.memory_efficiency <= 0.9
    assert 1e-6 <= p.launch_seconds <= 1e-5 and 5e-6 <= p.copy_latency_seconds <= 2e-5
    for alone, both in ((p.h2d_bandwidth, p.h2d_bandwidth_both), (p.d2h_bandwidth, p.d2h_bandwidth_both)):
        assert 8e9 < both <= alone < 6e10 and both > alone / 2  # two copies at once must gain something
    assert set(p.flops) <= set(PRECISIONS) and {"fp32", "fp64"} <= set(p.flops)
    assert p.flops["fp64"] <= p.flops["fp32"] < 1e14
    for precision in {"tf32", "bf16", "fp16"} & set(p.flops):
        assert p.flops_per_second(precision) > p.flops_per_second("fp32")


def test_a_kernel_takes_launch_plus_the_slower_of_compute_and_memory() -> None:
    p = Profile.from_json(MADE_UP)
    assert p.kernel_seconds(8000.0, 100.0, "fp32") == 3.0 + 8000.0 / 800.0
    assert p.kernel_seconds(800.0, 5000.0, "fp32") == 3.0 + 5000.0 / 100.0
    assert p.kernel_seconds(0.0, 0.0, "fp32") == 3.0


def test_a_copy_takes_latency_plus_bytes_by_direction_and_company() -> None:
    p = Profile.from_json(MADE_UP)
    assert p.copy_seconds(100, "h2d") == 2.0 + 10.0
    assert p.copy_seconds(100, "d2h") == 2.0 + 5.0
    assert p.copy_seconds(100, "h2d", both=True) == 2.0 + 20.0
    assert p.exchange_seconds(40) == (2.0 + 5.0) + (2.0 + 8.0)  # no interconnect: through host memory
    linked = dataclasses.replace(p, interconnect_bandwidth=80.0, interconnect_latency_seconds=1.0)
    assert linked.exchange_seconds(40) == 1.0 + 0.5


def test_h200_copies_have_the_measured_rates() -> None:
    p = load("h200")
    rate = {n: n / p.copy_seconds(n, "h2d") for n in (2**16, 2**20, 2**30)}
    assert 6.5e9 <= rate[2**16] <= 8e9
    assert 37e9 <= rate[2**20] <= 40e9
    assert 55e9 <= rate[2**30] <= 55.5e9
    assert 2**30 / p.copy_seconds(2**30, "d2h", both=True) == pytest.approx(50.5e9, rel=0.01)


@pytest.mark.parametrize(
    ("precision", "item", "milliseconds"), [("fp16", 2, 8.85), ("bf16", 2, 8.95), ("tf32", 4, 24.3)]
)
def test_h200_predicts_the_measured_convolutions_of_a_vgg16_step(
    precision: str, item: int, milliseconds: float
) -> None:
    """Forward, data and weight gradients of the 13 convolutions at batch 64; conv1 has no data gradient."""
    p = load("h200")
    shapes = [(3, 64, 224), (64, 64, 224), (64, 128, 112), (128, 128, 112), (128, 256, 56), (256, 256, 56)]
    shapes += [(256, 256, 56), (256, 512, 28), (512, 512, 28), (512, 512, 28), *[(512, 512, 14)] * 3]
    total = 0.0
    for index, (c, k, size) in enumerate(shapes):
        pixels = 64 * size * size
        moved = item * (pixels * (c + k) + 9 * c * k)
        total += p.kernel_seconds(2.0 * 9 * c * k * pixels, moved, precision) * (3 if index else 2)
    assert total * 1e3 == pytest.approx(milliseconds, rel=0.05)


def test_a_precision_the_gpu_lacks_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"Tesla K40 does not compute in bf16; .*fp32, fp64"):
        load("k40").kernel_seconds(1.0, 1.0, "bf16")


def test_a_measured_profile_is_read_from_a_file_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**MADE_UP, "rows": {"relu_forward|a<-b|": 0.25}, "command": "x", "machine": "y"}))
    for argument in (path, str(path)):
        profile = load(argument)
        assert profile.device == "a toy" and profile.rows == {"relu_forward|a<-b|": 0.25}
        assert load(profile) is profile


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h20", "unknown profile 'h20'; did you mean h200"),
        ("zzz", "known: a100, h200"),
        ("nowhere/h200.json", "does not exist; bundled profiles: a100"),
        ("h200.json", "does not exist"),
    ],
)
def test_an_unknown_profile_is_answered_with_the_known_ones(name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load(name)


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    for content in (b'{"name": ', b"\xff\xfe\x00", b"[1, 2]", b"null"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"broken\.json"):
            load(path)


@pytest.mark.parametrize(
    ("key", "entry", "says"),
    [
        ("launch_seconds", None, "launch_seconds is missing"),
        ("flops.fp32", None, "efficiency"),
        ("efficiency.fp32", None, "efficiency"),
        ("flops.fp31", SOME, r"unknown number 'flops\.fp31'; did you mean flops\.fp32"),
        ("memory_byte", SOME, "did you mean memory_bytes"),
        ("memory_bytes", 4096, r'memory_bytes must be \{"value"'),
        ("memory_bytes", {"value": 4096}, "source"),
        ("memory_bytes", {"value": 4096, "source": "  "}, "source"),
        ("memory_bytes", {"value": "4096", "source": "x"}, "memory_bytes must be a finite number, not '4096'"),
        ("memory_bytes", {"value": True, "source": "x"}, "finite number"),
        ("h2d_bandwidth", {"value": 0, "source": "x"}, "h2d_bandwidth must be positive"),
        ("launch_seconds", {"value": -1e-6, "source": "x"}, "launch_seconds must be positive"),
        ("launch_seconds", {"value": float("nan"), "source": "x"}, "finite"),
        ("memory_efficiency", {"value": 1.2, "source": "x"}, "at most 1, not 1.2"),
        ("efficiency.fp32", {"value": 80, "source": "x"}, "at most 1"),
        ("compute_slowdown", {"value": 0.9, "source": "x"}, "at least 1"),
    ],
)
def test_a_malformed_number_is_named_with_its_value(key: str, entry: Any, says: str) -> None:
    data = copy.deepcopy(MADE_UP)
    if entry is None:
        del data["numbers"][key]  # type: ignore[attr-defined]
    else:
        data["numbers"][key] = entry  # type: ignore[index]
    with pytest.raises(UserError, match=says):
        Profile.from_json(data, where="toy.json")


def test_unknown_fields_and_malformed_rows_are_refused() -> None:
    for extra, says in (({"row": {}}, "did you mean rows"), ({"rows": []}, "rows"), ({"rows": {"k": "1"}}, "k")):
        with pytest.raises(UserError, match=says):
            Profile.from_json({**MADE_UP, **extra})
