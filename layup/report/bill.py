"""Bill: what every layer stores, and what its decision costs, in the step as it is planned.

Milliseconds are those of the plan's own rows, each priced by ``row_seconds``, hidden behind other streams or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minidnn.fuse import fuse
from minidnn.schedule.analysis import Analysis, aux_key
from minidnn.schedule.instruction import Op
from minidnn.schedule.plan import Decision
from minidnn.schedule.simulate import row_seconds
from minidnn.spec import round_up
from minidnn.step import CompiledStep

_BACKWARD = (Op.BACKWARD_WEIGHT, Op.BACKWARD_DATA, Op.ADD)
_COPIES = (Op.OFFLOAD, Op.PREFETCH, Op.LOAD, Op.STORE)


@dataclass(slots=True)
class LayerBill:
    """One layer. ``decided_by``: the layer whose decision governs it. Seconds are busy time.

    ``stored_bytes``: what it makes and some backward needs again; ``moved_bytes``: what is copied to the host of that.
    """

    name: str
    kind: str
    decided_by: str
    decision: str
    stored_bytes: int = 0
    moved_bytes: int = 0
    workspace_bytes: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    update_seconds: float = 0.0
    recompute_seconds: float = 0.0
    copy_seconds: float = 0.0
    reason: str = ""


def layer_bills(step: CompiledStep, reasons: Mapping[str, str] | None = None) -> list[LayerBill]:
    """The bill of every layer, in forward order. ``reasons``: by the layer that decides."""
    graph = fuse(step.graph, step.recipe.fusions).graph
    analysis = Analysis(graph, step.precision)
    units = analysis.units()
    decisions = analysis.decisions(step.plan)
    stored = analysis.stored(decisions)
    bills: dict[str, LayerBill] = {}
    for node in graph.nodes:
        decision = decisions.get(node.name, Decision.KEEP)
        bill = LayerBill(node.name, node.layer.kind, units[node.name], decision.value)
        sizes = {node.output.name: analysis.specs[node.output].nbytes}
        for aux in analysis.rows[node.index].aux:
            sizes[aux_key(node, aux.key)] = analysis.precision.resolve(aux.spec).nbytes
        bill.stored_bytes = sum(round_up(sizes[key]) for key in analysis.outputs(node) if key in stored)
        bill.reason = (reasons or {}).get(units[node.name], "")
        bills[node.name] = bill
    for row in step.program["train"].rows:
        owner = bills.get(row.target)
        if owner is None and row.writes:  # copies and sums are named after values
            named = next((v.buffer.layer for v in (*row.writes, *row.reads) if v.buffer.layer), "")
            owner = bills.get(named)
        if owner is None:
            continue
        seconds = row_seconds(row, step.gpu, step.precision.name)
        if row.op is Op.FORWARD:
            owner.forward_seconds += seconds
        elif row.op is Op.RECOMPUTE:
            owner.recompute_seconds += seconds
        elif row.op is Op.UPDATE:
            owner.update_seconds += seconds
        elif row.op in _COPIES:
            owner.copy_seconds += seconds
            if row.op is Op.OFFLOAD:
                owner.moved_bytes += sum(v.spec.nbytes for v in row.reads)
        elif row.op in _BACKWARD:
            owner.backward_seconds += seconds
        if row.workspace is not None:
            owner.workspace_bytes = max(owner.workspace_bytes, row.workspace.spec.nbytes)
    return list(bills.values())


def bill_data(bills: list[LayerBill], strings: Any) -> dict[str, list[int]]:
    """The bills as columns; texts are numbers into ``strings``, times whole nanoseconds."""

    def ns(name: str) -> list[int]:
        return [round(getattr(bill, name) * 1e9) for bill in bills]

    texts = {name: [strings(getattr(b, name)) for b in bills] for name in ("name", "kind", "decided_by", "reason")}
    return {
        **texts,
        "decision": [strings(bill.decision) for bill in bills],
        "stored_bytes": [bill.stored_bytes for bill in bills],
        "moved_bytes": [bill.moved_bytes for bill in bills],
        "workspace_bytes": [bill.workspace_bytes for bill in bills],
        "forward_ns": ns("forward_seconds"),
        "backward_ns": ns("backward_seconds"),
        "update_ns": ns("update_seconds"),
        "recompute_ns": ns("recompute_seconds"),
        "copy_ns": ns("copy_seconds"),
    }
