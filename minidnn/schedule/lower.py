"""Lower a graph to rows: THE forward/backward loop.

Worked example, conv -> relu -> loss, plan ``keep``, without the INPUT and FETCH rows::

    FORWARD          conv   conv2d_forward                  conv <- x weight
    FORWARD          relu   relu_forward                    relu <- conv        in place: conv is dead from here on
    FORWARD          loss   softmax_cross_entropy_forward   loss loss:probabilities <- relu y
    BACKWARD_DATA    loss   softmax_cross_entropy_backward  d_relu <- loss:probabilities y scalars
    BACKWARD_DATA    relu   relu_backward                   d_conv <- d_relu relu
    BACKWARD_WEIGHT  conv   conv2d_backward_weight          d_conv.weight <- x d_conv
    UPDATE           conv   sgd_update                      parameters.conv <- d_conv.weight scalars
"""

from __future__ import annotations

from dataclasses import dataclass

from minidnn.graph import Node, Role
from minidnn.schedule.analysis import Analysis, InferenceAnalysis
from minidnn.schedule.blocks import slices
from minidnn.schedule.emit import Emitter
from minidnn.schedule.emit_backward import StepEmitter
from minidnn.schedule.instruction import D2H, H2D, RESULT, Instruction, Op, Value
from minidnn.schedule.persistent import LOGITS_OFFSET, Persistent
from minidnn.schedule.plan import Decision, Plan, PlanError
from minidnn.schedule.recipe import Recipe
from minidnn.schedule.residence import Residence
from minidnn.schedule.strategy import Phase, exchange
from minidnn.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Step:
    """Which training step to lower. ``accumulates``: add to the gradients of earlier micro-batches; ``updates``: then update
    the weights; ``fetches``: hand every weight gradient to the caller as it is born, and update nothing. ``phase``: which
    buffers take part in data parallelism."""

    accumulates: bool = False
    updates: bool = True
    fetches: bool = False
    phase: Phase = Phase.TRAIN


def lower(analysis: Analysis, persistent: Persistent, plan: Plan, recipe: Recipe, step: Step) -> list[Instruction]:
    """Rows of one training step, without ALLOC, FREE and waits. Raises PlanError for a plan that cannot be carried out."""
    graph = analysis.graph
    decisions = analysis.decisions(plan)
    stored = analysis.stored(decisions)
    layerwise = updates_layerwise(plan, persistent)
    e = StepEmitter(analysis, persistent, plan, recipe)
    residence = Residence(e, decisions, stored)
    input_rows(e)
    scaling = None if step.fetches else persistent.scaling
    if scaling is not None:
        scalars = (persistent.scalars,)
        e.append(Instruction(Op.INPUT, "loss scale", "scale_loss", scalars, (scaling,), accumulates=True))

    for node in graph.nodes:
        rows = analysis.rows[node.index]
        e.make(Op.FORWARD, node, rows.forward, residence.resident, decisions.get(node.name, Decision.KEEP))
        for call in rows.once:
            e.emit(Op.FORWARD, node, call, {})
        residence.made(node)  # OFFLOAD: after `lag` rows; the device copy dies there or at its last forward use
    loss = e.read(graph.nodes[-1].output)
    fetch_result(e, loss, 0)
    e.held[loss.buffer] = (
        loss  # to the end of the step: else computation would wait for its copy to use these 512 bytes again
    )
    residence.forward_done()

    ready = []
    for node in reversed(graph.nodes):
        rows = analysis.rows[node.index]
        if not (rows.backward_weight or rows.backward_data):
            continue
        residence.ensure(rows.backward_reads)  # PREFETCH, `distance` rows earlier, or RECOMPUTE, inputs first
        local = {"scalars": persistent.scalars, "counters": persistent.counters}
        dy = e.pop_grad(node.output)
        if dy is not None:
            local["dy"] = dy
        if (second := e.pop_second(node.output)) is not None:
            local["dy1"] = second
        total = None if step.fetches else persistent.gradients.get(node.name)
        gradient = e.backward_weight(node, rows.backward_weight, local, total=total, accumulates=step.accumulates)
        for index, calls in rows.backward_data:
            e.backward_data(node, index, calls, local, last=index == rows.backward_data[-1][0])
        residence.layer_done()
        if gradient is not None and step.fetches:
            fetch_gradients(e, node, gradient)
        elif gradient is not None and step.updates and persistent.ranks is None:
            if layerwise:
                e.update([(node, gradient)])
            else:
                ready.append((node, gradient))

    if scaling is not None and step.updates and persistent.ranks is None:
        gradients = tuple(gradient for _, gradient in ready)
        e.append(Instruction(Op.UPDATE, "loss scale", "check_finite", (scaling,), gradients, accumulates=True))
        state = (scaling, persistent.scalars)
        e.append(Instruction(Op.UPDATE, "loss scale", "adapt_scale", state, attrs={"interval": 2000}, accumulates=True))
    if persistent.clip_grad_norm is not None and step.updates:
        clip_row(e, tuple(gradient for _, gradient in ready), persistent.clip_grad_norm)
    if scaling is not None or persistent.clip_grad_norm is not None:
        e.update(ready)
    else:
        for pair in ready:
            e.update([pair])
    e.hold(e.held.values())
    whole = residence.rows()
    if persistent.ranks is None or step.fetches:
        return whole
    return exchange(whole, persistent, step.phase if step.updates else Phase.FIRST)


