"""The CUDA backend: a function for every kernel of ``minidnn.kernels.base.Kernels``, which binds it to operands.

``relu_forward(launcher, y, x)`` returns a ``Work``; ``Immediate(launcher).relu_forward(y, x)`` also runs it, at once, and so
has the signatures of the protocol. The only additions are the options of a convolution engine.
"""

from __future__ import annotations

from typing import Any

from minidnn.kernels.cuda_conv import (
    conv2d_backward_data,
    conv2d_backward_weight,
    conv2d_forward,
    linear_backward_data,
    linear_backward_weight,
    linear_forward,
)
from minidnn.kernels.cuda_launch import Launcher
from minidnn.kernels.cuda_norm import (
    batch_norm_apply,
    batch_norm_backward_data,
    batch_norm_backward_weight,
    batch_norm_inference,
    batch_norm_running,
    batch_norm_statistics,
    channel_sum,
    lrn_backward,
    lrn_forward,
    softmax_cross_entropy_backward,
    softmax_cross_entropy_forward,
)
from minidnn.kernels.cuda_pointwise import (
    adam_update,
    add_forward,
    concat_backward,
    concat_forward,
    convert,
    dropout,
    relu_backward,
    relu_forward,
    sgd_momentum_update,
    sgd_update,
    tanh_backward,
    tanh_forward,
)
from minidnn.kernels.cuda_pool import (
    avg_pool_backward,
    avg_pool_forward,
    global_avg_pool_backward,
    global_avg_pool_forward,
    max_pool_backward,
    max_pool_forward,
    max_pool_inference,
    subsample_backward_data,
    subsample_backward_weight,
    subsample_forward,
)

__all__ = [
    "adam_update", "add_forward", "avg_pool_backward", "avg_pool_forward", "batch_norm_apply",
    "batch_norm_backward_data", "batch_norm_backward_weight", "batch_norm_inference", "batch_norm_running",
    "batch_norm_statistics", "channel_sum", "concat_backward", "concat_forward", "conv2d_backward_data",
    "conv2d_backward_weight", "conv2d_forward", "convert", "dropout", "global_avg_pool_backward",
    "global_avg_pool_forward", "linear_backward_data", "linear_backward_weight", "linear_forward", "lrn_backward",
    "lrn_forward", "max_pool_backward", "max_pool_forward", "max_pool_inference", "relu_backward", "relu_forward",
    "sgd_momentum_update", "sgd_update", "softmax_cross_entropy_backward", "softmax_cross_entropy_forward",
    "subsample_backward_data", "subsample_backward_weight", "subsample_forward", "tanh_backward", "tanh_forward",
]  # fmt: skip


class Immediate:
    """The kernels as functions that enqueue at once on a launcher's stream: for tests and measurements, not for steps."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"there is no kernel {name!r}")
        bind = globals()[name]

        def call(*operands: Any, **attrs: Any) -> None:
            bind(self._launcher, *operands, **attrs)()

        return call
