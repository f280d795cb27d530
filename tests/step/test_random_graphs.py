"""Whatever the graph and whatever the plan: the schedules are right, the bytes as predicted, the bits those of ``keep``."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, note, settings
from hypothesis import strategies as st

import minidnn
from minidnn.device.emulated import EmulatedDevice
from minidnn.graph import Tensor
from minidnn.layers import Graph
from minidnn.precision import precision
from minidnn.schedule.analysis import Analysis
from minidnn.schedule.instruction import DEVICE, HOST, Op
from minidnn.schedule.liveness import operands
from minidnn.schedule.plan import Decision
from minidnn.schedule.program import Program
from minidnn.schedule.simulate import total_footprint
from minidnn.schedule.verify import verify
from minidnn.step import CompiledStep
from tests.step import nets

BATCH, TAIL = 3, 2
UNARY = ("conv", "strided conv", "batch_norm", "relu", "tanh", "max_pool", "avg_pool", "dropout", "lrn")


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A directed graph without cycles: every layer reads any earlier outputs, and every loose end goes into the head."""
    g = Graph()
    image = g.input((BATCH, draw(st.sampled_from((4, 5))), 4, 2))
    label = g.label((BATCH,))
    made = [image]
    for _ in range(draw(st.integers(2, 9))):
        made.append(layer(draw, g, made))
    used = {tensor for node in g.nodes for tensor in node.inputs}
    ends = [g.global_avg_pool(tensor) for tensor in made if tensor not in used]
    joined = ends[0] if len(ends) == 1 else g.concat(*ends)
    g.softmax_cross_entropy(g.linear(joined, nets.CLASSES, name="head"), label)
    return g


def layer(draw: st.DrawFn, g: Graph, made: list[Tensor]) -> Tensor:
    """Add one layer on any earlier outputs that fit."""
    x = draw(st.sampled_from(made))
    same = [t for t in made if t.shape == x.shape]
    beside = [t for t in made if t.shape[:3] == x.shape[:3]]
    kind = draw(st.sampled_from((*UNARY, *["add"] * 2 * (len(same) > 1), *["concat"] * 2 * (len(beside) > 1))))
    if kind == "add":
        return g.add(x, draw(st.sampled_from(same)))
    if kind == "concat":
        return g.concat(x, draw(st.sampled_from(beside)))
    small = min(x.shape[1:3]) < 2
    if kind in ("conv", "strided conv"):
        stride = 2 if kind == "strided conv" else 1
        return g.conv2d(x, draw(st.integers(1, 4)), draw(st.sampled_from((1, 3))), stride, 1, bias=draw(st.booleans()))
    if kind == "max_pool" and not small:
        return g.max_pool(x, 2, draw(st.sampled_from((1, 2))))
    if kind == "avg_pool" and not small:
        return g.avg_pool(x, 2)
    if kind == "batch_norm":
        return g.batch_norm(x)
    if kind == "tanh":
        return g.tanh(x)
    if kind == "dropout":
        return g.dropout(x)
    return g.lrn(x) if kind == "lrn" else g.relu(x)


@st.composite
def plans(draw: st.DrawFn, graph: Graph, accumulate: int) -> minidnn.Plan:
    """Any reuse switches, any decision for the last layer of every in-place chain, any parameters streamed."""
    switch = st.booleans()
    layerwise = draw(st.sampled_from((None, False, True) if accumulate == 1 else (None, False)))
    reuse = minidnn.Reuse(draw(switch), draw(switch), draw(switch), draw(switch), layerwise)
    units = Analysis(graph, precision("fp32")).units()
    ends = [name for name, last in units.items() if name == last]
    decisions = {name: draw(st.sampled_from(Decision)) for name in ends} if draw(st.booleans()) else {}
    trainable = [node.name for node in graph.nodes if any(p.trainable for p in node.parameters)]
    some = tuple(name for name in trainable if draw(switch)) if draw(switch) else ()
    return minidnn.Plan(
        decisions,
        reuse,
        lag=draw(st.integers(0, 3)),
        distance=draw(st.integers(0, 6)),
        memory_centric=draw(switch),
        streamed=("*",) if some == tuple(trainable) else some,
        group_bytes=draw(st.sampled_from((0, 200, 8 << 20))),
    )


def schedules_are_right(program: Program) -> None:
    for schedule in program.schedules.values():
        previous = program[schedule.previous].rows
        extents = {"extent": program.reserved_bytes, "host_extent": program.host_bytes}
        assert verify(schedule.rows, schedule.offsets, previous=previous, **extents) == []


def bytes_are_bounded(program: Program) -> None:
    """No row can run in less than the persistent bytes and its own operands; no slab is smaller than its peak."""
    persistent = total_footprint(program.persistent.buffers, DEVICE)
    for schedule in program.schedules.values():
        rows = [row for row in schedule.rows if row.op not in (Op.ALLOC, Op.FREE)]
        own = [sum(b.footprint for b in operands(row) if b.space == DEVICE and not b.persistent) for row in rows]
        assert persistent + max(own) <= schedule.profile.peak_bytes <= schedule.profile.reserved_bytes
        assert schedule.profile.reserved_bytes <= program.reserved_bytes
        assert (
            total_footprint(program.persistent.host_buffers, HOST) <= schedule.profile.host_bytes <= program.host_bytes
        )


def trained(step: CompiledStep) -> dict[str, Any]:
    """What two micro-batches, a tail and an evaluation leave."""
    losses = nets.train(step, 2)
    losses.append(step.run(*nets.batch(step.graph, seed=5, samples=TAIL)).loss)
    x, y = nets.batch(step.graph, seed=6)
    gradients = {f"gradient of {name}": array for name, array in step.gradients(x, y).items()}
    return {**nets.state(step), **gradients, "losses": np.array(losses), "logits": step.evaluate(x)}


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_plan_for_any_graph_is_right_to_the_byte_and_to_the_bit(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    accumulate = data.draw(st.sampled_from((1, 1, 2)))
    plan = data.draw(plans(graph, accumulate))
    note(graph.summary())
    options: dict[str, Any] = {"optimizer": nets.MOMENTUM, "tail": TAIL, "accumulate": accumulate}
    keep = minidnn.compile(graph, **options)
    device = EmulatedDevice(seed=data.draw(st.integers(0, 99)))
    step = minidnn.compile(graph, plan, device=device, **options)
    schedules_are_right(step.program)
    bytes_are_bounded(step.program)
    step.verify(*nets.batch(graph))
    assert step.measured.peak_bytes == step.profile.peak_bytes
    assert nets.differing(trained(keep), trained(step)) == []
    device.synchronize()
    assert device.touched_bytes() <= step.profile.reserved_bytes
