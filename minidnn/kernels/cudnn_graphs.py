"""cuDNN's operation graphs: a direction of a convolution, or a matrix product, said in the words of its frontend.

A graph has exact shapes, strides and operand numbers, and no engine yet. Sums are in fp32, whatever the element type.
"""

from __future__ import annotations

from typing import Any

from minidnn.kernels.problem import (
    BIAS,
    FILTER,
    IMAGE,
    LEFT,
    OUTPUT,
    PRODUCT,
    RIGHT,
    Convolution,
    Problem,
    Product,
    Shape,
    operand_shapes,
    result_of,
)

ALIGNMENT = 16  # of every operand, as the graphs promise


class OperationGraphs:
    """Builds graphs with a frontend, the module ``cudnn``. Keeps none of them."""

    def __init__(self, cudnn: Any) -> None:
        self._cudnn = cudnn
        kind = cudnn.data_type
        self._types = {"float32": kind.FLOAT, "float16": kind.HALF, "bfloat16": kind.BFLOAT16}

    def build(self, problem: Problem, handle: int) -> Any:
        """A graph of one operation, validated. Raises what the frontend raises where no engine takes these shapes at all."""
        single = self._cudnn.data_type.FLOAT
        graph = self._cudnn.pygraph(
            io_data_type=self._types[problem.dtype],
            intermediate_data_type=single,
            compute_data_type=single,
            handle=handle,
        )
        return self._matmul(graph, problem) if isinstance(problem, Product) else self._convolution(graph, problem)

    def _convolution(self, graph: Any, problem: Convolution) -> Any:
        """Groups are implied by the channels of the weight."""
        window = {"padding": list(problem.padding), "stride": list(problem.stride), "dilation": list(problem.dilation)}
        shapes = operand_shapes(problem)
        result = result_of(problem)
        given = {
            number: graph.tensor(
                uid=number, dim=_dims(shape), stride=_strides(shape), data_type=self._types[problem.dtype]
            )
            for number, shape in shapes.items()
            if number != result
        }
        if problem.direction == "forward":
            out = graph.conv_fprop(image=given[IMAGE], weight=given[FILTER], **window)
        elif problem.direction == "forward_relu":
            sums = graph.conv_fprop(image=given[IMAGE], weight=given[FILTER], **window)
            out = graph.relu(input=graph.bias(input=sums, bias=given[BIAS]))
        elif problem.direction == "backward_data":
            out = graph.conv_dgrad(loss=given[OUTPUT], filter=given[FILTER], **window)
        else:
            out = graph.conv_wgrad(image=given[IMAGE], loss=given[OUTPUT], **window)
        return self._finish(graph, out, result, _dims(shapes[result]), _strides(shapes[result]), problem.dtype)

    def _matmul(self, graph: Any, p: Product) -> Any:
        kind = self._types[p.dtype]
        a_stride, b_stride = [p.rows * p.depth, p.a_row, p.a_depth], [p.depth * p.columns, p.b_depth, p.b_column]
        a = graph.tensor(uid=LEFT, dim=[1, p.rows, p.depth], stride=a_stride, data_type=kind)
        b = graph.tensor(uid=RIGHT, dim=[1, p.depth, p.columns], stride=b_stride, data_type=kind)
        dims, strides = [1, p.rows, p.columns], [p.rows * p.columns, p.columns, 1]
        return self._finish(graph, graph.matmul(A=a, B=b), PRODUCT, dims, strides, p.dtype)

    def _finish(self, graph: Any, out: Any, number: int, dims: list[int], strides: list[int], dtype: str) -> Any:
        out.set_output(True).set_uid(number)
        out.set_dim(dims)
        out.set_stride(strides)
        out.set_data_type(self._types[dtype])
        graph.validate()
        graph.build_operation_graph()
        return graph


def _dims(shape: Shape) -> list[int]:
    """cuDNN names dimensions in the order N, C, H, W, whatever the layout."""
    n, h, w, c = shape
    return [n, c, h, w]


def _strides(shape: Shape) -> list[int]:
    """The strides of our layout, N, H, W, C, in that order."""
    _, h, w, c = shape
    return [h * w * c, 1, w * c, c]
