"""The kernels: flat functions, every output and every scratch byte passed in. A kernel never allocates.

Each backend is a module with exactly these functions (a test compares names and signatures). Arrays are C-contiguous.
Outputs come first, inputs after, hyper-parameters by keyword. Outputs hold garbage (NaN, under test) on entry and must be
written completely, except where a docstring says "updates". Reductions run in one fixed order whatever the memory.

``scratch`` is a (bytes,) uint8 array of exactly the bytes the chosen engine asked for, or None. Scratch beyond 256 KiB
must come from there. ``images``: how many images an im2col chunk holds, chosen with the engine.

Shapes: x (N, H, W, C), y (N, P, Q, K), convolution weight (K, R, S, C / groups), vectors (C,), logits (N, classes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

Array = Any
"""numpy.ndarray or cupy.ndarray."""

Pair = tuple[int, int]


class Kernels(Protocol):
    """Signatures and formulas of every kernel. Backends are modules; this is their common type."""

    # -- convolution and linear ------------------------------------------------------------------------------------
    def conv2d_forward(
        self,
        y: Array,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        *,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
        images: int,
        scratch: Array | None = None,
    ) -> None:
        """Cross-correlation: y[n,p,q,k] = sum over r,s,c of x[n, p*stride - padding + r*dilation, ..., c] *
        weight[k,r,s,c] (+ bias[k]).
        """

    def conv2d_backward_data(
        self,
        dx: Array,
        dy: Array,
        weight: Array,
        *,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
        images: int,
        scratch: Array | None = None,
    ) -> None:
        """dx: the transposed correlation of dy with weight; rows and columns of x that no window reads get 0."""

    def conv2d_backward_weight(
        self,
        d_weight: Array,
        x: Array,
        dy: Array,
        *,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
        images: int,
        accumulate: bool = False,
        scratch: Array | None = None,
    ) -> None:
        """d_weight[k,r,s,c] = sum over n,p,q of dy[n,p,q,k] * x[n, p*stride - padding + r*dilation, ..., c];
        ``accumulate``: +=.
        """

    def channel_sum(self, d_bias: Array, dy: Array, *, accumulate: bool = False) -> None:
        """d_bias[c] = sum of dy over every axis but the last; ``accumulate``: +=."""

    def linear_forward(self, y: Array, x: Array, weight: Array, bias: Array | None = None) -> None:
        """y (N, K) = x (N, C) @ weight (K, C).T (+ bias)."""

    def linear_backward_data(self, dx: Array, dy: Array, weight: Array) -> None:
        """dx = dy @ weight."""

    def linear_backward_weight(self, d_weight: Array, x: Array, dy: Array, *, accumulate: bool = False) -> None:
        """d_weight = dy.T @ x; ``accumulate``: += (in chunks of rows, without a second d_weight)."""

    # -- batch norm: per channel over all other axes; mean, rstd, running statistics in the statistics dtype --------
    def batch_norm_statistics(self, mean: Array, rstd: Array, x: Array, *, eps: float) -> None:
        """mean and 1 / sqrt(biased variance + eps), the variance in two passes (sum of squared deviations)."""

    def batch_norm_apply(self, y: Array, x: Array, mean: Array, rstd: Array, weight: Array, bias: Array) -> None:
        """y = (x - mean) * rstd * weight + bias. y may be x."""

    def batch_norm_running(
        self,
        running_mean: Array,
        running_var: Array,
        num_batches_tracked: Array,
        mean: Array,
        rstd: Array,
        *,
        eps: float,
        momentum: float | None,
        count: int,
    ) -> None:
        """Updates the running averages with the unbiased variance, and the counter (1,) int64; momentum None: cumulative
        average.
        """

    def batch_norm_inference(
        self, y: Array, x: Array, running_mean: Array, running_var: Array, weight: Array, bias: Array, *, eps: float
    ) -> None:
        """y = (x - running_mean) / sqrt(running_var + eps) * weight + bias. y may be x."""

    def batch_norm_backward_weight(
        self, d_weight: Array, d_bias: Array, dy: Array, x: Array, mean: Array, rstd: Array
    ) -> None:
        """d_weight = sum of dy * (x - mean) * rstd, d_bias = sum of dy."""

    def batch_norm_backward_data(
        self, dx: Array, dy: Array, x: Array, mean: Array, rstd: Array, weight: Array, d_weight: Array, d_bias: Array
    ) -> None:
        """dx = weight * rstd * (dy - d_bias / M - (x - mean) * rstd * d_weight / M), M values per channel. dx may be dy."""

    # -- several layers in one; dz is the gradient behind the ReLU: dy where y > 0, else 0 -------------------------
    def conv2d_relu_forward(
        self,
        y: Array,
        x: Array,
        weight: Array,
        bias: Array,
        *,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
        images: int,
        scratch: Array | None = None,
    ) -> None:
        """y = max(conv2d_forward, 0)."""

    def relu_bias_backward(self, d_bias: Array, dz: Array, dy: Array, y: Array) -> None:
        """dz, and d_bias = the sum of dz over every axis but the last. dz may be dy."""

    def batch_norm_statistics_running(
        self,
        mean: Array,
        rstd: Array,
        running_mean: Array,
        running_var: Array,
        num_batches_tracked: Array,
        x: Array,
        old_mean: Array,
        old_var: Array,
        old_tracked: Array,
        *,
        eps: float,
        momentum: float,
        count: int,
    ) -> None:
        """batch_norm_statistics, and batch_norm_running from the old averages, which may be the same arrays."""

    def batch_norm_relu(self, y: Array, x: Array, mean: Array, rstd: Array, weight: Array, bias: Array) -> None:
        """y = max(batch_norm_apply, 0). y may be x."""

    def batch_norm_add_relu(
        self, y: Array, x: Array, residual: Array, mean: Array, rstd: Array, weight: Array, bias: Array
    ) -> None:
        """y = max(batch_norm_apply + residual, 0). y may be x or residual."""

    def batch_norm_relu_backward_weight(
        self,
        d_weight: Array,
        d_bias: Array,
        dy: Array,
        x: Array,
        mean: Array,
        rstd: Array,
        weight: Array,
        bias: Array,
    ) -> None:
        """batch_norm_backward_weight on dz, where y > 0 is found by computing y again."""

    def batch_norm_relu_backward_data(
        self,
        dx: Array,
        dy: Array,
        x: Array,
        mean: Array,
        rstd: Array,
        weight: Array,
        bias: Array,
        d_weight: Array,
        d_bias: Array,
    ) -> None:
        """batch_norm_backward_data on dz, where y > 0 is found by computing y again. dx may be dy."""

    def batch_norm_add_relu_backward_weight(
        self, d_weight: Array, d_bias: Array, dz: Array, dy: Array, x: Array, y: Array, mean: Array, rstd: Array
    ) -> None:
        """dz, and batch_norm_backward_weight on it. dz may be dy."""

    def batch_norm_add_relu_backward_weight_sum(
        self,
        d_weight: Array,
        d_bias: Array,
        dz: Array,
        dy: Array,
        dy1: Array,
        x: Array,
        y: Array,
        mean: Array,
        rstd: Array,
    ) -> None:
        """The same for the gradient dy + dy1. dz may be either."""

    # -- pointwise --------------------------------------------------------------------------------------------------
    def relu_forward(self, y: Array, x: Array) -> None:
        """y = max(x, 0). y may be x."""

    def relu_backward(self, dx: Array, dy: Array, y: Array) -> None:
        """dx = dy where y > 0, else 0. dx may be dy."""

    def tanh_forward(self, y: Array, x: Array, *, amplitude: float, slope: float) -> None:
        """y = amplitude * tanh(slope * x). y may be x."""

    def tanh_backward(self, dx: Array, dy: Array, y: Array, *, amplitude: float, slope: float) -> None:
        """dx = dy * slope * (amplitude - y * y / amplitude). dx may be dy."""

    def add_forward(self, y: Array, x0: Array, x1: Array) -> None:
        """y = x0 + x1. y may be either."""

    def dropout(self, y: Array, x: Array, counters: Array, *, node: int, threshold: int, scale: float) -> None:
        """y = x * scale where the random word of the element is >= threshold, else 0; forward and backward alike. y may be x.

        Word i of the tensor is word i % 4 of Philox4x32-10 (``minidnn.random``) for the counter (i // 4, node, step low,
        step high) and the key (seed, rank), with step, seed and rank from ``counters``.
        """

    def convert(self, y: Array, x: Array) -> None:
        """y = x in y's dtype."""

    # -- pooling ----------------------------------------------------------------------------------------------------
    def max_pool_forward(self, y: Array, index: Array, x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> None:
        """y = maximum over the window; index (uint8, like y) = r * S + s of the first maximum in row-major order. NaN
        wins.
        """

    def max_pool_inference(self, y: Array, x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> None:
        """y alone."""

    def max_pool_backward(
        self, dx: Array, dy: Array, index: Array, *, kernel: Pair, stride: Pair, padding: Pair
    ) -> None:
        """dx = sum of the dy whose window chose this element, else 0."""

    def avg_pool_forward(self, y: Array, x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> None:
        """y = sum over the window / (R * S): padding counts, as PyTorch's default."""

    def avg_pool_backward(self, dx: Array, dy: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> None:
        """dx = sum over the windows that contain the element of dy / (R * S)."""

    def global_avg_pool_forward(self, y: Array, x: Array) -> None:
        """y (N, C) = mean of x over H, W."""

    def global_avg_pool_backward(self, dx: Array, dy: Array) -> None:
        """dx = dy / (H * W) at every position."""

    def subsample_forward(self, y: Array, x: Array, weight: Array, bias: Array, *, kernel: Pair) -> None:
        """y = weight[c] * sum over the window (kernel = stride) + bias[c]: the trainable sub-sampling of LeCun et al.
        1998.
        """

    def subsample_backward_data(self, dx: Array, dy: Array, weight: Array, *, kernel: Pair) -> None:
        """dx = weight[c] * dy of the window; rows and columns beyond the last whole window get 0."""

    def subsample_backward_weight(self, d_weight: Array, d_bias: Array, dy: Array, x: Array, *, kernel: Pair) -> None:
        """d_weight[c] = sum of dy * (sum of x over the window), d_bias[c] = sum of dy."""

    # -- joining ----------------------------------------------------------------------------------------------------
    def concat_forward(self, y: Array, *inputs: Array) -> None:
        """y = inputs side by side along the last axis."""

    def concat_backward(self, dx: Array, dy: Array, *, offset: int) -> None:
        """dx = dy[..., offset : offset + C]."""

    # -- local response normalisation (Krizhevsky et al. 2012, as PyTorch scales it) --------------------------------
    def lrn_forward(self, y: Array, scale: Array, x: Array, *, size: int, alpha: float, beta: float, k: float) -> None:
        """scale = k + alpha / size * sum of x^2 over ``size`` neighbouring channels (size // 2 before, the rest after); y
        = x * scale^-beta.
        """

    def lrn_backward(
        self, dx: Array, dy: Array, x: Array, scale: Array, *, size: int, alpha: float, beta: float, k: float
    ) -> None:
        """dx = dy * scale^-beta - 2 alpha beta / size * x * (sum over the windows that contain the channel of dy * x *
        scale^(-beta-1)).
        """

    # -- loss -------------------------------------------------------------------------------------------------------
    def softmax_cross_entropy_forward(
        self, loss: Array, probabilities: Array, logits: Array, labels: Array, *, smoothing: float
    ) -> None:
        """loss () = mean over samples of -sum_k q_k log p_k, q = (1 - smoothing) * onehot + smoothing / classes. Stable
        (log-sum-exp).
        """

    def softmax_cross_entropy_backward(
        self, d_logits: Array, probabilities: Array, labels: Array, scalars: Array, *, smoothing: float
    ) -> None:
        """d_logits = (p - q) * scalars[LOSS_WEIGHT]. d_logits may be probabilities."""

    # -- dynamic loss scaling (Micikevicius et al. 2018): ``scaling`` as in minidnn.scalars.Scaling -----------------
    def scale_loss(self, scalars: Array, scaling: Array) -> None:
        """Updates: scalars[LOSS_WEIGHT] *= scaling[SCALE]; scalars[GRADIENT_SCALE] /= scaling[SCALE]."""

    def check_finite(self, scaling: Array, *gradients: Array) -> None:
        """Updates: scaling[FINITE] = 0 if any gradient has an infinity or a NaN; else it stays."""

    def adapt_scale(self, scaling: Array, scalars: Array, *, interval: int) -> None:
        """Updates: scalars[FINITE] = scaling[FINITE]; a finite step counts, and ``interval`` of them double the scale, the
        other halves it and is counted as skipped. Then scaling[FINITE] = 1. The scale stays between 1 and 2^24.
        """

    # -- clipping by the global norm, as torch.nn.utils.clip_grad_norm_ ---------------------------------------------
    def clip_scale(self, scalars: Array, *gradients: Array, max_norm: float) -> None:
        """Updates: scalars[GRADIENT_SCALE] *= min(1, max_norm / (norm + 1e-6)), where norm is the L2 norm of all gradients
        times scalars[GRADIENT_SCALE]; squares are added in double. A norm that is NaN makes the scale NaN.
        """

    # -- optimizers: on flat (n,) slices; PyTorch's definitions; scalars as in minidnn.scalars ----------------------
    # Nothing changes where scalars[FINITE] is 0.
    def update_all(self, *operands: Array, kernel: str, count: int, narrow: bool, settings: Mapping[str, Any]) -> None:
        """Updates ``count`` slices by ``kernel``(weight, state ..., gradient, scalars, **settings).

        Operands: all weights, all of each state, ``narrow``: all 16-bit weights, which become the weights rounded; all
        gradients; the scalars.
        """

    def sgd_update(self, weight: Array, gradient: Array, scalars: Array, *, weight_decay: float) -> None:
        """Updates: g = gradient * scalars[GRADIENT_SCALE] + weight_decay * weight; weight -= lr * g."""

    def sgd_momentum_update(
        self,
        weight: Array,
        velocity: Array,
        gradient: Array,
        scalars: Array,
        *,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
    ) -> None:
        """Updates: v = momentum * v + g; weight -= lr * (g + momentum * v if nesterov else v)."""

    def adam_update(
        self,
        weight: Array,
        first: Array,
        second: Array,
        gradient: Array,
        scalars: Array,
        *,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ) -> None:
        """Updates (Kingma & Ba 2015, as PyTorch): m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2;
        weight -= lr / scalars[BIAS1] * m / (sqrt(v / scalars[BIAS2]) + eps), with BIASi = 1 - beta_i^step computed on the
        host in double.
        """
