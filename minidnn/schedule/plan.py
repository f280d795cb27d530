"""Plan: only choices that cannot change a bit. JSON both ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from minidnn.errors import UserError, nearest


class PlanError(UserError):
    """The plan names something that does not exist, or asks for what cannot be done exactly."""


class Decision(StrEnum):
    """What becomes of a layer's stored outputs between forward and backward."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Reuse:
    """The five ways a byte is used twice. Off-states are in ``docs/memory_model.md``.

    ``lifetimes``: a buffer dies at its last use; off: at the end of the step (Caffe). ``in_place``: element-wise layers
    overwrite an input nobody reads later; off: own buffers. ``workspace``: scratch lives for its row only, so one range
    serves all layers; off: one workspace per layer for the whole step. ``gradient_window``: the gradient of an activation
    dies at its last use; off: at the end of the step. ``layerwise_update``: weights are updated as soon as their gradient
    exists; off: gradients live to one update after backward; None: on, unless accumulation,
    clipping, dynamic loss scaling or data parallelism needs whole gradients.
    """

    lifetimes: bool = True
    in_place: bool = True
    workspace: bool = True
    gradient_window: bool = True
    layerwise_update: bool | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Per-layer decisions and reuse switches. Layers without a decision keep.

    ``lag``: rows of the compute stream, updates apart, after which an offloaded value leaves the device; until then its
    bytes are not reused, so computation need not wait for the copy. ``distance``: as many rows before it is read it comes
    back. ``lags`` and ``distances`` override them for single layers. ``memory_centric``: a recomputed value is dropped after
    the layer that asked for it, and remade for the next; False (speed-centric): it stays to its last use.

    ``streamed``: layers whose parameters and optimizer state live in pinned host memory and visit the device for their
    rows; ``("*",)`` is all of them. Consecutive ones travel in groups of at least ``group_bytes`` of weights.
    """

    decisions: Mapping[str, Decision] = field(default_factory=dict)
    reuse: Reuse = field(default_factory=Reuse)
    policy: str = "keep"
    lag: int = 1
    distance: int = 4
    lags: Mapping[str, int] = field(default_factory=dict)
    distances: Mapping[str, int] = field(default_factory=dict)
    memory_centric: bool = False
    streamed: tuple[str, ...] = ()
    group_bytes: int = 8 << 20

    def decision(self, layer: str) -> Decision:
        """The decision for a layer's stored outputs."""
        return self.decisions.get(layer, Decision.KEEP)

    def check_names(self, layers: Iterable[str]) -> None:
        """Refuse a decision, lag or distance for a layer that does not exist, with the nearest names."""
        known = set(layers)
        streamed = () if self.streamed == ("*",) else self.streamed
        for name in (*self.decisions, *self.lags, *self.distances, *streamed):
            if name not in known:
                raise PlanError(
                    f"the plan decides about {name!r}, which is no layer of this graph; {nearest(name, known)}"
                )

    def streamed_layers(self, layers: Iterable[str]) -> set[str]:
        """The layers whose parameters are streamed, among ``layers``."""
        return set(layers) if self.streamed == ("*",) else set(self.streamed)

    def to_json(self) -> dict[str, Any]:
        """Plain data for a plan file."""
        return {
            "policy": self.policy,
            "reuse": {f.name: getattr(self.reuse, f.name) for f in fields(Reuse)},
            "lag": self.lag,
            "distance": self.distance,
            "memory_centric": self.memory_centric,
            "decisions": {name: decision.value for name, decision in self.decisions.items()},
            "lags": dict(self.lags),
            "distances": dict(self.distances),
            "streamed": list(self.streamed),
            "group_bytes": self.group_bytes,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """Read a plan file. Raises PlanError naming the field, the value and the known values."""
        unknown = set(data) - _FIELDS
        if unknown:
            raise PlanError(f"unknown field {min(unknown)!r} in the plan; {nearest(min(unknown), _FIELDS)}")
        reuse = dict(data.get("reuse", {}))
        switches = {f.name for f in fields(Reuse)}
        for name, value in reuse.items():
            if name not in switches:
                raise PlanError(f"unknown reuse switch {name!r} in the plan; {nearest(name, switches)}")
            if not isinstance(value, bool) and not (name == "layerwise_update" and value is None):
                raise PlanError(f"reuse switch {name!r} must be true or false, not {value!r}")
        decisions = {}
        for layer, value in dict(data.get("decisions", {})).items():
            if value not in set(Decision):
                raise PlanError(f"the plan decides {value!r} for {layer!r}; known: keep, offload, recompute")
            decisions[layer] = Decision(value)
        numbers = {
            "lag": data.get("lag", 1),
            "distance": data.get("distance", 4),
            "group_bytes": data.get("group_bytes", 8 << 20),
        }
        tables = {name: dict(data.get(name, {})) for name in ("lags", "distances")}
        for name, value in (*numbers.items(), *tables["lags"].items(), *tables["distances"].items()):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise PlanError(
                    f"lags and distances count rows, group_bytes bytes, 0 or more; the plan has {value!r} for {name!r}"
                )
        memory_centric = data.get("memory_centric", False)
        if not isinstance(memory_centric, bool):
            raise PlanError(f"memory_centric must be true or false, not {memory_centric!r}")
        policy = str(data.get("policy", "file"))
        streamed = tuple(map(str, data.get("streamed", ())))
        return Plan(
            decisions=decisions, reuse=Reuse(**reuse), policy=policy, lag=numbers["lag"], distance=numbers["distance"],
            lags=tables["lags"], distances=tables["distances"], memory_centric=memory_centric, streamed=streamed,
            group_bytes=numbers["group_bytes"],
        )  # fmt: skip


_FIELDS = {field.name for field in fields(Plan)}


def keep() -> Plan:
    """Nothing offloaded, recomputed or streamed; all reuse on. The default."""
    return Plan()


def naive() -> Plan:
    """Every value and every layer's workspace alive for the whole step, as in Caffe: all reuse off."""
    return Plan(reuse=Reuse(False, False, False, False, False), policy="naive")
