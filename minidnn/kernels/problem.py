"""What a library is asked to compute: a direction of a convolution or a matrix product, with the numbers of their operands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from minidnn.kernels.base import Pair
from minidnn.schedule.recipe import Engine

Shape = tuple[int, ...]

IMAGE, FILTER, OUTPUT, BIAS = 1, 2, 3, 4  # operands of a convolution, whichever of them is the result
LEFT, RIGHT, PRODUCT = 1, 2, 3
OWN_ENGINE, FIRST, BLAS_ENGINE = -1, -2, -3
"""In place of the number of cuDNN's engine: our own kernel; the first that its heuristics name and that builds under the
option "limit"; cuBLAS."""
OWN = Engine("direct", 0, (("engine", OWN_ENGINE),))  # our own kernel: slower, without workspace, and never refused
SPLIT = "split"  # option of a forward engine for forward_relu: bias and ReLU are a kernel of their own, after it
FOLDED = "folded"  # option of cuDNN's engines: the window's columns are so many channels, those added being zero
TURNED = "turned"  # option of cuDNN's engines: a forward convolution is computed as the gradient of another one's image
PART = "part"  # option of cuDNN's engines: a call takes so many images, and there are as many calls as it needs
OURS = (SPLIT, FOLDED, TURNED, PART)


class Convolution(NamedTuple):
    """One direction of a convolution: "forward", "backward_data" or "backward_weight". Shapes as in ``kernels.base``.

    "forward_relu" is forward with bias and ReLU before the store.
    """

    direction: str
    x: Shape
    y: Shape
    weight: Shape
    stride: Pair
    padding: Pair
    dilation: Pair
    dtype: str


class Product(NamedTuple):
    """A matrix product c = a @ b, c (rows, columns) contiguous, a and b given by their strides in elements."""

    rows: int
    columns: int
    depth: int
    a_row: int
    a_depth: int
    b_depth: int
    b_column: int
    dtype: str

    @property
    def direction(self) -> str:
        """As of a convolution, where both are handled alike."""
        return "product"


Problem = Convolution | Product


def linear_product(direction: str, samples: int, inputs: int, outputs: int, dtype: str) -> Product:
    """The product that is a direction of a Linear of ``inputs`` to ``outputs`` features."""
    n, c, k = samples, inputs, outputs
    return {
        "forward": Product(n, k, c, c, 1, 1, c, dtype),  # y = x @ weight.T
        "backward_data": Product(n, c, k, k, 1, c, 1, dtype),  # dx = dy @ weight
        "backward_weight": Product(k, c, n, 1, k, c, 1, dtype),  # d_weight = dy.T @ x
    }[direction]


def operand_shapes(problem: Problem) -> dict[int, Shape]:
    """The shape of every operand, by its number."""
    if isinstance(problem, Product):
        rows, columns, depth = problem[:3]
        return {LEFT: (rows, depth), RIGHT: (depth, columns), PRODUCT: (rows, columns)}
    shapes = {IMAGE: problem.x, FILTER: problem.weight, OUTPUT: problem.y}
    return shapes | {BIAS: (1, 1, 1, problem.y[3])} if problem.direction == "forward_relu" else shapes


def folded(problem: Problem, channels: int) -> Convolution:
    """A convolution with the columns of its window as channels: of a window of one column, at the outputs' places in a row."""
    assert isinstance(problem, Convolution)
    n, h, _, _ = problem.x
    return problem._replace(
        x=(n, h, problem.y[2], channels),
        weight=(*problem.weight[:2], 1, channels),
        stride=(problem.stride[0], 1),
        padding=(problem.padding[0], 0),
        dilation=(problem.dilation[0], 1),
    )


def turned(problem: Problem) -> Convolution:
    """The direction "backward_data" of a convolution that is a forward convolution of stride one.

    Its image is the output here, and its filter the one here turned by half a circle, with inputs and outputs exchanged.
    """
    assert isinstance(problem, Convolution) and problem.direction == "forward" and problem.stride == (1, 1)
    outputs, height, width, inputs = problem.weight
    (pad_h, pad_w), (dilation_h, dilation_w) = problem.padding, problem.dilation
    return problem._replace(
        direction="backward_data",
        x=problem.y,
        y=problem.x,
        weight=(inputs, height, width, outputs),
        padding=(dilation_h * (height - 1) - pad_h, dilation_w * (width - 1) - pad_w),
    )


def part(problem: Problem, images: int) -> Convolution:
    """A convolution of the first images alone."""
    assert isinstance(problem, Convolution)
    return problem._replace(x=(images, *problem.x[1:]), y=(images, *problem.y[1:]))


def asked(problem: Problem, options: Mapping[str, int]) -> tuple[Problem, tuple[tuple[str, int], ...]]:
    """What cuDNN itself is asked where an engine's options split, fold, turn or part a problem, and those that are cuDNN's."""
    if SPLIT in options:
        assert isinstance(problem, Convolution)
        problem = problem._replace(direction="forward")
    if FOLDED in options:
        problem = folded(problem, options[FOLDED])
    if TURNED in options:
        problem = turned(problem)
    if PART in options:
        problem = part(problem, options[PART])
    return problem, tuple(sorted((name, value) for name, value in options.items() if name not in OURS))


def result_of(problem: Problem) -> int:
    """The number of the operand that is computed."""
    if isinstance(problem, Product):
        return PRODUCT
    return {"backward_data": IMAGE, "backward_weight": FILTER}.get(problem.direction, OUTPUT)


def own(problem: Problem) -> Engine:
    """Our own kernels for a problem, without cuDNN."""
    return split(OWN) if problem.direction == "forward_relu" else OWN


def split(engine: Engine) -> Engine:
    """A forward engine, as one of forward_relu that is followed by our own kernel for bias and ReLU."""
    return engine._replace(name=f"{engine.name}, split", options=also(engine.options, SPLIT, 1))


def also(options: Iterable[tuple[str, int]], name: str, value: int) -> tuple[tuple[str, int], ...]:
    """Options of an engine with one more, in the order of a recipe."""
    return tuple(sorted({**dict(options), name: value}.items()))
