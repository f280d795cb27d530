"""Emitter: turns a layer's kernel calls into rows on buffers. ``lower`` decides when; this decides on which bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minidnn.graph import Node, Role, Tensor
from minidnn.schedule.analysis import Analysis, NodeRows, aux_key, input_index
from minidnn.schedule.instruction import COMPUTE, DEVICE, Buffer, Instruction, Op, Value
from minidnn.schedule.persistent import Persistent
from minidnn.schedule.plan import Decision, Plan
from minidnn.schedule.recipe import Recipe
from minidnn.spec import TensorSpec


class Emitter:
    """Rows of one schedule under construction.

    Attributes:
        rows: the list so far.
        device: for every key (see ``Analysis``), its value on the device now.
    """

    def __init__(self, analysis: Analysis, persistent: Persistent, plan: Plan, recipe: Recipe) -> None:
        self.analysis = analysis
        self.persistent = persistent
        self.plan = plan
        self.recipe = recipe
        self.rows: list[Instruction] = []
        # Positions of the rows on the compute stream, by which lags and distances count. Without updates: a schedule that
        # updates and one that does not (gradients, micro-batches) then move the same values at the same places.
        self.compute_rows: list[int] = []
        self.device: dict[str, Value] = {}
        self.remade: set[str] = set()  # keys in ``device`` that RECOMPUTE rows made
        self.held: dict[Buffer, Value] = {}  # what a switched-off reuse keeps alive to the end of the step
        self.workspaces: dict[Node, Value] = {}

    # -- values -----------------------------------------------------------------------------------------------------
    def new(
        self,
        name: str,
        spec: TensorSpec,
        role: Role,
        node: Node | None = None,
        *,
        space: str = DEVICE,
        hold: bool = False,
        decision: str = "",
    ) -> Value:
        """A value in a buffer of its own."""
        buffer = Buffer(name, spec.nbytes, role, layer=node.name if node else "", space=space, decision=decision)
        value = Value(name, buffer, 0, spec, next(self.persistent.contents))
        if hold:
            self.held[buffer] = value
        return value

    def over(self, name: str, spec: TensorSpec, source: Value) -> Value:
        """A value that overwrites ``source`` in place: same bytes, another content."""
        return Value(name, source.buffer, source.offset, spec, next(self.persistent.contents))

    def read(self, tensor: Tensor) -> Value:
        """The value of a tensor on the device, under the tensor's own shape (an alias shows its root's bytes)."""
        root = self.analysis.root[tensor]
        value = self.device[root.name]
        return value if tensor is root else value.alias(tensor.name, self.analysis.specs[tensor])

    def operand(self, node: Node, name: str, local: dict[str, Value]) -> Value:
        """Look an operand of a layer's call up: its own values first, then parameters, aux, inputs, output."""
        if name in local:
            return local[name]
        index = input_index(name)
        if index is not None:
            return self.read(node.inputs[index])
        if name == "y":
            return self.read(node.output)
        aux = self.device.get(aux_key(node, name))
        return self.persistent.parameters[f"{node.name}.{name}"] if aux is None else aux

    # -- rows -------------------------------------------------------------------------------------------------------
    def emit(self, op: Op, node: Node, call: Any, local: dict[str, Value]) -> None:
        """Append the row of one kernel call. ``local`` names the operands that are not the layer's stored values."""
        attrs, workspace = call.attrs, None
        if call.engine:
            engine = self.recipe.engine(node.name, call.engine)
            attrs = {**attrs, **dict(engine.options)}
            workspace = self.workspace(node, engine.workspace_bytes)
        writes = tuple([self.operand(node, name, local) for name in call.writes])
        reads = tuple([self.operand(node, name, local) for name in call.reads])
        self.append(
            Instruction(op, node.name, call.kernel, writes, reads, workspace, attrs, call.accumulates, flops=call.flops)
        )

    def append(self, row: Instruction) -> None:
        """Append a row."""
        if row.stream == COMPUTE and row.op is not Op.UPDATE:
            self.compute_rows.append(len(self.rows))
        self.rows.append(row)

    def workspace(self, node: Node, nbytes: int) -> Value | None:
        """Scratch for one row; with workspace reuse off, one range per layer that lives for the whole step."""
        if not nbytes:
            return None
        spec = TensorSpec((nbytes,), "uint8")
        if self.plan.reuse.workspace:
            return self.new(f"{node.name}.workspace", spec, Role.WORKSPACE, node)
        if node not in self.workspaces:
            directions = ("forward", "forward_relu", "backward_data", "backward_weight")
            largest = max(self.recipe.engine(node.name, d).workspace_bytes for d in directions)
            whole = TensorSpec((largest,), "uint8")
            self.workspaces[node] = self.new(f"{node.name}.workspace", whole, Role.WORKSPACE, node, hold=True)
        return self.workspaces[node]._replace(spec=spec)

    def copy(self, op: Op, target: str, destination: Value, source: Value, stream: str = COMPUTE) -> None:
        """Append a copy of equally many bytes."""
        self.append(Instruction(op, target, "", (destination,), (source,), stream=stream))

    # -- forward ----------------------------------------------------------------------------------------------------
    def make(
        self,
        op: Op,
        node: Node,
        calls: tuple[Any, ...],
        resident: set[str],
        decision: Decision = Decision.KEEP,
    ) -> None:
        """Emit the rows that make a layer's output and aux: FORWARD and RECOMPUTE alike. No rows: the output is an alias.

        ``resident``: keys that must outlive the forward pass, so that nothing may overwrite them.
        """
        if not calls:
            return
        rows: NodeRows = self.analysis.rows[node.index]
        hold = not self.plan.reuse.lifetimes
        written = {name for call in calls for name in call.writes}
        local: dict[str, Value] = {"scalars": self.persistent.scalars, "counters": self.persistent.counters}
        for entry in rows.aux:
            if entry.key in written:
                key = aux_key(node, entry.key)
                spec = self.analysis.precision.resolve(entry.spec)
                local[entry.key] = self.device[key] = self.new(key, spec, Role.AUX, node, hold=hold, decision=decision)
        name, spec = node.output.name, self.analysis.specs[node.output]
        for call in calls:
            if "y" in call.writes:
                source = self._overwritable(op, node, call, spec, resident)
                if source is None:
                    local["y"] = self.new(name, spec, Role.ACTIVATION, node, hold=hold, decision=decision)
                else:
                    local["y"] = self.over(name, spec, self.device[source])
            self.emit(op, node, call, local)
            if "y" in call.writes:
                if source is not None:
                    del self.device[source]  # overwritten: from here on the input is dead
                self.device[name] = local["y"]

    def _overwritable(self, op: Op, node: Node, call: Any, spec: TensorSpec, resident: set[str]) -> str | None:
        """Key of an input that this call may overwrite with its output: nobody reads it afterwards."""
        if not self.plan.reuse.in_place:
            return None
        for operand in call.over:
            tensor = self.analysis.root[node.inputs[input_index(operand) or 0]]
            value = self.device[tensor.name]
            if tensor.producer is None or value.buffer.persistent or value.spec.nbytes != spec.nbytes:
                continue
            if op is Op.RECOMPUTE:  # only what was itself remade for this, and only if no backward row wants it
                free = tensor.name in self.remade and self.analysis.readers[tensor] == 1
                free = free and tensor.name not in self.analysis.read_by_backward
            else:
                free = tensor.name not in resident and self.analysis.last_reader[tensor] == node.index
            if free:
                return tensor.name
        return None

    def hold(self, values: Iterable[Value]) -> None:
        """End of the step: read what a switched-off reuse keeps alive, so that its lifetime reaches here."""
        held = tuple(values)
        if held:
            self.append(Instruction(Op.HOLD, "step", reads=held))
