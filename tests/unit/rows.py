"""Literal rows for tests, and rows shaped like training steps of small and of very deep nets. No arrays."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from minidnn.graph import Role
from minidnn.schedule.instruction import COMPUTE, D2H, DEVICE, H2D, HOST, STREAMS, Buffer, Instruction, Op, Value
from minidnn.spec import TensorSpec

KIB = 1024


def value(
    name: str,
    nbytes: int = 512,
    *,
    content: int = 0,
    space: str = DEVICE,
    persistent: bool = False,
    role: Role = Role.ACTIVATION,
) -> Value:
    """A value that fills a new buffer of its own."""
    buffer = Buffer(name, nbytes, role, space=space, persistent=persistent)
    return Value(name, buffer, 0, TensorSpec((nbytes,), "uint8"), content)


def part(whole: Value, begin: int, end: int, content: int | None = None) -> Value:
    """Bytes ``begin`` to ``end`` of a value, as a value in the same buffer."""
    spec = TensorSpec((end - begin,), "uint8")
    name = f"{whole.name}[{begin}:{end}]"
    return Value(name, whole.buffer, whole.offset + begin, spec, whole.content if content is None else content)


def row(
    target: str,
    writes: Iterable[Value] = (),
    reads: Iterable[Value] = (),
    *,
    op: Op = Op.FORWARD,
    stream: str = COMPUTE,
    workspace: Value | None = None,
    accumulates: bool = False,
) -> Instruction:
    """A row of any op."""
    return Instruction(
        op,
        target,
        writes=tuple(writes),
        reads=tuple(reads),
        stream=stream,
        workspace=workspace,
        accumulates=accumulates,
    )


def alloc(of: Value, stream: str = COMPUTE) -> Instruction:
    """The ALLOC row of a value's buffer."""
    return Instruction(Op.ALLOC, of.name, stream=stream, buffer=of.buffer)


def free(of: Value, stream: str = COMPUTE) -> Instruction:
    """The FREE row of a value's buffer."""
    return Instruction(Op.FREE, of.name, stream=stream, buffer=of.buffer)