def lower_inference(
    analysis: InferenceAnalysis, persistent: Persistent, plan: Plan, recipe: Recipe
) -> list[Instruction]:
    """Rows of one evaluation pass: running statistics, no dropout, nothing stored; logits out."""
    e = Emitter(analysis, persistent, plan, recipe)
    input_rows(e, labels=False)
    for node in analysis.graph.nodes[:-1]:
        e.make(Op.FORWARD, node, analysis.rows[node.index].forward, set())
    logits = e.read(analysis.graph.nodes[-1].inputs[0])
    if logits.spec.dtype != "float32":
        wide = e.new("logits", TensorSpec(logits.spec.shape, "float32"), Role.ACTIVATION)
        e.append(Instruction(Op.FORWARD, "logits", "convert", (wide,), (logits,)))
        logits = wide
    fetch_result(e, logits, LOGITS_OFFSET)
    e.hold(e.held.values())
    return e.rows


def lower_flush(
    analysis: Analysis, persistent: Persistent, plan: Plan, recipe: Recipe, step: Step
) -> list[Instruction]:
    """Rows that apply the gradients of the last step, which ``ring_delayed`` has not exchanged yet. They compute nothing."""
    e = Emitter(analysis, persistent, plan, recipe)
    source, staged = (
        persistent.batch_values(analysis.graph, b)["constants"] for b in (persistent.slot, persistent.staging)
    )
    e.copy(Op.INPUT, "batch", staged, source, stream=H2D)
    e.copy(Op.INPUT, "constants", persistent.constants, staged)
    fetch_result(e, persistent.scalars, 0)
    return exchange(e.rows, persistent, step.phase)


def updates_layerwise(plan: Plan, persistent: Persistent) -> bool:
    """Whether weights are updated as soon as their gradient exists. Refuses an explicit wish where whole gradients are
    needed."""
    whole = bool(persistent.gradients)
    if persistent.ranks is not None and plan.reuse.layerwise_update:
        raise PlanError(
            f"layerwise_update cannot be combined with the strategy {persistent.ranks.strategy.name}: the exchange cuts whole "
            "gradients across layers; set it to null (automatic) or false, or train on one rank"
        )
    if persistent.scaling is not None and plan.reuse.layerwise_update:
        raise PlanError(
            "layerwise_update cannot be combined with dynamic loss scaling: no weight may change before all gradients are known "
            "to be finite; set it to null (automatic) or false, or use another precision than fp16"
        )
    if persistent.clip_grad_norm is not None and plan.reuse.layerwise_update:
        raise PlanError(
            f"layerwise_update cannot be combined with clip_grad_norm={persistent.clip_grad_norm:g}: the norm is over all "
            "gradients, so no weight may change before the last is known; set it to null (automatic) or false, or do not clip"
        )
    if whole and plan.reuse.layerwise_update:
        raise PlanError(
            "layerwise_update cannot be combined with accumulation over micro-batches: gradients must live to the last one; "
            "set it to null (automatic) or false, or use --accum 1"
        )
    return plan.reuse.layerwise_update is not False and not whole


def clip_row(e: Emitter, gradients: tuple[Value, ...], max_norm: float) -> None:
    """The row that clips: it changes the number by which the updates multiply gradients, and no gradient."""
    attrs, scalars = {"max_norm": max_norm}, (e.persistent.scalars,)
    e.append(Instruction(Op.UPDATE, "clipping", "clip_scale", scalars, gradients, attrs=attrs, accumulates=True))


def input_rows(e: Emitter, *, labels: bool = True) -> None:
    """The batch comes in: pinned slot to staging on the copy stream, then out of staging, which is free for the next batch."""
    graph, p = e.analysis.graph, e.persistent
    source, staged = p.batch_values(graph, p.slot), p.batch_values(graph, p.staging)
    hold = not e.plan.reuse.lifetimes
    e.copy(Op.INPUT, "batch", staged["all"], source["all"], stream=H2D)
    e.copy(Op.INPUT, "constants", p.constants, staged["constants"])
    for tensor, part, role in ((graph.labels[0], "labels", Role.LABEL), (graph.inputs[0], "pixels", Role.INPUT)):
        if part == "labels" and not labels:
            continue
        value = e.device[tensor.name] = e.new(tensor.name, e.analysis.specs[tensor], role, hold=hold)
        if value.spec == staged[part].spec:
            e.copy(Op.INPUT, tensor.name, value, staged[part])
        else:
            e.append(Instruction(Op.INPUT, tensor.name, "convert", (value,), (staged[part],)))


def fetch_result(e: Emitter, value: Value, offset: int) -> None:
    """The loss, or the logits, go to their pinned slot."""
    slot = Value(f"{value.name} on host", e.persistent.result, offset, value.spec, next(e.persistent.contents))
    e.copy(Op.FETCH, value.name, slot, value, stream=D2H)


def fetch_gradients(e: Emitter, node: Node, gradient: Value) -> None:
    """Every weight gradient of a layer goes to an ordinary host array."""
    for key, value in slices(node, gradient).items():
        name = f"{node.name}.{key}"
        e.copy(Op.FETCH, name, e.new(name, value.spec, Role.PARAM_GRAD, space=RESULT), value, stream=D2H)
