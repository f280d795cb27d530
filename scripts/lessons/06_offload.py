"""Lesson 6: offload, and a race. Send away what waits, and get it back in time.

A tensor that waits long can spend that time in the memory of the host: its line breaks off after a v and goes on
after a ^, and the second map shows it on the host. Copies run on streams of their own, beside the computation.
So FREE is no promise: the bytes of conv1 may be given away while the copy still reads them. What makes it safe is
a wait: the next owner waits for the copy. Each is derived from who touches which bytes, and none is superfluous.
Take one away (--wait N) and run: the emulated device tries several orders that the other waits allow.
"""

import sys
from collections.abc import Sequence

import numpy as np

import minidnn
from lesson import ask, batch, differing, options, show, tampered
from minidnn import Decision, Plan, UserError
from minidnn.commandline import run
from minidnn.device.emulated import EmulatedDevice
from minidnn.schedule.instruction import HOST, Instruction, Op, Wait
from minidnn.schedule.verify import verify


def net() -> minidnn.Graph:
    """A chain of four convolutions."""
    g = minidnn.Graph()
    x, y = g.input((8, 16, 16, 16)), g.label((8,))
    for i in range(4):
        x = g.conv2d(x, 16, 1, name=f"conv{i + 1}")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(x, name="mean"), 10, name="classifier"), y)
    return g


def without(rows: Sequence[Instruction], at: int, wait: Wait) -> list[Instruction]:
    """The rows, but row ``at`` does not wait for this."""
    changed = rows[at]._replace(waits=tuple(w for w in rows[at].waits if w != wait))
    return [*rows[:at], changed, *rows[at + 1 :]]


def outcome(seed: int | None, at: int = -1, wait: Wait | None = None) -> dict[str, np.ndarray]:
    """Loss and weights after two steps in the order that belongs to a seed, without one wait."""
    plan = Plan({"conv1": Decision.OFFLOAD, "conv2": Decision.OFFLOAD})
    ...
