"""The NumPy backend: exactly the functions of ``minidnn.kernels.base.Kernels``, and the choice of engines."""

from minidnn.kernels.numpy_conv import conv2d_backward_data, conv2d_backward_weight, conv2d_forward, select_engine
from minidnn.kernels.numpy_fused import (
    batch_norm_add_relu,
    batch_norm_add_relu_backward_weight,
    batch_norm_add_relu_backward_weight_sum,
    batch_norm_relu,
    batch_norm_relu_backward_data,
    batch_norm_relu_backward_weight,
    batch_norm_statistics_running,
    conv2d_relu_forward,
    relu_bias_backward,
)
from minidnn.kernels.numpy_linear import channel_sum, linear_backward_data, linear_backward_weight, linear_forward
from minidnn.kernels.numpy_loss import softmax_cross_entropy_backward, softmax_cross_entropy_forward
from minidnn.kernels.numpy_norm import (
    batch_norm_apply,
    batch_norm_backward_data,
    batch_norm_backward_weight,
    batch_norm_inference,
    batch_norm_running,
    batch_norm_statistics,
    lrn_backward,
    lrn_forward,
)
from minidnn.kernels.numpy_optim import (
    adam_update,
    adapt_scale,
    check_finite,
    clip_scale,
    scale_loss,
    sgd_momentum_update,
    sgd_update,
    update_all,
)
from minidnn.kernels.numpy_pointwise import (
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
from minidnn.kernels.numpy_pool import (
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
    "select_engine", "sgd_momentum_update", "sgd_update", "softmax_cross_entropy_backward",
    "softmax_cross_entropy_forward", "subsample_backward_data", "subsample_backward_weight", "subsample_forward",
    "tanh_backward", "tanh_forward", "update_all",
]  # fmt: skip
