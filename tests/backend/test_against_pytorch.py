"""The definitions themselves against PyTorch, where it is installed: a definition can be wrong, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tests.backend.reference as ref
from tests.backend.cases import Maker
from tests.backend.test_convolution import CONVOLUTIONS

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
F: Any = torch.nn.functional


def nchw(x: Any) -> Any:
    return torch.tensor(np.moveaxis(np.asarray(x, np.float64), -1, 1)).requires_grad_()


def nhwc(x: Any) -> Any:
    return np.moveaxis(x.detach().numpy(), 1, -1)


def random(*shape: int) -> Any:
    return np.random.default_rng(1).standard_normal(shape)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str) -> None:
    convolution = CONVOLUTIONS[name]
    x, weight, dy, bias = convolution.arrays(np.float64)
    tx, tw = nchw(x), nchw(weight)
    ty = F.conv2d(tx, tw, torch.tensor(bias), **convolution.attrs)
    ty.backward(nchw(dy))
    expected = (nhwc(ty), nhwc(tx.grad), nhwc(tw.grad))
    for actual, wanted in zip(ref.conv2d(x, weight, dy, bias, **convolution.attrs), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-12)


@pytest.mark.parametrize("ceil", [False, True])
def test_max_pool_and_its_overhanging_windows(ceil: bool) -> None:
    x = random(2, 8, 13, 3).round(1)  # with ties
    tx, attrs = nchw(x), {"stride": (2, 3), "padding": (1, 0)}
    ty, _ = F.max_pool2d(tx, (3, 2), **attrs, ceil_mode=ceil, return_indices=True)
    y, index = ref.max_pool(x, nhwc(ty).shape, (3, 2), **attrs)
    np.testing.assert_array_equal(y, nhwc(ty))
    dy = random(*y.shape)
    ty.backward(nchw(dy))
    np.testing.assert_allclose(ref.max_pool_gradient(x.shape, dy, index, (3, 2), **attrs), nhwc(tx.grad), atol=1e-12)


def test_average_pool_counts_its_padding() -> None:
    x = random(2, 7, 8, 3)
    ty = F.avg_pool2d(nchw(x), (3, 3), 2, 1)
    np.testing.assert_allclose(ref.window_sums(x, nhwc(ty).shape, (3, 3), (2, 2), (1, 1)) / 9, nhwc(ty), atol=1e-12)


@pytest.mark.parametrize("size", [4, 5])
def test_local_response_normalisation(size: int) -> None:
    x, dy = random(2, 3, 4, 9), random(2, 3, 4, 9)
    tx = nchw(x)
    ty = F.local_response_norm(tx, size, alpha=0.3, beta=0.75, k=2.0)
    ty.backward(nchw(dy))
    y, scale = ref.lrn(x, size, 0.3, 0.75, 2.0)
    np.testing.assert_allclose(y, nhwc(ty), atol=1e-12)
    np.testing.assert_allclose(ref.lrn_gradient(dy, x, scale, size, 0.3, 0.75), nhwc(tx.grad), atol=1e-12)


def test_batch_norm_and_its_running_averages(backend: Any) -> None:
    k, on, host = backend.kernels, backend.to_device, backend.to_host
    x, dy = random(3, 7, 5, 4).astype(np.float32), random(3, 7, 5, 4).astype(np.float32)
    tx, layer = nchw(x), torch.nn.BatchNorm2d(4, eps=1e-3, momentum=0.3, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(1.0, 5.0))
    layer(tx).backward(nchw(dy))
    vectors = {name: on(np.zeros(4, np.float32)) for name in ("mean", "rstd", "running_mean", "d_weight", "d_bias")}
    mean, rstd, running_mean, d_weight, d_bias = vectors.values()
    running_var, tracked, dx = on(np.ones(4, np.float32)), on(np.zeros(1, np.int64)), on(np.empty_like(x))
    k.batch_norm_statistics(mean, rstd, on(x), eps=1e-3)
    k.batch_norm_running(running_mean, running_var, tracked, mean, rstd, eps=1e-3, momentum=0.3, count=x.size // 4)
    k.batch_norm_backward_weight(d_weight, d_bias, on(dy), on(x), mean, rstd)
    k.batch_norm_backward_data(dx, on(dy), on(x), mean, rstd, on(np.arange(1, 5, dtype=np.float32)), d_weight, d_bias)
    pairs = (
        (running_mean, layer.running_mean), (running_var, layer.running_var), (tracked[0], layer.num_batches_tracked),
        (d_weight, layer.weight.grad), (d_bias, layer.bias.grad),
    )  # fmt: skip
    for actual, wanted in pairs:
        np.testing.assert_allclose(host(actual), wanted.numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(host(dx), nhwc(tx.grad), atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_cross_entropy(smoothing: float) -> None:
    logits, labels = random(6, 5), np.array([0, 4, 2, 2, 1, 3])
    z = torch.tensor(logits, requires_grad=True)
    loss = F.cross_entropy(z, torch.tensor(labels), label_smoothing=smoothing)
    loss.backward()
    value, p, q = ref.softmax_cross_entropy(logits, labels, smoothing)
    np.testing.assert_allclose(value, loss.item(), rtol=1e-12)
    np.testing.assert_allclose((p - q) / 6, z.grad.numpy(), atol=1e-12)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "nesterov", "adam"])
def test_three_updates_of_an_optimizer(backend: Any, kind: str) -> None:
    k, on = backend.kernels, backend.to_device
    weight = random(50).astype(np.float32)
    parameter = torch.nn.Parameter(torch.tensor(weight, dtype=torch.float64))
    w, first, second = on(weight), on(np.zeros(50, np.float32)), on(np.zeros(50, np.float32))
    if kind == "adam":
        optimizer: Any = torch.optim.Adam([parameter], lr=0.1, weight_decay=0.01)
    else:
        momentum = 0.0 if kind == "sgd" else 0.9
        optimizer = torch.optim.SGD(
            [parameter], lr=0.1, momentum=momentum, nesterov=kind == "nesterov", weight_decay=0.01
        )
    for step in range(1, 4):
        gradient = np.random.default_rng(step).standard_normal(50).astype(np.float32)
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        scalars = on(np.array([0.1, 1, 1, 1 - 0.9**step, 1 - 0.999**step, 1, 0, 0], np.float32))
        if kind == "adam":
            k.adam_update(w, first, second, on(gradient), scalars, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
        elif kind == "sgd":
            k.sgd_update(w, on(gradient), scalars, weight_decay=0.01)
        else:
            nesterov = kind == "nesterov"
            k.sgd_momentum_update(w, first, on(gradient), scalars, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    np.testing.assert_allclose(backend.to_host(w), parameter.detach().numpy(), atol=1e-5)


def test_tanh_gradient() -> None:
    case = {c.id: c for c in Maker((2, 3, 4, 5), "float64").pointwise()}["tanh_backward"]
    dy, y = case.inputs
    x = torch.tensor(1.5 * np.arctanh(y / 1.7159), requires_grad=True)
    (1.7159 * torch.tanh(2 / 3 * x)).backward(torch.tensor(dy))
    np.testing.assert_allclose(case.expected()[0], x.grad.numpy(), atol=1e-12)
