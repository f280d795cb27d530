"""A reader for the pickles of CIFAR that cannot run code.

A pickle may name any function of any module and have it called. The CIFAR files need three names of NumPy's (and one of
Python's when written by Python 3); each gets a stand-in that builds nothing but arrays of unsigned bytes. Not even
NumPy's own functions are used: an object array rebuilt by them from a forged type would follow addresses in the file.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidnn.errors import UserError


class _Dtype:
    """Stands for ``numpy.dtype``: only unsigned bytes."""

    def __init__(self, code: object, *flags: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"it holds an array of {code!r}, not of unsigned bytes (u1)")

    def __setstate__(self, state: object) -> None:
        """Byte order, field names and flags: nothing that single bytes need."""


class _Array:
    """Stands for ``numpy.ndarray``; the state fills ``values``."""

    values: NDArray[np.uint8]

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, shape, dtype, fortran_order, content = state
        if not isinstance(dtype, _Dtype) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("it holds an array that is not of unsigned bytes")
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran_order else "C")


def _reconstruct(kind: object, shape: object, code: object) -> _Array:
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes at protocol 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct":
                return _reconstruct
            case "numpy", "ndarray":
                return _Array
            case "numpy", "dtype":
                return _Dtype
            case "_codecs", "encode":
                return _encode
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")


def load_arrays(content: bytes, where: object) -> dict[str, object]:
    """The dictionary in a pickle, keys as text, arrays uint8; anything else is a ``UserError`` naming ``where``."""
    try:
        loaded = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(loaded, dict):
            raise pickle.UnpicklingError(f"it holds a {type(loaded).__name__}, not a dictionary")
        return {
            key.decode("latin1") if isinstance(key, bytes) else key: value.values if type(value) is _Array else value
            for key, value in loaded.items()
        }
    except Exception as error:  # damaged bytes can raise nearly anything, from IndexError to MemoryError
        raise UserError(
            f"{where} is not a CIFAR batch that can be read safely: {str(error) or type(error).__name__}; "
            "use the files of the official archive."
        ) from error
