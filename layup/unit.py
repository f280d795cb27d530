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
    recompute_seconds: float
    recompute_rows: int
    weight_seconds: float
    footprint: int
    stored: int
    recompute_workspace: int
    offload_seconds: float
    prefetch_seconds: float


class LayerCost(NamedTuple):
    """One layer: times in seconds, sizes in bytes. ``unit`` is the layer whose decision governs it.

    ``stored_bytes``: of what it makes, that which some backward reads; ``offload_seconds``: for a copy of all that it makes.
    """

    name: str
    kind: str
    unit: str
    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    stored_bytes: int
    offload_seconds: float


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
    """The columns of these keys and units."""
    own = np.zeros(len(keys), bool)
    own[[k for unit in units for k in unit.keys]] = True
    return Columns(
        unit=np.array([key.unit for key in keys], np.int64),
        footprint=np.where(own, np.array([key.footprint for key in keys], np.int64), 0),
        made=np.array([key.made for key in keys], np.int64),
        last_forward=np.array([key.last_forward for key in keys], np.int64),
        recompute_seconds=np.array([unit.recompute_seconds for unit in units]),
        recompute_rows=np.array([unit.recompute_rows for unit in units], np.int64),
        recompute_workspace=np.array([unit.recompute_workspace for unit in units], np.int64),
        weight_seconds=np.array([unit.weight_seconds for unit in units]),
    )
