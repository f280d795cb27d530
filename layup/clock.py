"""Clock: the compute stream of a plan alone, as if no copy were ever waited for. Copies are timed against it.

A timeline is all that a plan's decisions lead to before its copies are looked at: what backward reads, and the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from layup.cost import Costs
from layup.needs import Decisions, Needs, needs


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
        forward=costs.forward_ends,
        forward_rows=costs.forward_row_ends,
        backward=(end - left[::-1]).tolist(),
        backward_rows=(rows_left[-1] - rows_left[::-1]).tolist(),
        turn=turn,
        end=end,
    )


class Timeline(NamedTuple):
    """Decisions by unit, and what follows from them for the compute stream."""

    costs: Costs
    decisions: Decisions
    need: Needs
    time: Clock


def timeline(costs: Costs, decisions: Decisions) -> Timeline:
    """What backward reads under these decisions, and when the compute stream does what."""
    need = needs(costs, decisions)
    return Timeline(costs, decisions, need, clock(costs, need.remade))
