"""The model zoo: a name -> a graph, nothing else. Parameter names are torchvision's where torchvision has the net."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from minidnn.errors import UserError, nearest
from minidnn.graph import Tensor
from minidnn.layers import Graph
from models import alexnet, cifar_quick, densenet, googlenet, lenet, resnet, vgg

__all__ = ["available", "build"]


class Model(NamedTuple):
    """``body(g, x, classes) -> logits``; ``image_size``: the default; ``smallest``: below it some map vanishes."""

    body: Callable[[Graph, Tensor, int], Tensor]
    image_size: int
    smallest: int = 1


MODELS = {
    "lenet": Model(lenet.lenet, 28, 16),
    "lenet5": Model(lenet.lenet5, 32, 28),
    "cifar_quick": Model(cifar_quick.cifar_quick, 32, 2),
    "alexnet": Model(alexnet.alexnet, 224, 63),
    "alexnet_2012": Model(alexnet.alexnet_2012, 227, 67),
    "googlenet": Model(googlenet.googlenet, 224, 15),
    **{f"densenet{d}": Model(partial(densenet.densenet, blocks=b), 224, 29) for d, b in densenet.BLOCKS.items()},
    **{f"vgg{depth}": Model(partial(vgg.vgg, depth=depth, norm=False), 224, 32) for depth in vgg.STAGES},
    **{f"vgg{depth}_bn": Model(partial(vgg.vgg, depth=depth, norm=True), 224, 32) for depth in vgg.STAGES},
    **{f"resnet{d}": Model(partial(resnet.imagenet, blocks=b, unit=u), 224) for d, (u, b) in resnet.IMAGENET.items()},
    **{f"resnet{depth}": Model(partial(resnet.cifar, depth=depth), 32) for depth in resnet.CIFAR},
}


def available() -> list[str]:
    """Names that ``build`` knows, sorted. "resnet" is the one of any depth, which needs ``blocks``."""
    return sorted([*MODELS, "resnet"])


def build(
    name: str,
    *,
    batch: int,
    image_size: int | None = None,
    in_channels: int = 3,
    classes: int = 1000,
    blocks: Sequence[int] | None = None,
) -> Graph:
    """Build a net, with its loss, for batches of (batch, image_size, image_size, in_channels).

    ``image_size`` None is the size the net was made for. ``blocks``: bottleneck units in each stage, for "resnet" only:
    (3, 4, 6, 3) is ResNet-50, (6, 32, 790, 6) has 2,504 layers. There is no adaptive pooling: at another image size the
    first linear layer of VGG, AlexNet, LeNet and cifar-quick follows the map.

    Raises:
        UserError: unknown name (with the nearest), missing or idle ``blocks``, an image or another number too small.
    """
    if name != "resnet" and name not in MODELS:
        raise UserError(f"unknown model {name!r}; {nearest(name, available())}")
    if (name == "resnet") != (blocks is not None):
        raise UserError(
            f"{name} has a depth of its own; blocks={blocks!r} goes with the model 'resnet' only"
            if blocks is not None
            else "resnet needs blocks=, the number of bottleneck units of each stage, as (3, 4, 6, 3) for ResNet-50"
        )
    if blocks is not None and (not 1 <= len(blocks) <= 4 or min(blocks) < 1):
        raise UserError(f"blocks must be one to four numbers of units, each at least 1; got {tuple(blocks)}")
    model = (
        MODELS[name] if blocks is None else Model(partial(resnet.imagenet, blocks=blocks, unit=resnet.bottleneck), 224)
    )
    size = model.image_size if image_size is None else image_size
    for what, value, least in (("batch", batch, 1), ("in_channels", in_channels, 1), ("classes", classes, 2)):
        if value < least:
            raise UserError(f"{name}: {what} must be at least {least}, not {value}")
    if size < model.smallest:
        raise UserError(
            f"{name} needs images of at least {model.smallest} x {model.smallest} pixels, not {size} x {size}"
        )
    g = Graph()
    x, y = g.input((batch, size, size, in_channels)), g.label((batch,))
    g.softmax_cross_entropy(model.body(g, x, classes), y)
    return g
