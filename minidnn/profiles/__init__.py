"""Profiles: what a named GPU costs. A roofline of a few numbers, each with its source, in one JSON file per GPU.

A profile file holds ``name``, ``device``, and ``numbers``, a table ``{key: {"value": number, "source": text}}``:

    memory_bytes            device memory a process may see
    memory_bandwidth        bytes per second on paper; kernels reach ``memory_efficiency`` of it
    memory_efficiency       0 to 1
    flops.<precision>       floating-point operations per second on paper (a multiply-add is two); no key: not supported
    efficiency.<precision>  share of it that a compute-bound kernel reaches, 0 to 1
    launch_seconds          time from the end of a kernel to the start of the next in its stream
    h2d_bandwidth           pinned host memory to device, bytes per second, alone; ``d2h_bandwidth`` is the way back
    h2d_bandwidth_both      the same while a copy runs the other way; ``d2h_bandwidth_both``
    copy_latency_seconds    fixed part of a copy: latency + bytes / bandwidth is its time
    interconnect_bandwidth  to another GPU, one way, bytes per second (optional, with ``interconnect_latency_seconds``)
    compute_slowdown        factor on kernels while a copy runs (optional, default 1)

A measured profile may add ``rows``, ``{row key: seconds}``: the time of single kernel calls, which then replace the
roofline. The key of a row is made by ``minidnn.schedule.simulate.row_key``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from minidnn.errors import UserError, nearest
from minidnn.precision import PRECISIONS

H2D, D2H = "h2d", "d2h"

_FIELDS = ("name", "device", "numbers", "rows", "machine", "versions", "command")  # the last three: how it was measured
_REQUIRED = (
    "memory_bytes", "memory_bandwidth", "memory_efficiency", "launch_seconds", "copy_latency_seconds",
    "h2d_bandwidth", "d2h_bandwidth", "h2d_bandwidth_both", "d2h_bandwidth_both",
)  # fmt: skip
_OPTIONAL = ("interconnect_bandwidth", "interconnect_latency_seconds", "compute_slowdown")
_MAY_BE_ZERO = ("launch_seconds", "copy_latency_seconds", "interconnect_latency_seconds")


@dataclass(frozen=True, slots=True)
class Profile:
    """The cost model of one GPU. Knows neither rows nor layers; the fields are those of the file, see the module."""

    name: str
    device: str
    memory_bytes: int
    memory_bandwidth: float
    memory_efficiency: float
    flops: Mapping[str, float]
    efficiency: Mapping[str, float]
    launch_seconds: float
    copy_latency_seconds: float
    h2d_bandwidth: float
    d2h_bandwidth: float
    h2d_bandwidth_both: float
    d2h_bandwidth_both: float
    interconnect_bandwidth: float = 0.0
    interconnect_latency_seconds: float = 0.0
    compute_slowdown: float = 1.0
    rows: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def flops_per_second(self, precision: str) -> float:
        """Rate a compute-bound kernel reaches. Raises UserError naming what the GPU can compute."""
        if precision not in self.flops:
            known = ", ".join(self.flops)
            raise UserError(f"{self.device} does not compute in {precision}; profile {self.name!r} has {known}")
        return self.flops[precision] * self.efficiency[precision]

    def bytes_per_second(self) -> float:
        """Rate a memory-bound kernel reaches, bytes read plus bytes written."""
        return self.memory_bandwidth * self.memory_efficiency

    def kernel_seconds(self, flops: float, moved_bytes: float, precision: str) -> float:
        """Time of one kernel by the roofline at the rates reached: launch + max(flops / rate, bytes / bandwidth)."""
        compute = flops / self.flops_per_second(precision)
        return self.launch_seconds + max(compute, moved_bytes / self.bytes_per_second())

    def link_bandwidth(self, direction: str, *, both: bool = False) -> float:
        """Bytes per second of a pinned copy "h2d" or "d2h"; ``both``: while another copy runs the other way."""
        if direction == H2D:
            return self.h2d_bandwidth_both if both else self.h2d_bandwidth
        assert direction == D2H, direction
        return self.d2h_bandwidth_both if both else self.d2h_bandwidth

    def copy_seconds(self, nbytes: float, direction: str, *, both: bool = False) -> float:
        """Time of one pinned copy: latency + bytes / bandwidth."""
        return self.copy_latency_seconds + nbytes / self.link_bandwidth(direction, both=both)

    def exchange_seconds(self, nbytes: float) -> float:
        """Time to send bytes to another GPU: by the interconnect, or, on a machine without one, through host memory."""
        if self.interconnect_bandwidth:
            return self.interconnect_latency_seconds + nbytes / self.interconnect_bandwidth
        return self.copy_seconds(nbytes, D2H, both=True) + self.copy_seconds(nbytes, H2D, both=True)

    @staticmethod
    def from_json(data: Any, *, where: str = "profile") -> Profile:
        """Read and check the content of a profile file. Raises UserError naming field, value and what is expected."""
        if not isinstance(data, Mapping) or not isinstance(data.get("numbers"), Mapping):
            raise UserError(f'{where}: a profile is a JSON object with "name", "device" and "numbers"')
        if unknown := set(data) - set(_FIELDS):
            raise UserError(f"{where}: unknown field {min(unknown)!r}; {nearest(min(unknown), _FIELDS)}")
        known = [*_REQUIRED, *_OPTIONAL, *(f"{kind}.{p}" for kind in ("flops", "efficiency") for p in PRECISIONS)]
        values: dict[str, float] = {}
        sources: dict[str, str] = {}
        for key, entry in data["numbers"].items():
            if key not in known:
                raise UserError(f"{where}: unknown number {key!r}; {nearest(key, known)}")
            source = entry.get("source") if isinstance(entry, Mapping) else None
            if not isinstance(source, str) or not source.strip():
                raise UserError(f'{where}: {key} must be {{"value": number, "source": text}}, not {entry!r}')
            values[key] = _number(entry.get("value"), key, where)
            sources[key] = source
        if missing := [key for key in _REQUIRED if key not in values]:
            raise UserError(f"{where}: {missing[0]} is missing")
        flops = {p: values.pop(f"flops.{p}") for p in PRECISIONS if f"flops.{p}" in values}
        efficiency = {p: values.pop(f"efficiency.{p}") for p in PRECISIONS if f"efficiency.{p}" in values}
        if not flops or set(flops) != set(efficiency):
            raise UserError(
                f"{where}: flops.<precision> and efficiency.<precision> go together, for one precision at least"
            )
        rows = data.get("rows", {})
        if not isinstance(rows, Mapping):
            raise UserError(f'{where}: "rows" must be an object of seconds by row key')
        return Profile(
            name=str(data.get("name", where)),
            device=str(data.get("device", data.get("name", where))),
            memory_bytes=int(values.pop("memory_bytes")),
            flops=flops,
            efficiency=efficiency,
            rows={str(key): _number(value, f"rows[{key!r}]", where) for key, value in rows.items()},
            sources=sources,
            **values,
        )


def _number(value: Any, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where}: {key} must be a finite number, not {value!r}")
    if value < 0 or (value == 0 and key not in _MAY_BE_ZERO and not key.startswith("rows[")):
        raise UserError(f"{where}: {key} must be positive, not {value!r}")
    if "efficiency" in key and value > 1:
        raise UserError(f"{where}: {key} is a share of the rate on paper, at most 1, not {value!r}")
    if key == "compute_slowdown" and value < 1:
        raise UserError(f"{where}: compute_slowdown is a factor of at least 1, not {value!r}")
    return value


def available() -> list[str]:
    """Names of the bundled profiles."""
    files = (entry.name for entry in resources.files(__name__).iterdir())
    return sorted(name.removesuffix(".json") for name in files if name.endswith(".json"))


def load(name_or_path: str | Path | Profile) -> Profile:
    """Load a bundled profile by name ("h200") or a profile file by path.

    A text is a path if it ends in ".json" or contains a path separator. Raises UserError with the nearest names.
    """
    if isinstance(name_or_path, Profile):
        return name_or_path
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".json") or "/" in text or "\\" in text:
        path = Path(text)
        if not path.is_file():
            raise UserError(f"profile file {text!r} does not exist; bundled profiles: {', '.join(available())}")
        content, where = path.read_bytes(), str(path)
    else:
        bundled = available()
        if text not in bundled:
            raise UserError(
                f"unknown profile {text!r}; {nearest(text, bundled)} A profile file is a path ending in .json."
            )
        content, where = (resources.files(__name__) / f"{text}.json").read_bytes(), f"profile {text}"
    try:
        data = json.loads(content)
    except ValueError as error:  # not JSON, or not text
        raise UserError(f"{where} is not JSON: {error}") from None
    return Profile.from_json(data, where=where)
