"""The CUDA backend: a function for every kernel of ``minidnn.kernels.base.Kernels``, which binds it to operands.

``relu_forward(launcher, y, x)`` returns a ``Work``, which enqueues the kernel whenever it is called. The only addition to the
protocol are the options of a convolution engine. ``Immediate`` has the kernels in the protocol's own form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from minidnn.kernels.base import Pair
from minidnn.kernels.cuda_conv import (
    conv2d_backward_data,
    conv2d_backward_weight,
    conv2d_forward,
    conv2d_relu_forward,
    linear_backward_data,
    linear_backward_weight,
    linear_forward,
)
from minidnn.kernels.cuda_fused import (
    batch_norm_add_relu,
    batch_norm_add_relu_backward_weight,
    batch_norm_add_relu_backward_weight_sum,
    batch_norm_relu,
    batch_norm_relu_backward_data,
    batch_norm_relu_backward_weight,
    relu_bias_backward,
)
from minidnn.kernels.cuda_launch import Launcher, Work
from minidnn.kernels.cuda_norm import (
    batch_norm_apply,
    batch_norm_backward_data,
    batch_norm_backward_weight,
    batch_norm_inference,
    batch_norm_running,
    batch_norm_statistics,
    batch_norm_statistics_running,
    channel_sum,
    lrn_backward,
    lrn_forward,
    softmax_cross_entropy_backward,
    softmax_cross_entropy_forward,
)
from minidnn.kernels.cuda_optim import (
    adam_update,
    adapt_scale,
    check_finite,
    clip_scale,
    scale_loss,
    sgd_momentum_update,
    sgd_update,
    update_all,
)
from minidnn.kernels.cuda_pointwise import (
    add_forward,
    concat_backward,
    concat_forward,
    convert,
    dropout,
    relu_backward,
    relu_forward,
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
from minidnn.kernels.problem import Convolution, Shape, own
from minidnn.schedule.recipe import Engine

__all__ = [
    "adam_update", "adapt_scale", "add_forward", "avg_pool_backward", "avg_pool_forward", "batch_norm_add_relu",
    "batch_norm_add_relu_backward_weight", "batch_norm_add_relu_backward_weight_sum", "batch_norm_apply",
    "batch_norm_backward_data", "batch_norm_backward_weight", "batch_norm_inference", "batch_norm_relu",
    "batch_norm_relu_backward_data", "batch_norm_relu_backward_weight", "batch_norm_running",
    "batch_norm_statistics", "batch_norm_statistics_running", "channel_sum", "check_finite", "clip_scale",
    "concat_backward", "concat_forward", "conv2d_backward_data", "conv2d_backward_weight", "conv2d_forward",
    "conv2d_relu_forward",
    "convert", "dropout", "global_avg_pool_backward", "global_avg_pool_forward", "linear_backward_data",
    "linear_backward_weight", "linear_forward", "lrn_backward", "lrn_forward", "max_pool_backward",
    "max_pool_forward", "max_pool_inference", "relu_backward", "relu_bias_backward", "relu_forward", "scale_loss",
    "sgd_momentum_update", "sgd_update", "softmax_cross_entropy_backward", "softmax_cross_entropy_forward",
    "subsample_backward_data", "subsample_backward_weight", "subsample_forward", "tanh_backward", "tanh_forward",
    "update_all",
]  # fmt: skip


class Immediate:
    """The kernels with the signatures of the protocol, run to their end by every call: for tests, not for steps.

    ``synchronize`` blocks the host until the whole device is idle, so that arrays made on any stream may be passed.
    """

    __all__ = (*__all__, "select_engine")

    def __init__(self, launcher: Launcher, synchronize: Callable[[], None]) -> None:
        self._launcher = launcher
        self._synchronize = synchronize
        for name in __all__:
            setattr(self, name, self._immediate(globals()[name]))

    def _immediate(self, bind: Callable[..., Work]) -> Callable[..., None]:
        def call(*operands: Any, **attrs: Any) -> None:
            self._synchronize()
            bind(self._launcher, *operands, **attrs)()
            self._synchronize()

        call.__signature__ = _protocol_signature(bind)  # type: ignore[attr-defined]
        return call

    def select_engine(
        self, direction: str, x_shape: Shape, y_shape: Shape, weight_shape: Shape, stride: Pair, padding: Pair,
        dilation: Pair, groups: int, itemsize: int, workspace_limit: int | None,
    ) -> Engine:  # fmt: skip
        """As ``numpy_kernels.select_engine``. Of 16-bit types it chooses for float16."""
        dtype = {4: "float32", 2: "float16"}[itemsize]
        problem = Convolution(direction, x_shape, y_shape, weight_shape, stride, padding, dilation, dtype)
        cudnn = self._launcher.cudnn
        engine: Engine = own(problem) if cudnn is None else cudnn.select(problem, workspace_limit)
        return engine


def _protocol_signature(bind: Callable[..., Work]) -> inspect.Signature:
    """Without the launcher and without the options of an engine, for which the protocol has NumPy's ``images`` and, of matrix
    products, which need none there, no scratch."""
    parameters = list(inspect.signature(bind).parameters.values())[1:]
    if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        del parameters[-1]
        product = bind.__name__.startswith("linear")
        parameters = [p.replace(default=p.empty) if p.name == "images" else p for p in parameters]
        parameters = [p for p in parameters if not (product and p.name == "scratch")]
    return inspect.Signature(parameters)
