"""One set of kernel tests for every backend: a backend is its module of kernels and the way to and from its memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest


class Backend(NamedTuple):
    name: str
    kernels: ModuleType
    to_device: Callable[[Any], Any]
    to_host: Callable[[Any], Any]


@pytest.fixture(params=["numpy", pytest.param("cuda", marks=pytest.mark.gpu)], scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "numpy":
        module = importlib.import_module("minidnn.kernels.numpy_kernels")
        return Backend("numpy", module, np.array, np.array)
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed: pip install minidnn-layup[cuda12]")
    if not cupy.cuda.is_available():
        pytest.skip("no usable CUDA device")
    module = importlib.import_module("minidnn.kernels.cuda_kernels")
    return Backend("cuda", module, cupy.array, cupy.asnumpy)


@pytest.fixture
def kernels(backend: Backend) -> ModuleType:
    return backend.kernels


@pytest.fixture
def to_device(backend: Backend) -> Callable[[Any], Any]:
    return backend.to_device


@pytest.fixture
def to_host(backend: Backend) -> Callable[[Any], Any]:
    return backend.to_host


@pytest.fixture(params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest, backend: Backend) -> Any:
    """float64 is for gradient checks, on NumPy only."""
    if request.param == "float64" and backend.name != "numpy":
        pytest.skip("float64 is for gradient checks on the emulated device")
    return np.dtype(request.param)
