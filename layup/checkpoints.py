"""Checkpoints: where to cut a net so that what is recomputed between two cuts stays small."""

from __future__ import annotations

from collections.abc import Collection

from layup.cost import Costs


def crossing(costs: Costs) -> list[tuple[int, ...]]:
    """For every unit, the keys that later units read and that exist when it has run: what a cut there would have to store."""
    last_use = [-1] * len(costs.keys)
    for unit in costs.units:
        for k in unit.sources:
            last_use[k] = max(last_use[k], unit.number)
    alive: dict[int, None] = {}
    found = []
    for unit in costs.units:
        for k in [k for k in alive if last_use[k] <= unit.number]:
            del alive[k]
        alive.update((k, None) for k in unit.keys if last_use[k] > unit.number)
        found.append(tuple(alive))
    return found


def checkpoints(
    costs: Costs,
    segment_bytes: float,
    cuts: list[tuple[int, ...]] | None = None,
    dropped: Collection[int] | None = None,
) -> set[int]:
    """Units to store so that at most about ``segment_bytes`` are remade between two cuts.

    A cut goes where the fewest bytes cross, in the second half of a segment. ``cuts``: ``crossing(costs)``; ``dropped``: the
    units that are remade; None: all.
    """
    cuts = crossing(costs) if cuts is None else cuts
    chosen: set[int] = set()
    size, best, best_bytes, since = 0, -1, 0, 0
    for unit in costs.units:
        size += unit.footprint if dropped is None or unit.number in dropped else 0
        if 2 * size > segment_bytes and cuts[unit.number]:
            crossing_bytes = sum(costs.keys[k].footprint for k in cuts[unit.number])
            if best < 0 or crossing_bytes <= best_bytes:
                best, best_bytes, since = unit.number, crossing_bytes, size
        if size > segment_bytes and best >= 0:
            chosen.update(costs.keys[k].unit for k in cuts[best])
            size, best = size - since, -1
    return chosen
