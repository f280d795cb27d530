"""Bandwidth of the memory-bound kernels: a measurement that belongs to the protocol check."""

from __future__ import annotations

import statistics
from typing import Any

from minidnn.device.cuda import CudaDevice
from minidnn.kernels import cuda_kernels


def bandwidths(device: CudaDevice, cupy: Any, dtype: str) -> dict[str, float]:
    """TB/s of each kernel for one element type."""
    full, half = (128, 56, 56, 256), (128, 28, 28, 256)
    x, y, dy = (cupy.random.standard_normal(full, dtype="float32").astype(dtype) for _ in range(3))
    small, index, pooled = cupy.zeros(half, dtype), cupy.zeros(half, "uint8"), cupy.zeros((full[0], full[3]), dtype)
    a, b, c, d, e, f = (cupy.ones(full[3:], "float32") for _ in range(6))
    d_bias, counters, scalars = cupy.zeros(full[3:], dtype), cupy.zeros(4, "uint32"), cupy.ones(8, "float32")
    weight, velocity = (cupy.zeros(x.size // 4, "float32") for _ in range(2))
    gradient = dy.reshape(-1)[: x.size // 4]
    pool = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0)}
    pooled_bytes = x.nbytes + small.nbytes
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any], int]] = {
        "relu_forward": ((y, x), {}, x.nbytes * 2),
        "relu_backward": ((dy, dy, y), {}, x.nbytes * 3),
        "add_forward": ((y, y, x), {}, x.nbytes * 3),
        "dropout": ((y, x, counters), {"node": 1, "threshold": 1 << 31, "scale": 2.0}, x.nbytes * 2),
        "batch_norm_statistics": ((a, b, x), {"eps": 1e-5}, x.nbytes),
        "batch_norm_apply": ((y, x, a, b, c, d), {}, x.nbytes * 2),
        "batch_norm_backward_weight": ((e, f, dy, x, a, b), {}, x.nbytes * 2),
        "batch_norm_backward_data": ((dy, dy, x, a, b, c, e, f), {}, x.nbytes * 3),
        "channel_sum": ((d_bias, dy), {}, x.nbytes),
        "max_pool_forward": ((small, index, x), pool, pooled_bytes + index.nbytes),
        "max_pool_backward": ((y, small, index), pool, pooled_bytes + index.nbytes),
        "avg_pool_forward": ((small, x), pool, pooled_bytes),
        "avg_pool_backward": ((y, small), pool, pooled_bytes),
        "global_avg_pool_forward": ((pooled, x), {}, x.nbytes),
        "sgd_momentum_update": (
            (weight, velocity, gradient, scalars), {"momentum": 0.9, "nesterov": False, "weight_decay": 1e-4},
            weight.nbytes * 4 + gradient.nbytes,
        ),
    }  # fmt: skip
    cupy.cuda.runtime.deviceSynchronize()
    found = {}
    for name, (operands, attrs, nbytes) in calls.items():
        work = getattr(cuda_kernels, name)(device._launcher, *operands, **attrs)
        seconds = []
        for _ in range(12):
            before = device.seconds()
            for _ in range(5):
                work()
            device.synchronize()
            seconds.append((device.seconds() - before) / 5)
        found[name] = round(nbytes / statistics.median(seconds[2:]) / 1e12, 2)
    return found
