"""How the host fills parameters before training: a rule by name, and a random stream by (seed, parameter name)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

from minidnn.errors import UserError, nearest
from minidnn.graph import Parameter

RULES = (
    "kaiming_normal_fan_out",
    "uniform_fan_in",
    "normal_<std>",
    "uniform:<bound>",
    "constant:<value>",
    "zeros",
    "ones",
    "zeros_int",
)


def bias_init(weight_init: str, weight_shape: Sequence[int]) -> str:
    """The rule of the bias beside a weight: U(-b, b), b = 1 / sqrt(fan_in), beside PyTorch's default, else zeros."""
    return f"uniform:{1 / math.sqrt(math.prod(weight_shape[1:]))!r}" if weight_init == "uniform_fan_in" else "zeros"


def parameter_generator(seed: int, name: str) -> np.random.Generator:
    """The random stream of one parameter: the same on every machine and rank, whatever else the graph holds."""
    if seed < 0:
        raise UserError(f"a seed is a non-negative integer, not {seed}")
    digest = hashlib.sha256(name.encode()).digest()  # never hash(): it is salted for each process
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, int.from_bytes(digest[:8], "little")))))


def initialise(parameter: Parameter, rng: np.random.Generator, dtype: DTypeLike) -> NDArray[np.generic]:
    """Make the initial array of a parameter. Draws in float32, so that all precisions start from the same numbers.

    ========================  ========================================================================================
    kaiming_normal_fan_out    N(0, 2 / (K R S)): He et al. 2015; torchvision's for the convolutions of ResNet and VGG
    uniform_fan_in            U(-b, b), b = 1 / sqrt(fan_in): PyTorch's default for convolution and linear weights
    normal_<std>              N(0, std^2), as "normal_0.01": torchvision's for the classifier of VGG
    uniform:<bound>           U(-bound, bound): the bias beside a ``uniform_fan_in`` weight, whose fan_in it cannot see
    constant:<value>          and its special cases zeros, ones, zeros_int (a counter)
    ========================  ========================================================================================

    Raises:
        UserError: the rule is unknown.
    """
    shape, init = parameter.shape, parameter.init
    if init == "zeros_int":
        return np.zeros(shape, np.int64)
    if init in ("zeros", "ones"):
        return np.full(shape, float(init == "ones"), dtype)
    if init == "kaiming_normal_fan_out":
        return _normal(shape, math.sqrt(2 / (shape[0] * math.prod(shape[1:-1]))), rng, dtype)
    if init == "uniform_fan_in":
        return _uniform(shape, 1 / math.sqrt(math.prod(shape[1:])), rng, dtype)
    rule, _, text = init.replace("normal_", "normal:", 1).partition(":")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isfinite(value):
        if rule == "normal":
            return _normal(shape, value, rng, dtype)
        if rule == "uniform":
            return _uniform(shape, value, rng, dtype)
        if rule == "constant":
            return np.full(shape, value, dtype)
    raise UserError(f"unknown initialisation {init!r} of {parameter.name}; {nearest(init, RULES)}")


def _normal(shape: tuple[int, ...], std: float, rng: np.random.Generator, dtype: DTypeLike) -> NDArray[np.generic]:
    values = rng.standard_normal(shape, dtype=np.float32)
    values *= np.float32(std)
    return values.astype(dtype, copy=False)


def _uniform(shape: tuple[int, ...], bound: float, rng: np.random.Generator, dtype: DTypeLike) -> NDArray[np.generic]:
    values = rng.random(shape, dtype=np.float32)
    values *= np.float32(2 * bound)
    values -= np.float32(bound)
    return values.astype(dtype, copy=False)
