"""Launching our own CUDA kernels: sources compiled on demand, arguments packed once, a launch of few microseconds after.

A kernel function of the CUDA backend takes a ``Launcher`` (a stream and what goes with it) and the operands of
``minidnn.kernels.base``, and returns a ``Work``: calling that enqueues the kernel again and again on the same addresses.
Nothing here allocates device memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from minidnn.kernels.base import Array
from minidnn.kernels.cuda_blocks import (
    FINAL_CHANNELS,
    FINAL_LANES,
    LONGEST_GRID,
    ROW_BLOCKS,
    THREADS,
    block_shape,
    flat_blocks,
    reduction_shape,
)
from minidnn.spec import ITEM_BYTES

Work = Callable[[], None]

SOURCES = Path(__file__).with_name("cuda")
PACK_BYTES = 16  # of one access
WITHOUT_SCRATCH = frozenset(
    (
        "adam_update",
        "adapt_scale",
        "add_forward",
        "check_finite",
        "convert",
        "relu_backward",
        "sgd_momentum_update",
        "sgd_update",
    )
)
"""Kernels that use neither the scratch nor cuDNN: they may run on a stream that has none, beside ``compute``."""
KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}
C_TYPES = {
    "float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "float64": "double",
    "uint8": "unsigned char", "int32": "int", "int64": "long long",
}  # fmt: skip


class Access(NamedTuple):
    """Elements that a thread handles at once, and whether it must move them one by one."""

    width: int
    narrow: bool = False


SINGLE = Access(1)


class Library:
    """The compiled sources of one device. CuPy keeps the binaries on disk, so only a first run ever waits for them."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._modules: dict[tuple[str, tuple[str, ...]], Any] = {}

    def function(self, source: str, name: str, dtype: str, by: Access, options: tuple[str, ...] = ()) -> int:
        """The address of a kernel of ``cuda/<source>.cu`` for an element type and an access, compiled at first use."""
        narrow = ("-DNARROW",) if by.narrow else ()
        flags = ("-std=c++17", f"-DKIND={KINDS[dtype]}", f"-DWIDTH={by.width}", *narrow, *options)
        key = (source, flags)
        if key not in self._modules:
            code = "\n".join((SOURCES / part).read_text(encoding="utf-8") for part in ("common.cuh", f"{source}.cu"))
            self._modules[key] = self._cupy.RawModule(code=code, options=flags)
        return int(self._modules[key].get_function(name).kernel.ptr)


class Launch:
    """One kernel on fixed operands. Holds the packed arguments, not the arrays: their owner keeps those alive."""

    __slots__ = ("_arguments", "_call")

    def __init__(
        self, launch: Callable[..., None], function: int, grid: Sequence[int], block: Sequence[int], stream: int,
        arguments: Sequence[Any],
    ) -> None:  # fmt: skip
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        self._arguments = (pointers, tuple(arguments))
        self._call = partial(launch, function, *grid, *block, 0, stream, ctypes.addressof(pointers), 0)

    def __call__(self) -> None:
        self._call()


class Sequential:
    """Several works, one after the other on their stream."""

    __slots__ = ("_works",)

    def __init__(self, *works: Work) -> None:
        self._works = works

    def __call__(self) -> None:
        for work in self._works:
            work()


