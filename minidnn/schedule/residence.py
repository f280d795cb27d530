"""Residence: where stored values wait between forward and backward, and how backward gets them back."""

from __future__ import annotations

from minidnn.graph import Node
from minidnn.schedule.analysis import Analysis
from minidnn.schedule.emit import Emitter
from minidnn.schedule.instruction import D2H, H2D, HOST, Buffer, Instruction, Op, Value
from minidnn.schedule.plan import Decision


class Residence:
    """Carries out the plan's decisions for the stored values of one step.

    KEEP: the value stays in ``emitter.device``. OFFLOAD: a copy on the host, and the device copy dies. RECOMPUTE: it just
    dies. ``ensure`` brings a value back, whichever it was.
    """

    def __init__(self, emitter: Emitter, decisions: dict[str, Decision], stored: set[str]) -> None:
        self._e = emitter
        self._decisions = decisions
        self._stored = stored
        self._due: list[tuple[int, int, str, Node]] = []  # (compute row, order, key, node) of offloads to come
        self._host: dict[str, Value] = {}
        self._offloaded_at: dict[str, int] = {}
        self._early: list[tuple[int, Instruction]] = []  # PREFETCH rows and the positions before which they go
        self._remade: list[str] = []  # keys that the present layer's backward had remade
        analysis = emitter.analysis
        self._maker = (
            {key: node for node in analysis.graph.nodes for key in analysis.outputs(node)} if decisions else {}
        )
        # What a RECOMPUTE layer makes need not outlive forward, so it may be overwritten.
        self.resident = {k for k in stored if self._decision(k) is not Decision.RECOMPUTE} if decisions else stored

    def _decision(self, key: str) -> Decision:
        maker = self._maker.get(key)
        return Decision.KEEP if maker is None else self._decisions.get(maker.name, Decision.KEEP)

    # -- forward ----------------------------------------------------------------------------------------------------
    def made(self, node: Node) -> None:
        """A layer has run forward: schedule the offload of what it stores, and emit the offloads that are due."""
        if not self._decisions:
            return
        e, plan = self._e, self._e.plan
        if self._decisions.get(node.name) is Decision.OFFLOAD:
            at = len(e.compute_rows) + plan.lags.get(node.name, plan.lag)
            keys = [key for key in e.analysis.outputs(node) if key in self._stored]
            self._due += [(at, len(self._due) + i, key, node) for i, key in enumerate(keys)]
        if self._due:
            self._offload([entry for entry in self._due if entry[0] <= len(e.compute_rows)])

    def forward_done(self) -> None:
        """Forward has ended: emit the remaining offloads; from here on only kept values are on the device."""
        if not self._decisions:
            return
        self._offload(list(self._due))
        for key in [k for k in self._e.device if self._decision(k) is not Decision.KEEP]:
            del self._e.device[key]

    def _offload(self, entries: list[tuple[int, int, str, Node]]) -> None:
        for entry in sorted(entries):
            self._due.remove(entry)
            _, _, key, node = entry
            source = self._e.device[key]
            name = f"{key} on host"
            buffer = Buffer(
                name, source.spec.nbytes, source.buffer.role, layer=node.name, space=HOST, decision="offload"
            )
            copy = self._host[key] = Value(name, buffer, 0, source.spec, next(self._e.persistent.contents))
            self._e.copy(Op.OFFLOAD, key, copy, source, stream=D2H)
            self._offloaded_at[key] = len(self._e.rows)

    # -- backward ---------------------------------------------------------------------------------------------------
    def ensure(self, keys: tuple[str, ...]) -> None:
        """Have these values on the device: bring back what is on the host, remake what was dropped, inputs first."""
        if not self._decisions:
            return
        e, analysis = self._e, self._e.analysis
        stack = [key for key in reversed(keys) if key not in e.device]
        while stack:
            key = stack[-1]
            if key in e.device:
                stack.pop()
            elif key in self._host:
                self._prefetch(key)
                stack.pop()
            else:
                node = self._maker[key]
                missing = [k for k in self._inputs(analysis, node) if k not in e.device]
                if missing:
                    stack += reversed(missing)
                    continue
                stack.pop()
                e.make(Op.RECOMPUTE, node, analysis.rows[node.index].recompute, self.resident, Decision.RECOMPUTE)
                made = [k for k in analysis.outputs(node) if k in e.device]
                e.remade.update(made)
                self._remade += made

    @staticmethod
    def _inputs(analysis: Analysis, node: Node) -> list[str]:
        return [analysis.root[tensor].name for tensor in node.inputs]

    def _prefetch(self, key: str) -> None:
        """Emit a PREFETCH ``distance`` rows of the compute stream before here, never before its OFFLOAD."""
        e, plan = self._e, self._e.plan
        node = self._maker[key]
        source = self._host[key]
        value = e.device[key] = e.new(key, source.spec, source.buffer.role, node, decision="offload")
        back = plan.distances.get(node.name, plan.distance)
        position = e.compute_rows[-back] if 0 < back <= len(e.compute_rows) else len(e.rows) if not back else 0
        row = Instruction(Op.PREFETCH, key, "", (value,), (source,), stream=H2D)
        self._early.append((max(position, self._offloaded_at[key]), row))

    def layer_done(self) -> None:
        """A layer's backward is over. Memory-centric: drop what was remade for it."""
        if self._e.plan.memory_centric:
            for key in self._remade:
                self._e.device.pop(key, None)
        self._remade.clear()

    def rows(self) -> list[Instruction]:
        """All rows, with every PREFETCH in its place."""
        if not self._early:
            return self._e.rows
        merged, start = [], 0
        for position, row in sorted(self._early, key=lambda entry: entry[0]):
            merged += self._e.rows[start:position]
            merged.append(row)
            start = position
        return merged + self._e.rows[start:]
