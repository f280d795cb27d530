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

INSTALL = "pip install 'minidnn-layup[cuda13]' (or [cuda12]), or use the device 'emulated'"


LEAST_CUDNN = 90000
LEAST_CAPABILITY = 70  # of cuDNN 9
LEAST_CAPABILITIES = {"bf16": 80, "tf32": 80}


def import_cupy() -> Any:
    """CuPy, or a UserError with the remedy."""
    try:
        import cupy
    except ImportError as error:
        if importlib.util.find_spec("cupy") is None:
            raise UserError(f"CUDA needs CuPy, which is not installed: {INSTALL}") from None
        raise UserError(f"CuPy is installed but cannot be loaded ({first_line(error)}); {INSTALL}") from None
    return cupy


def device_count(runtime: Any) -> int:
    """CUDA devices of this machine. Raises UserError where there is no driver, or one that is too old for this CuPy."""
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        driver, built = _cuda_versions(runtime)
        if driver and built and driver // 1000 < built // 1000:
            raise UserError(
                f"CuPy is built for CUDA {_version(built)} and the driver supports CUDA {_version(driver)}: pip uninstall "
                f"cupy-cuda{built // 1000}x, then pip install 'minidnn-layup[cuda{driver // 1000}]', or update the driver"
            ) from None
        raise UserError(f"no GPU can be used here ({first_line(error)}); {INSTALL}") from None


def _cuda_versions(runtime: Any) -> tuple[int, int]:
    """What the driver supports and what CuPy is built for, as 1000 * major + 10 * minor; 0 where it cannot be asked."""
    try:
        return int(runtime.driverGetVersion()), int(runtime.runtimeGetVersion())
    except runtime.CUDARuntimeError:
        return 0, 0


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def require_gpu(runtime: Any, index: int, precision: str = "fp32") -> dict[str, Any]:
    """The properties of a GPU that can be used. Raises UserError, one sentence, where there is none."""
    count = device_count(runtime)
    if not 0 <= index < count:
        raise UserError(f"device cuda:{index} does not exist, this machine has {count} CUDA devices; {INSTALL}")
    properties: dict[str, Any] = runtime.getDeviceProperties(index)
    capability = 10 * int(properties["major"]) + int(properties["minor"])
    least = LEAST_CAPABILITIES.get(precision, LEAST_CAPABILITY)
    if capability < LEAST_CAPABILITY or capability < least:
        what = "cuDNN 9" if capability < LEAST_CAPABILITY else f"precision {precision}"
        remedy = "the device 'emulated'" if capability < LEAST_CAPABILITY else "fp32 or fp16"
        raise UserError(
            f"{properties['name'].decode()} has compute capability {capability / 10}, and {what} needs {least / 10}; use {remedy}"
        )
    return properties


def describe_gpu(name: str) -> str:
    """The name and the free memory of the GPU ``"cuda:0"``. Raises UserError, one sentence, where it cannot be used.

    The GPU stays the current one of this thread: setting another back would leave a context on that.
    """
    index = parse_device(name)
    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    properties = require_gpu(runtime, index)
    if importlib.util.find_spec("cudnn") is None:
        raise UserError(f"CUDA needs the cuDNN frontend, which is not installed: {INSTALL}")
    cupy.cuda.Device(index).use()
    free, total = runtime.memGetInfo()
    return f"{properties['name'].decode()}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def open_cudnn(stream: int, precision: str, deterministic: bool, refuse: frozenset[str]) -> Cudnn:
    """cuDNN on a stream, after the libraries that it loads by name alone."""
    with contextlib.suppress(ImportError, RuntimeError):  # else the loader finds the libraries of the system
        pathfinder = importlib.import_module("cuda.pathfinder")
        for library in ("cudart", "nvrtc", "cublasLt"):  # cuDNN aborts the process where it cannot find these
            pathfinder.load_nvidia_dynamic_lib(library)
    try:
        opened = Cudnn(stream, precision, deterministic, refuse)
    except ImportError as error:
        if importlib.util.find_spec("cudnn") is None:
            raise UserError(f"CUDA needs the cuDNN frontend, which is not installed: {INSTALL}") from None
        raise UserError(f"the cuDNN frontend cannot be loaded ({first_line(error)}); {INSTALL}") from None
    except (RuntimeError, OSError, AttributeError) as error:  # the frontend is there, the library behind it is not
        raise UserError(f"cuDNN cannot be used ({first_line(error)}); {INSTALL}") from None
    version = opened.versions()["cudnn"]
    if int(version) < LEAST_CUDNN:
        opened.close()
        raise UserError(f"cuDNN {version} is too old, at least {LEAST_CUDNN} is needed: {INSTALL}")
    return opened


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
