"""Explain a compiled step: what every layer stores and why, and where the peak is."""

from __future__ import annotations

from minidnn.graph import Graph, Role
from minidnn.precision import Precision
from minidnn.schedule.analysis import Analysis
from minidnn.schedule.instruction import DEVICE
from minidnn.schedule.plan import Decision, Plan
from minidnn.schedule.program import Program
from minidnn.schedule.text import human_bytes

_STORED = (Role.ACTIVATION, Role.AUX, Role.INPUT)


def explain(graph: Graph, precision: Precision, plan: Plan, program: Program) -> str:
    """A table, one line a layer (decision, bytes made, workspace, parameters), then the residents at the peak.

    A layer that another overwrites in place shares that one's decision.
    """
    decisions = Analysis(graph, precision).decisions(plan)
    stored: dict[str, int] = {}
    workspace: dict[str, int] = {}
    for row in program["train"].rows:
        buffer = row.buffer
        if row.op.value != "ALLOC" or buffer is None or buffer.space != DEVICE or not buffer.layer:
            continue
        if buffer.role in _STORED:
            stored[buffer.layer] = stored.get(buffer.layer, 0) + buffer.footprint
        elif buffer.role is Role.WORKSPACE:
            workspace[buffer.layer] = max(workspace.get(buffer.layer, 0), buffer.footprint)
    lines = [f"{'layer':<32} {'kind':<22} {'decision':<10} {'made':>12} {'workspace':>12} {'parameters':>12}"]
    for node in graph.nodes:
        parameters = sum(p.size for p in node.parameters if p.trainable)
        lines.append(
            f"{node.name:<32} {node.layer.kind:<22} {decisions.get(node.name, Decision.KEEP).value:<10} "
            f"{human_bytes(stored.get(node.name, 0)):>12} {human_bytes(workspace.get(node.name, 0)):>12} {parameters:>12,}"
        )
    profile = program.prediction
    lines.append(
        f"peak {profile.peak_bytes} B ({human_bytes(profile.peak_bytes)}) at {profile.peak_text}; "
        f"reserved {profile.reserved_bytes} B, pinned host {profile.host_bytes} B"
    )
    lines += [f"  {r.name:<40} {r.role:<20} {human_bytes(r.nbytes):>12}" for r in profile.residents_at_peak[:10]]
    return "\n".join(lines)
