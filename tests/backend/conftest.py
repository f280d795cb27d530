"""One set of kernel tests for every backend: a backend is its module of kernels and the way to and from its memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from minidnn.kernels import numpy_kernels


class Backend(NamedTuple):
    name: str
    kernels: Any
    to_device: Callable[[Any], Any]
    to_host: Callable[[Any], Any]


GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "cuda without cuDNN")]


@pytest.fixture(params=["numpy", *GPU], scope="session")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "numpy":
        yield Backend("numpy", numpy_kernels, np.array, np.array)
        return
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed: pip install minidnn-layup[cuda12]")
    if not cupy.cuda.is_available():
        pytest.skip("no usable CUDA device")
    refuse = ("convolution", "matmul") if request.param != "cuda" else ()
    device = importlib.import_module("minidnn.device.cuda").CudaDevice(refuse=refuse)
    yield Backend(request.param, device.kernels, cupy.array, cupy.asnumpy)
    device.close()


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
