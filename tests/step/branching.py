"""Nets whose tensors have several readers: skips, branches, concatenation, aliases, in-place chains, and random ones.

Each is a body to put between a convolution of four channels and a linear head.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from minidnn.graph import Tensor
from minidnn.layers import Graph

Body = Callable[[Graph, Tensor], Tensor]


def conv_bn_relu(g: Graph, h: Tensor, channels: int, kernel: int = 3, stride: int = 1) -> Tensor:
    return g.relu(g.batch_norm(g.conv2d(h, channels, kernel, stride, padding=kernel // 2)))


def residual(g: Graph, h: Tensor) -> Tensor:
    """A plain unit, then one with a projection; both end in a ReLU after the addition."""
    h = g.relu(g.batch_norm(h))
    h = g.relu(g.add(g.batch_norm(g.conv2d(conv_bn_relu(g, h, 4), 4, 3, padding=1)), h))
    branch = g.batch_norm(g.conv2d(conv_bn_relu(g, h, 6, stride=2), 6, 3, padding=1))
    return g.relu(g.add(branch, g.batch_norm(g.conv2d(h, 6, 1, 2))))


def dense(g: Graph, h: Tensor) -> Tensor:
    """Every layer reads the concatenation of all before it."""
    for _ in range(3):
        h = g.concat(h, g.conv2d(g.relu(g.batch_norm(h)), 3, 3, padding=1))
    return g.avg_pool(g.conv2d(g.relu(g.batch_norm(h)), 5, 1), 2)


def inception(g: Graph, h: Tensor) -> Tensor:
    """Four branches of one tensor, which the first layer of some could overwrite, side by side."""
    h = g.relu(h)
    pooled = g.relu(g.conv2d(g.max_pool(h, 3, 1, 1), 2, 1, bias=True))
    wide = g.relu(g.conv2d(g.relu(g.conv2d(h, 2, 1, bias=True)), 3, 5, padding=2))
    return g.concat(g.relu(g.conv2d(h, 3, 1)), conv_bn_relu(g, h, 2), wide, pooled)


def three_readers(g: Graph, h: Tensor) -> Tensor:
    """Two of the three give the gradient of the sum as it is, the third makes its own."""
    return g.add(g.add(h, g.tanh(h)), g.conv2d(g.relu(h), 4, 3, padding=1))


def shared_gradient(g: Graph, h: Tensor) -> Tensor:
    """One gradient goes to several layers that would each like to overwrite it."""
    a, b = g.relu(g.conv2d(h, 4, 1)), g.tanh(g.conv2d(h, 4, 1))
    total = g.add(a, b)
    return g.add(g.relu(g.batch_norm(total)), g.add(total, g.dropout(a, 0.3)))


def doubled(g: Graph, h: Tensor) -> Tensor:
    """add(x, x) and concat(x, x): one tensor is both inputs."""
    h = g.relu(g.add(h, h))
    return g.add(g.concat(h, h), g.conv2d(g.add(h, h), 8, 1))


def alias_chain(g: Graph, h: Tensor) -> Tensor:
    """Aliases of one tensor (flatten, a dropout of none) beside readers of the tensor itself, in place or not."""
    flat = g.flatten(g.dropout(g.relu(h), 0.0))
    return g.add(g.add(g.tanh(flat), flat), g.flatten(g.relu(g.conv2d(h, 4, 3, padding=1))))


def in_place_chain(g: Graph, h: Tensor) -> Tensor:
    return g.dropout(g.relu(g.tanh(g.relu(g.batch_norm(g.dropout(g.tanh(h), 0.2))))), 0.3)


NETS: dict[str, Body] = {
    body.__name__: body
    for body in (
        residual, dense, inception, three_readers, shared_gradient, doubled, alias_chain, in_place_chain
    )
}  # fmt: skip


def random_net(seed: int) -> Body:
    """Twelve random layers, each on random earlier tensors; whatever nobody has read is added up at the end."""

    def body(g: Graph, h: Tensor) -> Tensor:
        rng = np.random.default_rng(seed)
        tensors, unread = [h], {h}

        def pick() -> Tensor:
            tensor = tensors[max(0, len(tensors) - 1 - int(rng.geometric(0.4)) + 1)]
            unread.discard(tensor)
            return tensor

        makers: tuple[Callable[[], Tensor], ...] = (
            lambda: g.relu(pick()),
            lambda: g.tanh(pick()),
            lambda: g.batch_norm(pick()),
            lambda: g.conv2d(pick(), 4, 3, padding=1),
            lambda: g.add(pick(), pick()),
            lambda: g.conv2d(g.concat(pick(), pick()), 4, 1),
            lambda: g.max_pool(pick(), 3, 1, 1),
            lambda: g.dropout(pick(), 0.2),
            lambda: g.lrn(pick(), alpha=1.0),
        )
        for _ in range(12):
            made = makers[int(rng.integers(len(makers)))]()
            tensors.append(made)
            unread.add(made)
        total, *others = [tensor for tensor in tensors if tensor in unread]
        for tensor in others:
            total = g.add(total, tensor)
        return total

    return body
