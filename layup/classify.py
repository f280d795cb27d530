"""Classify: which layers are compute-sensitive and which transfer-sensitive, by the thesis' cumulative rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from layup.cost import Costs
from layup.unit import LayerCost
from minidnn.schedule.text import human_bytes

COMPUTE_SENSITIVE, TRANSFER_SENSITIVE, STRUCTURAL = "compute-sensitive", "transfer-sensitive", "structural"

THETAS = (1.0, 2.0)
"""The two known readings of theta."""


class Classification(NamedTuple):
    """A layer's row of the table: its costs, and its class.

    ``since``: forward time since the last offload, this layer included; ``ratio``: transfer over ``since``; the copy hides if
    it is below theta. ``kind_of_cost``: the class at the theta asked for; ``at_thetas``: at the known readings, 1.0 and 2.0.
    """

    cost: LayerCost
    since: float
    ratio: float
    kind_of_cost: str
    at_thetas: tuple[str, ...]

    @property
    def layer(self) -> str:
        """Name of the layer."""
        return self.cost.name

    @property
    def unit(self) -> str:
        """The layer whose decision governs: an in-place chain is one unit, classified where it ends."""
        return self.cost.unit


def classify(costs: Costs, theta: float = 1.0) -> list[Classification]:
    """Classify every layer.

    Walk the units, adding up forward time since the last offload. If moving the unit's output takes less than ``theta`` times
    that, it is compute-sensitive: its feature map can go to the host, hidden, and the sum starts again. Else it is
    transfer-sensitive: cheaper to recompute. With theta at most 1 all copies hide together, too. A unit is structural if
    nothing of it is stored for backward and nothing that is reads it.
    """
    ratios, kinds = _walk(costs, theta)
    known = [_walk(costs, value)[1] for value in THETAS]
    table = []
    for layer, node in zip(costs.layers, costs.nodes, strict=True):
        unit = costs.unit_of[node.index]
        since, ratio = ratios[unit]
        classes = tuple(found[unit] for found in known)
        table.append(Classification(layer, since, ratio, kinds[unit], classes))
    return table


def _walk(costs: Costs, theta: float) -> tuple[list[tuple[float, float]], list[str]]:
    """The rule at one theta: (time since the last offload, ratio) and class of every unit."""
    ratios, kinds, since = [], [], 0.0
    read = {k for unit in costs.units if unit.stored for k in unit.sources}
    for unit in costs.units:
        since += unit.forward_seconds
        ratio = unit.offload_seconds / since if since > 0 else float("inf")
        ratios.append((since, ratio))
        if not unit.keys or not (unit.stored or any(k in read for k in unit.keys)):
            kinds.append(STRUCTURAL)
        elif ratio < theta:
            kinds.append(COMPUTE_SENSITIVE)
            since = 0.0
        else:
            kinds.append(TRANSFER_SENSITIVE)
    return ratios, kinds


def table(rows: Sequence[Classification], theta: float = 1.0) -> str:
    """The classification as text, one line a layer."""
    head = (
        f"{'layer':<32} {'kind':<22} {'forward':>10} {'backward':>10} {'recompute':>10} {'stored':>11} {'transfer':>10} "
        f"{'ratio':>8}  class at theta {theta:g}"
    )
    lines = [head]
    for row in rows:
        cost, inner = row.cost, row.unit != row.layer
        ratio = "" if inner else f"{row.ratio:.3g}"
        others = [f"{kind} at {value:g}" for value, kind in zip(THETAS, row.at_thetas, strict=True) if value != theta]
        differs = [text for text in others if not text.startswith(row.kind_of_cost)]
        verdict = f"in place, see {row.unit}" if inner else ", ".join([row.kind_of_cost, *differs])
        times = f"{_ms(cost.forward_seconds)} {_ms(cost.backward_seconds)} {_ms(cost.recompute_seconds)}"
        bytes_moved = f"{human_bytes(cost.stored_bytes):>11} {_ms(cost.offload_seconds)}"
        lines.append(f"{row.layer:<32} {cost.kind:<22} {times} {bytes_moved} {ratio:>8}  {verdict}")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:>7.3f} ms"
