"""Convolution: all directions against the definition, and what the choice of an engine may and may not change."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import tests.backend.reference as ref
from tests.backend.test_kernels import close, poison, same_bits

Array = Any
DIRECTIONS = ("forward", "backward_data", "backward_weight")


class Convolution(NamedTuple):
    x: tuple[int, int, int, int]
    channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def y(self) -> tuple[int, ...]:
        sides = zip(self.x[1:3], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return (self.x[0], *((e + 2 * p - d * (k - 1) - 1) // s + 1 for e, k, s, p, d in sides), self.channels)

    @property
    def weight(self) -> tuple[int, ...]:
        return (self.channels, *self.kernel, self.x[3] // self.groups)

    @property
    def attrs(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}

    def arrays(self, dtype: Any) -> tuple[Array, ...]:
        """x, weight, dy and bias."""
        random = np.random.default_rng(0)
        shapes = (self.x, self.weight, self.y, (self.channels,))
        return tuple(random.standard_normal(shape).astype(dtype) for shape in shapes)

    def engine(self, backend: Any, direction: str, dtype: Any, limit: int | None = None) -> Any:
        shapes = (self.x, self.y, self.weight, self.stride, self.padding, self.dilation, self.groups)
        return backend.kernels.select_engine(direction, *shapes, np.dtype(dtype).itemsize, limit)


CONVOLUTIONS = {
    "3x3": Convolution((3, 7, 13, 5), 6, (3, 3), padding=(1, 1)),
    "from colours": Convolution((2, 13, 7, 3), 4, (3, 3), padding=(1, 1)),
    "5x3 unpadded": Convolution((2, 7, 13, 3), 5, (5, 3)),
    "1x1": Convolution((3, 7, 13, 5), 7, (1, 1)),
    "1x1 stride 2": Convolution((3, 7, 13, 5), 7, (1, 1), (2, 2)),
    "1x1 grouped": Convolution((3, 7, 5, 6), 4, (1, 1), groups=2),
    "1x1 padded": Convolution((2, 4, 3, 3), 2, (1, 1), padding=(1, 2)),
    "3x3 stride 2": Convolution((2, 13, 7, 3), 5, (3, 3), (2, 2), (1, 1)),
    "even input stride 2": Convolution((2, 8, 8, 3), 5, (3, 3), (2, 2), (1, 1)),
    "11x11 stride 4": Convolution((1, 23, 27, 3), 4, (11, 11), (4, 4), (2, 2)),
    "stride beyond kernel": Convolution((2, 13, 11, 3), 4, (2, 1), (3, 4), (0, 1)),
    "dilated": Convolution((2, 13, 9, 3), 5, (3, 3), padding=(2, 2), dilation=(2, 2)),
    "dilated stride": Convolution((2, 13, 17, 4), 6, (3, 4), (2, 4), (3, 1), (2, 3), groups=2),
    "same factor": Convolution((2, 14, 13, 3), 5, (3, 3), (4, 2), (1, 2), (2, 4)),
    "grouped": Convolution((3, 7, 13, 6), 9, (3, 3), padding=(1, 1), groups=3),
    "depthwise": Convolution((2, 7, 7, 5), 10, (3, 3), (2, 1), (1, 1), groups=5),
    "wide padding": Convolution((2, 3, 2, 3), 4, (3, 3), (1, 2), (4, 3)),
    "as large as the image": Convolution((5, 7, 5, 3), 8, (7, 5)),
    "one channel to one": Convolution((2, 9, 7, 1), 1, (3, 3), padding=(1, 1)),
    "taps that miss": Convolution((2, 1, 5, 2), 3, (2, 2), (2, 2), (1, 0), (2, 1)),
}  # fmt: skip
CHUNKED = Convolution((7, 13, 9, 3), 8, (3, 3), (2, 1), (1, 1), groups=1)
BANDED = Convolution((2, 20, 21, 160), 3, (3, 3), padding=(1, 1))  # columns of one image exceed a tile: bands of rows


def run(backend: Any, convolution: Convolution, direction: str, arrays: tuple[Array, ...], *, images: int | None = None,
        accumulate: Array | None = None, limit: int | None = None, bias: bool = False) -> Array:  # fmt: skip
    """The result of a direction into poison, with a scratch of exactly the bytes asked for and canaries around it."""
    x, weight, dy, vector = (backend.to_device(a) for a in arrays)
    engine = convolution.engine(backend, direction, x.dtype, limit)
    options = dict(engine.options)
    if images is not None:
        options["images"] = images
    nbytes = engine.workspace_bytes if images is None else 8 << 20
    memory = backend.to_device(np.full(nbytes + 512, 255, np.uint8))
    attrs = {**convolution.attrs, **options, "scratch": memory[256 : 256 + nbytes] if nbytes else None}
    if direction == "forward":
        out = backend.to_device(poison(arrays[2]))
        backend.kernels.conv2d_forward(out, x, weight, vector if bias else None, **attrs)
    elif direction == "forward_relu":
        out = backend.to_device(poison(arrays[2]))
        backend.kernels.conv2d_relu_forward(out, x, weight, vector, **attrs)
    elif direction == "backward_data":
        out = backend.to_device(poison(arrays[0]))
        backend.kernels.conv2d_backward_data(out, dy, weight, **attrs)
    else:
        out = backend.to_device(poison(arrays[1]) if accumulate is None else accumulate)
        backend.kernels.conv2d_backward_weight(out, x, dy, accumulate=accumulate is not None, **attrs)
    host = backend.to_host(memory)
    assert (host[:256] == 255).all() and (host[256 + nbytes :] == 255).all(), "scratch was left"
    return backend.to_host(out)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_direction_computes_its_definition(backend: Any, dtype: Any, name: str) -> None:
    convolution = CONVOLUTIONS[name]
    arrays = convolution.arrays(dtype)
    x, weight, dy, bias = (a.astype(float) for a in arrays)
    y, dx, d_weight = ref.conv2d(x, weight, dy, bias, **convolution.attrs)
    close(run(backend, convolution, "forward", arrays, bias=True), y, dtype, 4.0)
    close(run(backend, convolution, "forward", arrays), y - bias, dtype, 4.0)
    close(run(backend, convolution, "forward_relu", arrays), np.maximum(y, 0), dtype, 4.0)
    close(run(backend, convolution, "backward_data", arrays), dx, dtype, 4.0)
    close(run(backend, convolution, "backward_weight", arrays), d_weight, dtype, 4.0)


@pytest.mark.parametrize("convolution", [CHUNKED, BANDED, CONVOLUTIONS["1x1"]], ids=["chunks", "bands", "direct"])
def test_weight_gradient_adds_to_what_is_there(backend: Any, dtype: Any, convolution: Convolution) -> None:
    arrays = convolution.arrays(dtype)
    x, weight, dy, bias = (a.astype(float) for a in arrays)
    expected = weight + ref.conv2d(x, weight, dy, bias, **convolution.attrs)[2]
    close(run(backend, convolution, "backward_weight", arrays, accumulate=arrays[1]), expected, dtype, 20.0)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_chunks_change_roundings_only_and_repeat_to_the_bit(backend: Any, direction: str) -> None:
    if backend.name != "numpy":
        pytest.skip("the size of a chunk is an option of the NumPy engine")
    for convolution in (CHUNKED, BANDED):
        arrays = convolution.arrays(np.float32)
        whole = run(backend, convolution, direction, arrays, images=convolution.x[0])
        scale = float(np.abs(whole).max())
        for images in (1, 2, 100):
            part = run(backend, convolution, direction, arrays, images=images)
            np.testing.assert_allclose(part, whole, rtol=0, atol=1e-6 * scale)
            same_bits(run(backend, convolution, direction, arrays, images=images), part)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bits_of_a_convolution_do_not_depend_on_addresses(backend: Any, direction: str) -> None:
    if backend.name != "numpy":
        pytest.skip("device kernels get 512-byte aligned buffers")
    for name in ("3x3", "3x3 stride 2", "1x1", "grouped"):
        convolution = CONVOLUTIONS[name]
        arrays = convolution.arrays(np.float32)
        expected = run(backend, convolution, direction, arrays)
        for shift in (1, 3, 6):
            moved = tuple(
                np.concatenate([np.zeros(shift, a.dtype), a.reshape(-1)])[shift:].reshape(a.shape) for a in arrays
            )
            device = backend._replace(to_device=lambda a: a)
            same_bits(run(device, convolution, direction, moved), expected)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_engine_keeps_to_the_workspace_limit(backend: Any, direction: str) -> None:
    if backend.name != "numpy":
        pytest.skip("cuDNN's engines ask for what they ask for")
    convolution = Convolution((32, 16, 16, 8), 8, (3, 3), (2, 2) if direction == "backward_data" else (1, 1), (1, 1))
    free = convolution.engine(backend, direction, np.float32)
    assert dict(free.options)["images"] == 28 if direction != "backward_data" else True
    least = convolution.engine(backend, direction, np.float32, 0)
    assert dict(least.options) == {"images": 1} and least.workspace_bytes > 0
    for limit in (least.workspace_bytes, 2 * least.workspace_bytes + 512, free.workspace_bytes - 1):
        engine = convolution.engine(backend, direction, np.float32, limit)
        assert least.workspace_bytes <= engine.workspace_bytes <= limit
        assert engine == convolution.engine(backend, direction, np.float32, limit)
    arrays = convolution.arrays(np.float32)
    full, lean = (run(backend, convolution, direction, arrays, limit=limit) for limit in (None, 0))
    np.testing.assert_allclose(lean, full, rtol=0, atol=1e-6 * float(np.abs(full).max()))


def test_planned_workspace_has_no_byte_to_spare(backend: Any) -> None:
    """The engine neither asks for more than the kernel slices nor lets the kernel slice more than was planned."""
    if backend.name != "numpy":
        pytest.skip("cuDNN's engines ask for what they ask for")
    for name in ("3x3", "3x3 stride 2", "grouped", "dilated"):
        for direction in DIRECTIONS:
            engine = CONVOLUTIONS[name].engine(backend, direction, np.float32)
            short = backend._replace(kernels=Short(backend.kernels))
            with pytest.raises(AssertionError, match="bytes of scratch"):
                run(short, CONVOLUTIONS[name], direction, CONVOLUTIONS[name].arrays(np.float32))
            assert engine.workspace_bytes % 64 == 0


class Short:
    """Kernels whose engines promise 64 bytes too few."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    def select_engine(self, *args: Any) -> Any:
        engine = self.kernels.select_engine(*args)
        return engine._replace(workspace_bytes=engine.workspace_bytes - 64)


def test_1x1_convolution_needs_no_workspace(backend: Any) -> None:
    if backend.name != "numpy":
        pytest.skip("cuDNN's engines ask for what they ask for")
    for direction in DIRECTIONS:
        engine = CONVOLUTIONS["1x1"].engine(backend, direction, np.float32)
        assert (engine.name, engine.workspace_bytes) == ("direct", 0)


def test_unknown_direction_is_refused(backend: Any) -> None:
    if backend.name != "numpy":
        pytest.skip("a rule of the NumPy engine")
    with pytest.raises(ValueError, match="'sideways'"):
        CHUNKED.engine(backend, "sideways", np.float32)
