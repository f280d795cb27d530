"""One call of every kernel except the convolutions: shapes, inputs, what it may overwrite, and what it must return.

The same table is read by the tests of values, of in-place calls, of addresses and of hidden allocations, so that a kernel
added to it is held to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import tests.backend.reference as ref

Array = Any
Shape = tuple[int, int, int, int]
COUNTERS = np.array([7, 1, 1234, 3], np.uint32)


@dataclass(frozen=True, slots=True)
class Case:
    """``outputs``: arrays like what the kernel writes, poisoned by the test unless ``updates``; ``expected`` in float64."""

    kernel: str
    outputs: tuple[Array, ...]
    inputs: tuple[Array, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    expected: Callable[[], tuple[Array, ...]] = tuple
    overwrites: tuple[int, ...] = ()  # inputs that the first output may be
    updates: bool = False
    tag: str = ""

    @property
    def id(self) -> str:
        return f"{self.kernel}-{self.tag}" if self.tag else self.kernel


class Maker:
    """Random arrays of a dtype, and the cases built on them."""

    def __init__(self, shape: Shape, dtype: Any) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.random = np.random.default_rng(0)

    def normal(self, *shape: int, mean: float = 0.0) -> Array:
        return (self.random.standard_normal(shape, np.float32) + mean).astype(self.dtype)

    def positive(self, *shape: int) -> Array:
        return (self.random.random(shape, np.float32) + 0.5).astype(self.dtype)

    def like(self, *shape: int, dtype: Any = None) -> Array:
        return np.zeros(shape, dtype or self.dtype)

    def all(self) -> list[Case]:
        return [
            *self.linear(),
            *self.norm(),
            *self.fused(),
            *self.pointwise(),
            *self.pooling(),
            *self.joining(),
            *self.loss(),
            *self.update(),
        ]

    def linear(self) -> list[Case]:
        n, h, w, c = self.shape
        rows, inputs, outputs = n * h, w * c, 4 * c + 1
        x, dy, weight = self.normal(rows, inputs), self.normal(rows, outputs), self.normal(outputs, inputs)
        bias, old, old_bias = self.normal(outputs), self.normal(outputs, inputs), self.normal(c)
        image = self.normal(*self.shape, mean=3.0)
        x64, dy64, w64 = (a.astype(float) for a in (x, dy, weight))
        y, product = self.like(rows, outputs), lambda: dy64.T @ x64
        sums = lambda: image.astype(float).sum(axis=(0, 1, 2))  # noqa: E731
        add = {"accumulate": True}
        return [
            Case("linear_forward", (y,), (x, weight), {}, lambda: (x64 @ w64.T,), tag="no bias"),
            Case("linear_forward", (y,), (x, weight, bias), {}, lambda: (x64 @ w64.T + bias,)),
            Case("linear_backward_data", (self.like(rows, inputs),), (dy, weight), {}, lambda: (dy64 @ w64,)),
            Case("linear_backward_weight", (self.like(outputs, inputs),), (x, dy), {}, lambda: (product(),)),
            Case(
                "linear_backward_weight",
                (old,),
                (x, dy),
                add,
                lambda: (old + product(),),
                updates=True,
                tag="accumulate",
            ),
            Case("channel_sum", (self.like(c),), (image,), {}, lambda: (sums(),)),
            Case(
                "channel_sum", (old_bias,), (image,), add, lambda: (old_bias + sums(),), updates=True, tag="accumulate"
            ),
        ]

    def norm(self) -> list[Case]:
        c, count = self.shape[3], int(np.prod(self.shape[:3]))
        x, dy = self.normal(*self.shape, mean=2.0), self.normal(*self.shape)
        weight, bias, eps, axes = self.positive(c), self.normal(c), 1e-3, (0, 1, 2)
        mean, rstd = self.normal(c, mean=2.0), self.positive(c)
        d_weight, d_bias = self.normal(c), self.normal(c)
        running_mean, running_var, tracked = self.normal(c), self.positive(c), np.array([4], np.int64)
        x64, dy64, y, vector = x.astype(float), dy.astype(float), self.like(*self.shape), self.like(c)

        def statistics() -> tuple[Array, ...]:
            return x64.mean(axis=axes), 1 / np.sqrt(x64.var(axis=axes) + eps)

        def running(share: float) -> tuple[Array, ...]:
            unbiased = (1 / rstd.astype(float) ** 2 - eps) * count / (count - 1)
            return (
                (1 - share) * running_mean + share * mean,
                (1 - share) * running_var + share * unbiased,
                np.array([5]),
            )

        def backward_data() -> tuple[Array, ...]:
            hat = (x64 - mean) * rstd
            return (weight * rstd.astype(float) * (dy64 - d_bias / count - hat * d_weight / count),)

        averages = (running_mean, running_var, tracked)
        attrs = {"eps": eps, "count": count}
        lrn = {"size": 5, "alpha": 0.3, "beta": 0.75, "k": 2.0}
        even = {"size": 4, "alpha": 0.2, "beta": 0.6, "k": 1.0}
        cases = [
            Case("batch_norm_statistics", (vector, vector), (x,), {"eps": eps}, statistics),
            Case("batch_norm_apply", (y,), (x, mean, rstd, weight, bias), {},
                 lambda: ((x64 - mean) * rstd * weight + bias,), (0,)),
            Case("batch_norm_running", averages, (mean, rstd), {**attrs, "momentum": 0.1}, lambda: running(0.1), updates=True),
            Case("batch_norm_running", averages, (mean, rstd), {**attrs, "momentum": None}, lambda: running(1 / 5), updates=True,
                 tag="cumulative"),
            Case("batch_norm_inference", (y,), (x, running_mean, running_var, weight, bias), {"eps": eps},
                 lambda: ((x64 - running_mean) / np.sqrt(running_var.astype(float) + eps) * weight + bias,), (0,)),
            Case("batch_norm_backward_weight", (vector, vector), (dy, x, mean, rstd), {},
                 lambda: ((dy64 * (x64 - mean) * rstd).sum(axis=axes), dy64.sum(axis=axes))),
            Case("batch_norm_backward_data", (y,), (dy, x, mean, rstd, weight, d_weight, d_bias), {}, backward_data, (0,)),
        ]  # fmt: skip
        for tag, a in (("", lrn), ("even", even)):

            def forward(a: Any = a) -> tuple[Array, ...]:
                return ref.lrn(x64, **a)  # type: ignore[no-any-return]

            def backward(a: Any = a) -> tuple[Array, ...]:
                return (ref.lrn_gradient(dy64, x64, ref.lrn(x64, **a)[1], a["size"], a["alpha"], a["beta"]),)

            scale = ref.lrn(x64, **a)[1].astype(self.dtype)
            cases.append(Case("lrn_forward", (y, y), (x,), a, forward, tag=tag))
            cases.append(Case("lrn_backward", (y,), (dy, x, scale), a, backward, tag=tag))
        return cases

    def fused(self) -> list[Case]:
        c, count, axes = self.shape[3], int(np.prod(self.shape[:3])), (0, 1, 2)
        x, dy, skip = self.normal(*self.shape, mean=1.0), self.normal(*self.shape), self.normal(*self.shape)
        weight, bias, mean, rstd = self.positive(c), self.normal(c), self.normal(c, mean=1.0), self.positive(c)
        d_weight, d_bias, y, vector = self.normal(c), self.normal(c), self.like(*self.shape), self.like(c)
        stored = np.maximum(self.normal(*self.shape), 0)
        dy64, hat = dy.astype(float), (x.astype(float) - mean) * rstd
        normal = hat * weight + bias
        # Nearer to zero than rounding nobody knows the sign: there the gradient is nothing in both.
        dy[np.abs(normal) < 1e-5] = dy64[np.abs(normal) < 1e-5] = 0
        remade, masked = np.where(normal > 0, dy64, 0), np.where(stored > 0, dy64, 0)
        joined = np.where(stored > 0, dy64 + skip, 0)

        def weights(z: Array) -> tuple[Array, Array]:
            return (z * hat).sum(axis=axes), z.sum(axis=axes)

        def data() -> tuple[Array, ...]:
            return (weight * rstd.astype(float) * (remade - d_bias / count - hat * d_weight / count),)

        both = (mean, rstd, weight, bias)
        old = (self.normal(c), self.positive(c), np.array([4], np.int64))
        averages = (self.like(c), self.like(c), np.array([0], np.int64))

        def running() -> tuple[Array, ...]:
            x64 = x.astype(float)
            centre, variance = x64.mean(axis=axes), x64.var(axis=axes)
            unbiased = variance * count / (count - 1)
            return (
                centre, 1 / np.sqrt(variance + 1e-3), 0.9 * old[0] + 0.1 * centre, 0.9 * old[1] + 0.1 * unbiased,
                np.array([5]),
            )  # fmt: skip

        return [
            Case("batch_norm_statistics_running", (vector, vector, *averages), (x, *old),
                 {"eps": 1e-3, "momentum": 0.1, "count": count}, running),
            Case("batch_norm_relu", (y,), (x, *both), {}, lambda: (np.maximum(normal, 0),), (0,)),
            Case("batch_norm_add_relu", (y,), (x, skip, *both), {}, lambda: (np.maximum(normal + skip, 0),), (0, 1)),
            Case("batch_norm_relu_backward_weight", (vector, vector), (dy, x, *both), {}, lambda: weights(remade)),
            Case("batch_norm_relu_backward_data", (y,), (dy, x, *both, d_weight, d_bias), {}, data, (0,)),
            Case("batch_norm_add_relu_backward_weight", (vector, vector, y), (dy, x, stored, mean, rstd), {},
                 lambda: (*weights(masked), masked)),
            Case("batch_norm_add_relu_backward_weight_sum", (vector, vector, y), (dy, skip, x, stored, mean, rstd), {},
                 lambda: (*weights(joined), joined)),
            Case("relu_bias_backward", (vector, y), (dy, stored), {}, lambda: (masked.sum(axis=axes), masked)),
        ]  # fmt: skip

    def pointwise(self) -> list[Case]:
        x, dy, y = self.normal(*self.shape), self.normal(*self.shape), self.like(*self.shape)
        x[:, ::3] = -0.0  # which zero max(-0.0, 0.0) is may differ, but not with the address
        x64, dy64, relu = x.astype(float), dy.astype(float), np.maximum(x, 0)
        tanh = {"amplitude": 1.7159, "slope": 2 / 3}
        squashed = (1.7159 * np.tanh(2 / 3 * x64)).astype(self.dtype)
        drop = {"node": 5, "threshold": round(0.3 * 2**32), "scale": 1 / 0.7}

        def dropped() -> tuple[Array, ...]:
            return (x64 / 0.7 * (ref.philox_words(x.size, 5, COUNTERS) >= drop["threshold"]).reshape(x.shape),)

        return [
            Case("relu_forward", (y,), (x,), {}, lambda: (np.maximum(x64, 0),), (0,)),
            Case("relu_backward", (y,), (dy, relu), {}, lambda: (np.where(x64 > 0, dy64, 0),), (0,)),
            Case("tanh_forward", (y,), (x,), tanh, lambda: (1.7159 * np.tanh(2 / 3 * x64),), (0,)),
            Case("tanh_backward", (y,), (dy, squashed), tanh,
                 lambda: (dy64 * 1.7159 * 2 / 3 / np.cosh(2 / 3 * x64) ** 2,), (0,)),
            Case("add_forward", (y,), (x, dy), {}, lambda: (x64 + dy64,), (0, 1)),
            Case("dropout", (y,), (x, COUNTERS), drop, dropped, (0,)),
            Case("convert", (self.like(*self.shape, dtype=np.float64),), (x,), {}, lambda: (x64,), tag="widen"),
            Case("convert", (y,), (np.arange(y.size).astype(np.uint8).reshape(y.shape),), {},
                 lambda: ((np.arange(y.size) % 256).reshape(y.shape),), tag="bytes"),
        ]  # fmt: skip

    def pooling(self) -> list[Case]:
        n, h, w, c = self.shape
        x = self.normal(n, h, w, c)
        x64, dx, cases = x.astype(float), self.like(n, h, w, c), list[Case]()
        for tag, kernel, stride, padding, ceil in (
            ("disjoint", (2, 2), (2, 2), (0, 0), False), ("overlapping", (3, 3), (2, 2), (1, 1), False),
            ("overhanging", (3, 2), (2, 3), (1, 0), True), ("every row", (2, 3), (1, 1), (0, 1), False),
        ):  # fmt: skip
            up = [step - 1 if ceil else 0 for step in stride]
            sides = zip((h, w), kernel, stride, padding, up, strict=True)
            y_shape = (n, *((e + 2 * p - k + u) // s + 1 for e, k, s, p, u in sides), c)
            attrs = {"kernel": kernel, "stride": stride, "padding": padding}
            dy, y, index = self.normal(*y_shape), self.like(*y_shape), self.like(*y_shape, dtype=np.uint8)

            def best(a: Any = attrs, s: Any = y_shape) -> tuple[Array, ...]:
                return ref.max_pool(x64, s, **a)  # type: ignore[no-any-return]

            def mean(a: Any = attrs, s: Any = y_shape, k: Any = kernel) -> tuple[Array, ...]:
                return (ref.window_sums(x64, s, **a) / (k[0] * k[1]),)

            def shared(a: Any = attrs, dy: Array = dy, k: Any = kernel) -> tuple[Array, ...]:
                return (ref.spread(dy.astype(float) / (k[0] * k[1]), x.shape, **a),)

            chosen = best()[1] if x.size < 20_000 else (np.arange(dy.size) % 4).reshape(y_shape).astype(np.uint8)

            def given(a: Any = attrs, dy: Array = dy, chosen: Array = chosen) -> tuple[Array, ...]:
                return (ref.max_pool_gradient(x.shape, dy.astype(float), chosen, **a),)

            cases.append(Case("max_pool_forward", (y, index), (x,), attrs, best, tag=tag))
            cases.append(Case("max_pool_inference", (y,), (x,), attrs, lambda b=best: b()[:1], tag=tag))
            cases.append(Case("max_pool_backward", (dx,), (dy, chosen), attrs, given, tag=tag))
            cases.append(Case("avg_pool_forward", (y,), (x,), attrs, mean, tag=tag))
            cases.append(Case("avg_pool_backward", (dx,), (dy,), attrs, shared, tag=tag))
        return cases + self.whole_pooling()

    def whole_pooling(self) -> list[Case]:
        n, h, w, c = self.shape
        x, flat, dx = self.normal(*self.shape), self.normal(n, c), self.like(*self.shape)
        kernel, y_shape = (2, 3), (n, h // 2, w // 3, c)
        weight, bias, dy = self.normal(c), self.normal(c), self.normal(*y_shape)
        x64, dy64, a = x.astype(float), dy.astype(float), {"kernel": kernel}
        sums = lambda: ref.window_sums(x64, y_shape, kernel, kernel, (0, 0))  # noqa: E731
        vector = self.like(c)
        return [
            Case("global_avg_pool_forward", (self.like(n, c),), (x,), {}, lambda: (x64.mean(axis=(1, 2)),)),
            Case("global_avg_pool_backward", (dx,), (flat,), {},
                 lambda: (np.broadcast_to(flat.astype(float)[:, None, None] / (h * w), x.shape),)),
            Case("subsample_forward", (self.like(*y_shape),), (x, weight, bias), a, lambda: (weight * sums() + bias,)),
            Case("subsample_backward_data", (dx,), (dy, weight), a,
                 lambda: (weight * ref.spread(dy64, x.shape, kernel, kernel, (0, 0)),)),
            Case("subsample_backward_weight", (vector, vector), (dy, x), a,
                 lambda: ((dy64 * sums()).sum(axis=(0, 1, 2)), dy64.sum(axis=(0, 1, 2)))),
        ]  # fmt: skip

    def joining(self) -> list[Case]:
        n, h, w, c = self.shape
        parts = (self.normal(n, h, w, c), self.normal(n, h, w, 1), self.normal(n, h, w, c + 2))
        whole = np.concatenate(parts, axis=3)
        return [
            Case("concat_forward", (self.like(*whole.shape),), parts, {}, lambda: (whole,)),
            Case("concat_backward", (self.like(n, h, w, c + 2),), (whole,), {"offset": c + 1}, lambda: (parts[2],)),
        ]

    def loss(self) -> list[Case]:
        n, h, w, c = self.shape
        samples, classes = n * h, w * c
        logits = 4 * self.normal(samples, classes)
        labels = self.random.integers(0, classes, samples)
        scalars = np.arange(8, dtype=self.dtype) + self.dtype.type(0.5)
        cases = []
        for smoothing in (0.0, 0.1):
            _, p, q = ref.softmax_cross_entropy(logits.astype(float), labels, smoothing)
            a = {"smoothing": smoothing}

            def forward(s: float = smoothing) -> tuple[Array, ...]:
                return ref.softmax_cross_entropy(logits.astype(float), labels, s)[:2]  # type: ignore[no-any-return]

            def backward(p: Array = p, q: Array = q) -> tuple[Array, ...]:
                return ((p - q) * 1.5,)

            outputs, tag = (self.like(), self.like(samples, classes)), f"smoothing {smoothing}"
            cases.append(Case("softmax_cross_entropy_forward", outputs, (logits, labels), a, forward, tag=tag))
            cases.append(Case("softmax_cross_entropy_backward", outputs[1:], (p.astype(self.dtype), labels, scalars), a,
                              backward, (0,), tag=tag))  # fmt: skip
        return cases

    def update(self) -> list[Case]:
        n = int(np.prod(self.shape))
        weight, velocity, second, gradient = self.normal(n), self.normal(n), self.positive(n), self.normal(n)
        scalars = np.array([0.1, 9.0, 0.5, 0.19, 0.002, 9, 9, 9], self.dtype)
        decay = {"weight_decay": 0.01}
        g = gradient.astype(float) * 0.5 + 0.01 * weight.astype(float)

        def momentum(nesterov: bool) -> tuple[Array, ...]:
            v = 0.9 * velocity.astype(float) + g
            return weight - 0.1 * (g + 0.9 * v if nesterov else v), v

        def adam() -> tuple[Array, ...]:
            m, v = 0.9 * velocity.astype(float) + 0.1 * g, 0.999 * second.astype(float) + 0.001 * g * g
            return weight - 0.1 / 0.19 * m / (np.sqrt(v / 0.002) + 1e-8), m, v

        cases = [Case("sgd_update", (weight,), (gradient, scalars), decay, lambda: (weight - 0.1 * g,), updates=True)]
        for nesterov in (False, True):
            cases.append(Case("sgd_momentum_update", (weight, velocity), (gradient, scalars),
                              {**decay, "momentum": 0.9, "nesterov": nesterov}, lambda n=nesterov: momentum(n), updates=True,
                              tag="nesterov" if nesterov else ""))  # fmt: skip
        skip = scalars.copy()
        skip[5] = 0
        plain = {**decay, "momentum": 0.9, "nesterov": False}
        cases.append(Case("sgd_momentum_update", (weight, velocity), (gradient, skip), plain, lambda: (weight, velocity),
                          updates=True, tag="not finite"))  # fmt: skip
        bad, pieces = gradient.copy(), np.array_split(gradient, 3)
        bad[n // 2] = np.inf
        state = np.array([8, 4, 1, 0], self.dtype)
        flagged = np.array([8, 4, 0, 0], self.dtype)
        cases += [
            Case("scale_loss", (scalars,), (state,), {}, lambda: (scalars * [1, 8, 1 / 8, 1, 1, 1, 1, 1],), updates=True),
            Case("check_finite", (state,), tuple(pieces), {}, lambda: (state,), updates=True),
            Case("check_finite", (state,), (gradient, bad), {}, lambda: (flagged,), updates=True, tag="inf"),
            Case("adapt_scale", (state, scalars), (), {"interval": 5},
                 lambda: ([16, 0, 1, 0], [*scalars[:5], 1, *scalars[6:]]), updates=True),
            Case("adapt_scale", (flagged, scalars), (), {"interval": 5},
                 lambda: ([4, 0, 1, 1], [*scalars[:5], 0, *scalars[6:]]), updates=True, tag="skipped"),
        ]  # fmt: skip
        norm = 0.5 * float(np.sqrt(np.square(gradient.astype(float)).sum()))

        def clipped(by: float) -> tuple[Array, ...]:
            return (scalars * [1, 1, by, 1, 1, 1, 1, 1],)

        unknown = np.where(np.isinf(bad), np.nan, bad)
        half, within, factor = {"max_norm": norm / 2}, {"max_norm": norm * 1.001}, norm / 2 / (norm + 1e-6)
        cases += [
            Case("clip_scale", (scalars,), (gradient,), half, lambda: clipped(factor), updates=True),
            Case("clip_scale", (scalars,), tuple(pieces), half, lambda: clipped(factor), updates=True, tag="pieces"),
            Case("clip_scale", (scalars,), tuple(pieces), within, lambda: clipped(1), updates=True, tag="within"),
            Case("clip_scale", (scalars,), (gradient, bad), half, lambda: clipped(0), updates=True, tag="inf"),
            Case("clip_scale", (scalars,), (gradient, unknown), half, lambda: clipped(np.nan), updates=True, tag="nan"),
        ]  # fmt: skip
        parts = tuple(np.array_split(np.arange(n), 3))
        cut = lambda array: tuple(np.ascontiguousarray(array[p]) for p in parts)  # noqa: E731
        cases.append(Case("update_all", (*cut(weight), *cut(velocity)), (*cut(gradient), scalars),
                          {"kernel": "sgd_momentum_update", "count": 3, "narrow": False, "settings": plain},
                          lambda: tuple(out[p] for out in momentum(False) for p in parts), updates=True))  # fmt: skip
        cases.append(Case("update_all", (*cut(weight), *cut(weight)), (*cut(gradient), scalars),
                          {"kernel": "sgd_update", "count": 3, "narrow": True, "settings": decay},
                          lambda: tuple((weight - 0.1 * g)[p] for p in (*parts, *parts)), updates=True,
                          tag="rounded"))  # fmt: skip
        attrs = {**decay, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
        return [*cases, Case("adam_update", (weight, velocity, second), (gradient, scalars), attrs, adam, updates=True)]
