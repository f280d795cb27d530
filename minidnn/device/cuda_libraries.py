"""Finding CuPy, the cuDNN frontend and the CUDA libraries behind them; one sentence with the remedy where they are missing."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
from typing import Any

import numpy as np

from minidnn.errors import UserError
from minidnn.kernels.cudnn import Cudnn

INSTALL = "pip install 'minidnn-layup[cuda13]' (or [cuda12]), or use device='emulated'"


def import_cupy() -> Any:
    """CuPy, or a UserError with the remedy."""
    try:
        import cupy
    except ImportError:
        raise UserError(f"CUDA needs CuPy, which is not installed: {INSTALL}") from None
    return cupy


def device_count(runtime: Any) -> int:
    """CUDA devices of this machine. Raises UserError where there is no driver."""
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise UserError(f"CUDA cannot be used here ({error}); {INSTALL}") from None


def describe_gpu(name: str) -> str:
    """The name and the free memory of the GPU ``"cuda:0"``. Raises UserError, one sentence, where it cannot be used."""
    index = parse_device(name)
    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    count = device_count(runtime)
    if index >= count:
        raise UserError(f"device {name} does not exist, this machine has {count} CUDA devices; {INSTALL}")
    if importlib.util.find_spec("cudnn") is None:
        raise UserError(f"CUDA needs the cuDNN frontend, which is not installed: {INSTALL}")
    properties = runtime.getDeviceProperties(index)
    with cupy.cuda.Device(index):
        free, total = runtime.memGetInfo()
    return f"{properties['name'].decode()}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def open_cudnn(stream: int, precision: str, deterministic: bool, refuse: frozenset[str]) -> Cudnn:
    """cuDNN on a stream, after the libraries that it loads by name alone."""
    with contextlib.suppress(ImportError, RuntimeError):  # else the loader finds the libraries of the system
        pathfinder = importlib.import_module("cuda.pathfinder")
        for library in ("cudart", "nvrtc", "cublasLt"):  # cuDNN aborts the process where it cannot find these
            pathfinder.load_nvidia_dynamic_lib(library)
    try:
        return Cudnn(stream, precision, deterministic, refuse)
    except ImportError:
        raise UserError(f"CUDA needs the cuDNN frontend, which is not installed: {INSTALL}") from None


def numpy_dtype(name: str) -> Any:
    """The element type of a TensorSpec. NumPy itself has no bfloat16."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        ml_dtypes = importlib.import_module("ml_dtypes")
    except ImportError:
        raise UserError("bf16 needs the package ml_dtypes: pip install ml_dtypes, or use another precision") from None
    return np.dtype(ml_dtypes.bfloat16)


def parse_device(text: str) -> int:
    """The number in ``"cuda:0"``; ``"cuda"`` is 0. Raises UserError otherwise."""
    match = re.fullmatch(r"cuda(?::(\d+))?", text)
    if match is None:
        raise UserError(f"device {text!r} is unknown; write cuda:0, or emulated")
    return int(match[1] or 0)
