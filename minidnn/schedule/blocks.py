"""Blocks: the trainable parameters of a layer side by side in one 1-D range, and the buffers that hold many layers' blocks.

A layer therefore has one gradient block and one UPDATE row, and what goes with its parameters (gradients, master weights,
optimizer state) is cut like them. For data parallelism ``flats`` lays blocks out in lines that can be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from minidnn.graph import Node, Role
from minidnn.schedule.instruction import HOST, Buffer, Value
from minidnn.spec import TensorSpec, round_up

BLOCK_ALIGNMENT = 128  # bytes: a layer's parameters start on a memory transaction


def trainable_size(node: Node) -> int:
    """Elements of a layer's block."""
    return sum(p.size for p in node.parameters if p.trainable)


def slices(node: Node, block: Value) -> dict[str, Value]:
    """Cut a layer's block into its parameters, by the layer's own names."""
    cut, offset = {}, block.offset
    for parameter in node.parameters:
        if parameter.trainable:
            spec = TensorSpec(parameter.shape, block.spec.dtype)
            cut[parameter.key] = Value(f"{block.name}.{parameter.key}", block.buffer, offset, spec, block.content)
            offset += spec.nbytes
    return cut


def laid_out(parts: Iterable[tuple[str, TensorSpec]]) -> tuple[dict[str, tuple[int, TensorSpec]], int]:
    """Offset and spec of each part by its name, one behind the other at aligned offsets; and the aligned end of all."""
    places, end = {}, 0
    for name, spec in parts:
        places[name] = (end, spec)
        end = round_up(end + spec.nbytes, BLOCK_ALIGNMENT)
    return places, end


class Flat:
    """One flat buffer that holds, layer by layer, something shaped like the trainable parameters of one dtype.

    Every block is a content of its own: it is read and written without its neighbours.
    """

    def __init__(self, name: str, dtype: str, role: Role, nodes: list[Node], contents: count[int]) -> None:
        places, nbytes = laid_out((node.name, TensorSpec((trainable_size(node),), dtype)) for node in nodes)
        self.buffer = Buffer(name, nbytes, role, persistent=True)
        self.blocks = {
            layer: Value(f"{name}.{layer}", self.buffer, at, spec, next(contents))
            for layer, (at, spec) in places.items()
        }


class Group:
    """Parameters of consecutive layers in one pinned host buffer: all weights first, then their optimizer state.

    They are streamed together, since small copies waste the link. The whole group is one content.

    Attributes:
        blocks: by name; those of weights, named ``parameters.<layer>``, come first and end at ``weight_bytes``.
    """

    def __init__(self, name: str, layer: str, blocks: Sequence[tuple[str, TensorSpec]], content: int) -> None:
        """``blocks``: name and size of each, in the order in which they are to lie; ``layer``: the first."""
        places, nbytes = laid_out(blocks)
        self.weight_bytes = laid_out(block for block in blocks if block[0].startswith("parameters."))[1]
        self.buffer = Buffer(name, nbytes, Role.PARAMETER, layer=layer, space=HOST, persistent=True)
        self.content = content
        self.blocks = {block: Value(block, self.buffer, at, spec, content) for block, (at, spec) in places.items()}