class Launcher:
    """A stream, with what kernels on it need: the compiled sources, scratch of ``SCRATCH_BYTES`` at ``scratch``, cuDNN.

    Works of one launcher share its scratch: they must run on its stream, one after the other.
    """

    def __init__(self, library: Library, launch: Callable[..., None], stream: int, scratch: int, cudnn: Any) -> None:
        self.library = library
        self.stream = stream
        self.scratch = scratch
        self.cudnn = cudnn
        self._launch = launch

    def launch(
        self, source: str, name: str, dtype: str, by: Access, grid: Sequence[int], block: Sequence[int],
        arguments: Sequence[Any], options: tuple[str, ...] = (),
    ) -> Work:  # fmt: skip
        """Bind a kernel. ``arguments``: ctypes values, and arrays, which are passed as their addresses."""
        function = self.library.function(source, name, dtype, by, options)
        return Launch(
            self._launch, function, _three(grid), _three(block), self.stream, [_argument(a) for a in arguments]
        )

    def flat(
        self, source: str, name: str, out: Array, pointers: Sequence[Array], values: Sequence[Any] = (), *,
        dtype: str = "", by: Access | None = None, options: tuple[str, ...] = (),
    ) -> Work:  # fmt: skip
        """Bind an element-wise kernel ``name(*pointers, size, *values)``: one pack a thread."""
        dtype, by = dtype or str(out.dtype), by or access(*pointers)
        size = int(out.size)
        arguments = [*pointers, int64(size), *values]
        return self.launch(source, name, dtype, by, (flat_blocks(size, by.width),), (THREADS,), arguments, options)

    def rows(self, source: str, name: str, x: Array, arguments: Sequence[Any], by: Access) -> Work:
        """Bind a kernel that walks x as rows x channels (``Rows`` in common.cuh), as many blocks as keep a GPU full."""
        return self.walk(source, name, *rows_of(x), str(x.dtype), arguments, by)

    def walk(
        self, source: str, name: str, rows: int, channels: int, dtype: str, arguments: Sequence[Any], by: Access
    ) -> Work:
        """As ``rows``, of a tensor that is known by its address."""
        columns, lanes = block_shape(channels, by.width)
        across = -(-channels // (columns * by.width))
        down = min(-(-rows // (2 * lanes)), max(1, ROW_BLOCKS // across), LONGEST_GRID)
        return self.launch(source, name, dtype, by, (across, down), (columns, lanes), arguments)

    def reduction(
        self, source: str, names: tuple[str, str], values: int, rows: int, channels: int, dtype: str, by: Access,
        partial_arguments: Sequence[Any], final_arguments: Callable[[int, int], Sequence[Any]], final_source: str = "",
    ) -> Work:  # fmt: skip
        """Bind a sum over rows of ``values`` numbers a channel, in two stages through the scratch.

        The first kernel is called as ``(scratch, *partial_arguments)``, the second, of ``final_source`` where that is another
        one, with ``final_arguments(blocks, lanes)``.
        How the rows are cut depends on the shape alone, so the bits do, too. Raises UserError where the partial sums
        of one block alone exceed the scratch.
        """
        columns, lanes, blocks = reduction_shape(rows, channels, values, by.width)
        across = -(-channels // (columns * by.width))
        arguments = [ctypes.c_void_p(self.scratch), *partial_arguments]
        first = self.launch(source, names[0], dtype, by, (across, blocks), (columns, lanes), arguments)
        grid, block = (-(-channels // FINAL_CHANNELS),), (FINAL_CHANNELS, FINAL_LANES)
        second = self.launch(final_source or source, names[1], dtype, by, grid, block, final_arguments(blocks, lanes))
        return Sequential(first, second)


def _three(extents: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*extents, 1, 1)[:3]
    return x, y, z


def _argument(value: Any) -> Any:
    pointer = getattr(getattr(value, "data", None), "ptr", None)
    return value if pointer is None else ctypes.c_void_p(pointer)


def int64(value: int) -> Any:
    """A 64-bit argument."""
    return ctypes.c_longlong(value)


def int32(value: int) -> Any:
    """A 32-bit argument."""
    return ctypes.c_int(value)


def float32(value: float) -> Any:
    """A single-precision argument."""
    return ctypes.c_float(value)


def float64(value: float) -> Any:
    """A double-precision argument."""
    return ctypes.c_double(value)


def structure(*values: int) -> Any:
    """A struct of 32-bit integers, passed by value."""
    return (ctypes.c_int * len(values))(*values)


def rows_of(x: Array) -> tuple[int, int]:
    """(rows, channels) of a tensor."""
    channels = int(x.shape[-1])
    return int(x.size) // channels, channels


def access(*arrays: Array, extents: Sequence[int] = ()) -> Access:
    """How a kernel reaches arrays: in packs of 16 bytes of the first, which has the widest type, where the extents allow it.

    An address that is not aligned costs time only: the thread handles the same elements, so the bits stay.
    """
    width = PACK_BYTES // int(arrays[0].dtype.itemsize)
    if any(extent % width for extent in extents):
        return SINGLE
    return Access(width, any(array.data.ptr % (width * int(array.dtype.itemsize)) for array in arrays))


def access_at(dtype: str, addresses: Sequence[int], channels: int) -> Access:
    """As ``access``, of tensors of one type that are known by their addresses, in packs over the channels."""
    width = PACK_BYTES // ITEM_BYTES[dtype]
    return SINGLE if channels % width else Access(width, any(address % PACK_BYTES for address in addresses))


def aligned(tensors: tuple[Array, ...], vectors: tuple[Array, ...], channels: int) -> Access:
    """How a kernel reaches tensors, together with as many elements of vectors over the channels."""
    by = access(*tensors, extents=(channels,))
    odd = any(vector.data.ptr % (by.width * int(vector.dtype.itemsize)) for vector in vectors)
    return by._replace(narrow=by.narrow or odd)
