"""Layouts: torchvision's (K, C, R, S) and C, H, W columns in files, (K, R, S, C) and H, W, C columns in memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from minidnn.graph import Graph, Tensor
from minidnn.layers.activation import ReLU, Tanh
from minidnn.layers.dropout import Dropout
from minidnn.layers.linear import Linear
from minidnn.layers.merge import Flatten
from minidnn.layers.norm import BatchNorm

Spatial = Mapping[str, tuple[int, int, int]]
"""Name of a parameter whose last axis is a flattened map -> (H, W, C) of that map."""


def spatial_columns(graph: Graph) -> dict[str, tuple[int, int, int]]:
    """Find the parameters whose last axis runs over a flattened map of more than one position, and its (H, W, C).

    These are the Linear weights, and the vectors of a BatchNorm, that read a Flatten through element-wise layers alone.
    A concatenation of flattened maps is not followed: its columns keep our order in files.
    """
    maps: dict[Tensor, tuple[int, int, int]] = {}
    found: dict[str, tuple[int, int, int]] = {}
    for node in graph.nodes:
        x = node.inputs[0]
        if isinstance(node.layer, Flatten) and len(x.shape) == 4:
            _, h, w, c = x.shape
            if h * w > 1:
                maps[node.output] = (h, w, c)
        elif x in maps and isinstance(node.layer, Linear):
            found[node.parameter("weight").name] = maps[x]
        elif x in maps and isinstance(node.layer, Flatten | Dropout | ReLU | Tanh | BatchNorm):
            maps[node.output] = maps[x]
            found.update((p.name, maps[x]) for p in node.parameters if p.size == x.shape[1])
    return found


def to_torchvision(name: str, array: NDArray[np.generic], spatial: Spatial) -> NDArray[np.generic]:
    """Copy a parameter, or an optimizer's state of it, into torchvision's layout. Moves elements, changes no bit.

    (K, R, S, C) becomes (K, C, R, S); columns in H, W, C order become C, H, W for the names in ``spatial``;
    ``num_batches_tracked`` (1,) becomes ().
    """
    if array.ndim == 4:
        return np.ascontiguousarray(array.transpose(0, 3, 1, 2))
    if name in spatial:
        return _swap(array, spatial[name], (-1, -3, -2))
    return array.reshape(()).copy() if name.endswith(".num_batches_tracked") else array.copy()


def from_torchvision(name: str, array: NDArray[np.generic], spatial: Spatial) -> NDArray[np.generic]:
    """The inverse of ``to_torchvision``, bit for bit; a view where that is enough, since files can be large."""
    if array.ndim == 4:
        return array.transpose(0, 2, 3, 1)
    if name in spatial:
        h, w, c = spatial[name]
        return _swap(array, (c, h, w), (-2, -1, -3))
    return array.reshape(1) if name.endswith(".num_batches_tracked") else array


def _swap(
    array: NDArray[np.generic], extents: tuple[int, int, int], order: tuple[int, int, int]
) -> NDArray[np.generic]:
    """Permute the last axis, seen as three."""
    apart = array.reshape(*array.shape[:-1], *extents)
    return np.ascontiguousarray(apart.transpose(*range(array.ndim - 1), *order)).reshape(array.shape)
