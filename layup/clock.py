"""Clock: the compute stream of a plan alone, as if no copy were ever waited for. Copies are timed against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from layup.cost import Costs


class Clock(NamedTuple):
    """Seconds and numbers of rows. ``forward``, ``forward_rows``: when a node's forward has ended.

    ``backward``, ``backward_rows``: when a node's backward, with all that is remade before it, begins, from the last node on.
    ``turn``: the end of forward; ``end``: that of backward.
    """

    forward: list[float]
    forward_rows: list[int]
    backward: list[float]
    backward_rows: list[int]
    turn: float
    end: float


def clock(costs: Costs, remade: Sequence[int]) -> Clock:
    """Run the compute stream. ``remade``: by unit, the node before whose backward it is remade; -1: not."""
    seconds, rows, at = np.array(costs.backward_seconds), np.array(costs.backward_rows), np.array(remade)
    units = np.flatnonzero(at >= 0)
    np.add.at(seconds, at[units], costs.columns.recompute_seconds[units])
    np.add.at(rows, at[units], costs.columns.recompute_rows[units])
    turn = costs.forward_ends[-1]
    # Backward runs from the last node to the first: what a node's prefix sums to is what is left when it begins.
    left, rows_left = np.cumsum(seconds), np.cumsum(rows)
    end = turn + float(left[-1])
    return Clock(
        costs.forward_ends,
        costs.forward_row_ends,
        (end - left[::-1]).tolist(),
        (rows_left[-1] - rows_left[::-1]).tolist(),
        turn,
        end,
    )
