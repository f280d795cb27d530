"""What the links and the memory of a GPU reach: pinned copies each way and both at once, copies within device memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

LARGE, SMALL = 256 << 20, 64 << 10
REPEATS = 7


def measure(cupy: Any) -> dict[str, float]:
    """Bytes a second: ``h2d``, ``d2h``, the same ``_both`` ways at once, ``memory`` (read plus written); ``latency`` in seconds.

    On the current device. Allocates 1 GiB in all and gives it back.
    """
    runtime = cupy.cuda.runtime
    host = [cupy.cuda.alloc_pinned_memory(LARGE) for _ in range(2)]
    device = [cupy.cuda.Memory(LARGE) for _ in range(2)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]

    def up(nbytes: int) -> Callable[[], None]:
        return lambda: runtime.memcpyAsync(
            device[0].ptr, host[0].ptr, nbytes, runtime.memcpyHostToDevice, streams[0].ptr
        )

    def down(nbytes: int) -> Callable[[], None]:
        return lambda: runtime.memcpyAsync(
            host[1].ptr, device[1].ptr, nbytes, runtime.memcpyDeviceToHost, streams[1].ptr
        )

    def inside() -> None:
        runtime.memcpyAsync(device[0].ptr, device[1].ptr, LARGE, runtime.memcpyDeviceToDevice, streams[0].ptr)

    h2d, d2h = _seconds(cupy, streams, [up(LARGE)]), _seconds(cupy, streams, [down(LARGE)])
    both = _seconds(cupy, streams, [up(LARGE), down(LARGE)])
    small = (_seconds(cupy, streams, [up(SMALL)] * 50) + _seconds(cupy, streams, [down(SMALL)] * 50)) / 100
    return {
        "h2d": LARGE / h2d, "d2h": LARGE / d2h, "h2d_both": LARGE / both, "d2h_both": LARGE / both,
        "memory": 2 * LARGE / _seconds(cupy, streams, [inside] * 10) * 10,
        "latency": max(0.0, small - SMALL * (h2d + d2h) / 2 / LARGE),
    }  # fmt: skip


def _seconds(cupy: Any, streams: Sequence[Any], works: Sequence[Callable[[], None]]) -> float:
    """Median time of all works together, on the streams' own clock."""
    found: list[float] = []
    for _ in range(REPEATS):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        for stream in streams:
            stream.synchronize()
        begin.record(streams[0])
        streams[1].wait_event(begin)
        for work in works:
            work()
        done = cupy.cuda.Event()
        done.record(streams[1])
        streams[0].wait_event(done)
        end.record(streams[0])
        end.synchronize()
        found.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return float(statistics.median(found))
