"""Lesson 4: pool or planned slab. Two ways to hand out the same bytes.

A pool does not know the future. It keeps what it once had, and answers each request from the pieces that happen
to be free; when none is large enough, it asks the device for more. So it holds more than is ever alive at once.
But a training step repeats exactly, so a planner knows all requests and can give every buffer its place in one
slab. Below are the places in order of address: follow who inherits whose bytes. Then the same rows run on a model
of CuPy's memory pool.
"""

import sys
from collections.abc import Sequence

from lesson import ask, batch, options, run, show

import minidnn
from minidnn.pool_executor import PoolExecutor


def net() -> minidnn.Graph:
    """Convolutions whose maps shrink and whose channels grow: buffers of many sizes."""
    g = minidnn.Graph()
    x, y = g.input((4, 24, 24, 3)), g.label((4,))
    for i, channels in enumerate((12, 20, 36, 60)):
        x = g.max_pool(g.relu(g.batch_norm(g.conv2d(x, channels, 3, padding=1, name=f"conv{i + 1}"))), 2)
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(x, name="mean"), 10, name="classifier"), y)
    return g


def complaint(limit: int) -> str:
    """What the pool says when it may hold ``limit`` bytes at most; nothing if a step runs."""
    try:
        minidnn.compile(net(), allocator="pool", memory=limit).run(*batch(net()))
    except minidnn.DoesNotFit as error:
        return str(error)
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Show the places in the slab, and what the pool holds for the same rows."""
    args = options(argv, __doc__)
    step = minidnn.compile(net(), allocator="pool")
    show(step.program["train"], order="address", limit=24)
    step.run(*batch(step.graph))
    assert isinstance(step.executor, PoolExecutor)
    pool, slab = step.executor.pool, step.profile.reserved_bytes
    print(f"\nalive at the peak {step.profile.peak_bytes}, the slab {slab}, the pool {pool.peak_held_bytes} bytes")
    print(f"times the device was asked for memory: the slab once, the pool {pool.device_allocations} times")
    words = complaint(slab)
    return ask(
        args.answer,
        "suppose the pool may hold as many bytes as the slab has. Does the step still run (yes or no)?",
        right="no" if words else "yes",
        why=f"The bytes would be enough, but they lie in pieces: {words}." if words else "Here the pool was lucky.",
        hint="Compare the last two of the three numbers.",
    )


if __name__ == "__main__":
    sys.exit(run(main))
