"""VGG-16, ResNet-18 and AlexNet in plain ``torch.nn``, under the parameter names that torchvision gives them.

Without dropout (an ``Identity`` holds its place in the numbering), and without adaptive pooling before the classifier.
Layers are recorded by forward hooks under the names of our graph's nodes.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.golden import rule


class GlobalAverage(nn.Module):
    """(N, C, H, W) -> (N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class Residual(nn.Module):
    """Two 3 x 3 convolutions with batch norm, a shortcut, ReLU."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        total: Tensor = self.relu(y + (x if self.downsample is None else self.downsample(x)))
        return total


def _classifier(dropout_first: bool, inputs: int) -> nn.Sequential:
    linear1, linear2 = nn.Linear(inputs, 4096), nn.Linear(4096, 4096)
    last = nn.Linear(4096, rule.CLASSES)
    if dropout_first:
        return nn.Sequential(nn.Identity(), linear1, nn.ReLU(), nn.Identity(), linear2, nn.ReLU(), last)
    return nn.Sequential(linear1, nn.ReLU(), nn.Identity(), linear2, nn.ReLU(), nn.Identity(), last)


def _features_and_classifier(features: Sequence[nn.Module], image_size: int, dropout_first: bool) -> nn.Module:
    stack = nn.Sequential(*features)
    with torch.no_grad():
        columns = stack(torch.zeros(1, rule.CHANNELS, image_size, image_size)).numel()
    layers = {"features": stack, "flatten": nn.Flatten(), "classifier": _classifier(dropout_first, columns)}
    return nn.Sequential(OrderedDict(layers))


def vgg16(image_size: int) -> nn.Module:
    """Configuration D of Simonyan & Zisserman 2015."""
    layers: list[nn.Module] = []
    channels = rule.CHANNELS
    for count, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return _features_and_classifier(layers, image_size, dropout_first=False)


def alexnet(image_size: int) -> nn.Module:
    """One column, as Krizhevsky 2014."""
    layers = [
        nn.Conv2d(rule.CHANNELS, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
    ]  # fmt: skip
    return _features_and_classifier(layers, image_size, dropout_first=True)


def resnet18(image_size: int) -> nn.Module:
    """He et al. 2016, two units a stage."""
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(rule.CHANNELS, 64, 7, 2, 3, bias=False),
        "bn1": nn.BatchNorm2d(64),
        "relu": nn.ReLU(),
        "maxpool": nn.MaxPool2d(3, 2, 1),
    }
    channels = 64
    for stage, width in enumerate((64, 128, 256, 512), 1):
        units = [Residual(channels, width, 2 if stage > 1 else 1), Residual(width, width, 1)]
        layers[f"layer{stage}"] = nn.Sequential(*units)
        channels = width
    return nn.Sequential(OrderedDict({**layers, "avgpool": GlobalAverage(), "fc": nn.Linear(channels, rule.CLASSES)}))


BUILDERS = {"vgg16": vgg16, "resnet18": resnet18, "alexnet": alexnet}


def build(case: rule.Case, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A net in train mode, on the CPU."""
    return BUILDERS[case.model](case.image_size).to(dtype)


def set_parameters(model: nn.Module, seed: int) -> None:
    """Give every parameter and running statistic its value by the rule."""
    own = model.state_dict()
    state = {name: torch.from_numpy(rule.parameter(seed, name, value.shape)) for name, value in own.items()}
    model.load_state_dict({name: value.to(own[name].dtype) for name, value in state.items()})


def images(x: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    """A batch (N, H, W, C) as PyTorch wants it."""
    return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2))).to(dtype)


def record(model: nn.Module, outputs: dict[str, Tensor]) -> None:
    """Keep every layer's output from now on, the second of a module that is called twice under ``<name>_1``."""
    calls: Counter[str] = Counter()

    def hook(name: str) -> Any:
        def keep(module: nn.Module, _: Any, output: Tensor) -> None:
            outputs[f"{name}_{calls[name]}" if calls[name] else name] = output.detach()
            calls[name] += 1

        return keep

    for name, module in model.named_modules():
        if not list(module.children()) and not isinstance(module, nn.Identity | nn.Flatten):
            module.register_forward_hook(hook(name))


class Margin:
    """How far a forward pass stays from the kinks of ReLU and of max pooling, relative to each tensor's own size.

    Nearer than the rounding of float32, and a gradient in float32 would rightly differ from the one in float64.
    """

    def __init__(self, model: nn.Module) -> None:
        self.smallest = math.inf
        for module in model.modules():
            if isinstance(module, nn.ReLU | nn.MaxPool2d):
                module.register_forward_hook(self._look)

    def _look(self, module: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        x = inputs[0].detach()
        if isinstance(module, nn.ReLU):
            gap = x.abs().min()
        else:
            assert isinstance(module, nn.MaxPool2d)
            kernel, stride, pad = module.kernel_size, module.stride, module.padding
            assert isinstance(kernel, int) and isinstance(stride, int) and isinstance(pad, int)
            windows = functional.pad(x, (pad,) * 4, value=-math.inf)
            for axis in (2, 3):
                windows = windows.unfold(axis, kernel, stride)
            first, second = windows.flatten(4).topk(2).values.unbind(-1)
            gap = (first - second)[first > 0].min()  # among zeros any choice gives the same gradient, none
        self.smallest = min(self.smallest, float(gap / x.square().mean().sqrt()))