def persistent_offsets(rows: Iterable[Instruction]) -> tuple[dict[Buffer, int], dict[str, int]]:
    """Offsets of all persistent buffers of some rows, packed from zero in each space, and where each space goes on."""
    offsets: dict[Buffer, int] = {}
    ends = {DEVICE: 0, HOST: 0}
    for instruction in rows:
        values = [*instruction.writes, *instruction.reads]
        for buffer in (operand.buffer for operand in values):
            if buffer.persistent and buffer not in offsets:
                offsets[buffer] = ends[buffer.space]
                ends[buffer.space] += buffer.footprint
    return offsets, ends


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a made-up net. Bytes of its output, of what else it keeps, of its weights and of its workspace."""

    inputs: tuple[int, ...]  # indices of earlier layers; -1 is the batch
    out: int
    aux: int = 0
    weight: int = 0
    workspace: int = 0
    reads_x: bool = True  # backward reads the inputs
    reads_y: bool = False  # backward reads the output
    in_place: bool = False  # writes its output over its first input
    offload: bool = False  # keep the output in host memory between forward and backward
    alias: bool = False  # an addition whose gradient is that of its inputs


def training_step(layers: list[Layer], batch: int = 64 * KIB, lag: int = 2) -> list[Instruction]:
    """Rows of one training step, without ALLOC and FREE rows: what lowering makes, for a net given by bytes alone."""
    contents = count(1)
    rows: list[Instruction] = []

    def new(name: str, nbytes: int, role: Role = Role.ACTIVATION, space: str = DEVICE, keeps: bool = False) -> Value:
        return value(name, nbytes, content=next(contents), space=space, persistent=keeps, role=role)

    staging = new("staging", batch, Role.INPUT, HOST, True)
    x = new("x", batch, Role.INPUT)
    rows.append(row("batch", [x], [staging], op=Op.INPUT, stream=H2D))
    outputs: dict[int, Value] = {-1: x}
    weights = {
        i: new(f"w{i}", layer.weight, Role.PARAMETER, keeps=True) for i, layer in enumerate(layers) if layer.weight
    }
    aux: dict[int, Value] = {}
    on_host: dict[int, Value] = {}
    leaving: list[tuple[int, int]] = []

    def offload(now: int) -> None:
        while leaving and leaving[0][0] <= now:
            i = leaving.pop(0)[1]
            on_host[i] = new(f"y{i}.host", layers[i].out, space=HOST)
            rows.append(row(f"y{i}", [on_host[i]], [outputs[i]], op=Op.OFFLOAD, stream=D2H))

    for i, layer in enumerate(layers):
        reads = [outputs[j] for j in layer.inputs] + ([weights[i]] if layer.weight else [])
        if layer.in_place:
            outputs[i] = reads[0]._replace(name=f"y{i}", content=next(contents))
        else:
            outputs[i] = new(f"y{i}", layer.out)
        writes = [outputs[i]]
        if layer.aux:
            aux[i] = new(f"aux{i}", layer.aux, Role.AUX)
            writes.append(aux[i])
        scratch = new(f"ws{i}", layer.workspace, Role.WORKSPACE) if layer.workspace else None
        rows.append(row(f"layer{i}", writes, reads, workspace=scratch))
        if layer.offload:
            leaving.append((i + lag, i))
        offload(i)
    offload(len(layers) + lag)

    gradients: dict[int, Value] = {len(layers) - 1: new("dy", layers[-1].out, Role.GRAD)}
    rows.append(row("loss", [gradients[len(layers) - 1]], [outputs[len(layers) - 1]], op=Op.BACKWARD_DATA))
    back: dict[int, Value] = {}

    def fetch(i: int) -> Value:
        if i not in on_host:
            return outputs[i]
        if i not in back:
            back[i] = new(f"y{i}.back", layers[i].out)
            rows.append(row(f"y{i}", [back[i]], [on_host[i]], op=Op.PREFETCH, stream=H2D))
        return back[i]

    for i in reversed(range(len(layers))):
        layer, dy = layers[i], gradients.pop(i)
        kept = [fetch(j) for j in layer.inputs] if layer.reads_x else []
        kept += [fetch(i)] if layer.reads_y else []
        kept += [aux[i]] if layer.aux else []
        if layer.weight:
            scratch = new(f"wws{i}", layer.workspace, Role.WORKSPACE) if layer.workspace else None
            dw = new(f"dw{i}", layer.weight, Role.PARAM_GRAD)
            rows.append(row(f"layer{i}", [dw], [*kept, dy], op=Op.BACKWARD_WEIGHT, workspace=scratch))
        for j in dict.fromkeys(j for j in layer.inputs if j >= 0):
            if layer.alias:
                dx = dy
            elif layer.in_place or (not layer.weight and layers[j].out == layer.out and not layer.aux):
                dx = dy._replace(name=f"dx{i}", content=next(contents))
                rows.append(row(f"layer{i}", [dx], [*kept, dy], op=Op.BACKWARD_DATA))
            else:
                scratch = new(f"dws{i}", layer.workspace, Role.WORKSPACE) if layer.workspace else None
                dx = new(f"dx{i}.{j}", layers[j].out, Role.GRAD)
                of_weights = [weights[i]] if layer.weight else kept
                rows.append(row(f"layer{i}", [dx], [*of_weights, dy], op=Op.BACKWARD_DATA, workspace=scratch))
            if j in gradients:
                total = new(f"sum{i}.{j}", layers[j].out, Role.GRAD)
                rows.append(row(f"sum{j}", [total], [gradients[j], dx], op=Op.ADD))
                dx = total
            gradients[j] = dx
        if layer.weight:
            rows.append(row(f"layer{i}", [weights[i]], [dw], op=Op.UPDATE, accumulates=True))
    return rows


def chain(depth: int, *, offload_every: int = 0, size: int = 64 * KIB) -> list[Layer]:
    """Convolution and in-place activation, ``depth`` times."""
    layers: list[Layer] = []
    for i in range(depth):
        offload = offload_every > 0 and i % offload_every == 0
        layers.append(Layer((len(layers) - 1,), size, weight=8 * KIB, workspace=16 * KIB))
        layers.append(Layer((len(layers) - 1,), size, in_place=True, reads_x=False, reads_y=True, offload=offload))
    return layers


def residual(units: int, *, size: int = 64 * KIB) -> list[Layer]:
    """Bottleneck units: three convolutions with statistics and in-place activations, then an addition; three stages."""
    layers = [Layer((-1,), size, weight=16 * KIB, workspace=size // 2)]
    for unit in range(units):
        begin, wide = len(layers) - 1, size >> (unit * 3 // units)
        for out in (wide // 4, wide // 4, wide):
            layers.append(Layer((len(layers) - 1,), out, weight=out // 2, workspace=out))
            layers.append(Layer((len(layers) - 1,), out, aux=512))
            layers.append(Layer((len(layers) - 1,), out, in_place=True, reads_x=False, reads_y=True))
        if layers[begin].out != wide:
            layers.append(Layer((begin,), wide, weight=8 * KIB, workspace=wide))
            begin = len(layers) - 1
            layers.append(Layer((begin - 1, begin), wide, reads_x=False, alias=True))
        else:
            layers.append(Layer((len(layers) - 1, begin), wide, reads_x=False, alias=True))
    return layers


def pyramid(*, size: int = 1024 * KIB) -> list[Layer]:
    """VGG's shape: few huge maps first, halved by pooling, then linear layers with huge weights."""
    layers: list[Layer] = []
    for stage in range(5):
        for _ in range(2 if stage < 2 else 3):
            out = size >> stage
            layers.append(Layer((len(layers) - 1,), out, weight=4 * KIB << stage, workspace=out // 3))
            layers.append(Layer((len(layers) - 1,), out, in_place=True, reads_x=False, reads_y=True))
        layers.append(Layer((len(layers) - 1,), layers[-1].out // 4, aux=layers[-1].out // 16, reads_x=False))
    for weight in (4096 * KIB, 640 * KIB, 160 * KIB):
        layers.append(Layer((len(layers) - 1,), 4 * KIB, weight=weight))
    return layers


def dense(units: int, *, growth: int = 16 * KIB) -> list[Layer]:
    """Every unit reads the concatenation of all before it."""
    layers = [Layer((-1,), 2 * growth, weight=8 * KIB, workspace=growth)]
    parts = [0]
    for _ in range(units):
        width = sum(layers[i].out for i in parts)
        layers.append(Layer(tuple(parts), width, reads_x=False))
        layers.append(Layer((len(layers) - 1,), width, aux=512))
        layers.append(Layer((len(layers) - 1,), growth, weight=width // 2, workspace=growth))
        parts.append(len(layers) - 1)
    return layers


def branches(units: int, *, size: int = 64 * KIB) -> list[Layer]:
    """Four branches of different width and depth, then a concatenation."""
    layers = [Layer((-1,), size, weight=8 * KIB, workspace=size)]
    for unit in range(units):
        begin, ends = len(layers) - 1, []
        for depth, out in ((1, size), (2, 2 * size), (2, size // 2), (1, size // 2)):
            layers.append(Layer((begin,), out // depth, weight=16 * KIB, workspace=(unit % 3) * out // 2))
            if depth == 2:
                layers.append(Layer((len(layers) - 1,), out, weight=32 * KIB, workspace=out))
            layers.append(Layer((len(layers) - 1,), out, in_place=True, reads_x=False, reads_y=True))
            ends.append(len(layers) - 1)
        layers.append(Layer(tuple(ends), sum(layers[i].out for i in ends), reads_x=False))
    return layers


def random_rows(seed: int, length: int, *, streams: int = 4, buffers: int = 12) -> list[Instruction]:
    """Rows over few buffers on several streams, every read defined: values, parts of values, in-place results, accumulation."""
    draw = random.Random(seed)
    contents = count(1)
    rows: list[Instruction] = []
    kept = [value(f"p{i}", 3 * 512, content=next(contents), persistent=True) for i in range(2)]
    kept.append(value("h", 1024, content=next(contents), space=HOST, persistent=True))
    alive: list[Value] = list(kept)
    for i in range(length):
        stream = STREAMS[draw.randrange(streams)]
        reads = draw.sample(alive, min(len(alive), draw.randrange(3)))
        kind = draw.random()
        scratch = value(f"s{i}", draw.choice((100, 512, 2000)), role=Role.WORKSPACE) if draw.random() < 0.2 else None
        if kind < 0.15 and reads:
            target = draw.choice(alive)
            rows.append(row(f"r{i}", [target], reads, stream=stream, workspace=scratch, accumulates=True))
        elif kind < 0.25 and len(alive) > len(kept):
            old = alive.pop(draw.randrange(len(kept), len(alive)))
            over = old._replace(name=f"v{i}", content=next(contents))
            rows.append(row(f"r{i}", [over], [*(r for r in reads if r is not old), old], stream=stream))
            alive.append(over)
        elif kind < 0.35:
            target = draw.choice(kept)
            rows.append(row(f"r{i}", [part(target, 512, 1024)], reads, stream=stream, workspace=scratch))
        else:
            made = value(
                f"v{i}",
                draw.choice((1, 512, 700, 1024, 4000)),
                content=next(contents),
                space=HOST if draw.random() < 0.2 else DEVICE,
            )
            rows.append(row(f"r{i}", [made], reads, stream=stream, workspace=scratch))
            alive.append(made)
        while len(alive) > buffers:
            alive.pop(draw.randrange(len(kept), len(alive)))
    return rows
