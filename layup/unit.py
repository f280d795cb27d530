"""Units: what policies decide about, what it makes, and a layer's costs, as plain records."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Key(NamedTuple):
    """Something a layer makes that can be stored for backward: its output, or an aux that is not kept anyway.

    ``made``, ``last_forward``: index of the node that makes it, and of the last that reads it in forward.
    ``first_reader``, ``last_reader``: nodes whose backward reads it first and last, the highest and the lowest index; -1: none.
    """

    name: str
    unit: int
    nbytes: int
    footprint: int
    made: int
    last_forward: int
    first_reader: int
    last_reader: int


class Unit(NamedTuple):
    """An in-place chain of layers, of which the last one's decision governs: what policies decide about.

    ``keys``: indices of what it makes; ``sources``: indices of what remaking it reads from other units. ``footprint``: bytes
    of its keys in the slab; ``stored``: of those that some backward reads. ``weight_seconds``: for its weights to visit the
    device once more, if they are streamed.
    """

    number: int
    name: str
    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    first: int
    last: int
    keys: tuple[int, ...]
    sources: tuple[int, ...]
    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    recompute_rows: int
    weight_seconds: float
    footprint: int
    stored: int
    workspace_bytes: int
    recompute_workspace: int
    offload_seconds: float
    prefetch_seconds: float


class LayerCost(NamedTuple):
    """One layer: times in seconds, sizes in bytes. ``unit`` is the layer whose decision governs it.

    ``output_bytes``: what it makes; ``stored_bytes``: of that, what some backward reads; transfers are of the output.
    """

    name: str
    kind: str
    unit: str
    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    output_bytes: int
    stored_bytes: int
    workspace_bytes: int
    offload_seconds: float
    prefetch_seconds: float


class Columns(NamedTuple):
    """Fields of all keys, and of all units, as arrays. What is overwritten within a unit is none of its keys: footprint 0."""

    unit: NDArray[np.int64]
    footprint: NDArray[np.int64]
    made: NDArray[np.int64]
    last_forward: NDArray[np.int64]
    recompute_seconds: NDArray[np.float64]
    recompute_rows: NDArray[np.int64]
    recompute_workspace: NDArray[np.int64]
    weight_seconds: NDArray[np.float64]


def columns_of(keys: tuple[Key, ...], units: tuple[Unit, ...]) -> Columns:
    whole = [np.array([getattr(key, name) for key in keys], np.int64) for name in Columns._fields[:4]]
    seconds, again = (np.array([getattr(unit, n) for unit in units]) for n in ("recompute_seconds", "weight_seconds"))
    rows, spaces = (np.array([getattr(unit, n) for unit in units], np.int64) for n in Columns._fields[5:7])
    own = np.zeros(len(keys), bool)
    own[[k for unit in units for k in unit.keys]] = True
    whole[1][~own] = 0
    return Columns(whole[0], whole[1], whole[2], whole[3], seconds, rows, spaces, again)
