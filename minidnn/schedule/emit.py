"""Emitter: turns a layer's kernel calls into rows on buffers. ``lower`` decides when; this decides on which bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minidnn.graph import Node, Role, Tensor
from minidnn.schedule.analysis import Analysis, NodeRows, aux_key, input_index
from minidnn.schedule.instruction import COMPUTE, DEVICE, Buffer, Instruction, Op, Value
from minidnn.schedule.persistent import Persistent, slices
from minidnn.schedule.plan import Decision, Plan
from minidnn.schedule.recipe import Recipe
from minidnn.spec import TensorSpec


class Emitter:
    """Rows of one schedule under construction.

    Attributes:
        rows: the list so far.
        device: for every key (see ``Analysis``), its value on the device now.
        grads: for every tensor, the sum of the gradient contributions so far.
    """

    def __init__(self, analysis: Analysis, persistent: Persistent, plan: Plan, recipe: Recipe) -> None:
        self.analysis = analysis
        self.persistent = persistent
        self.plan = plan
        self.recipe = recipe
        self.rows: list[Instruction] = []
        self.device: dict[str, Value] = {}
        self.grads: dict[str, Value] = {}
        self.sharers: dict[Buffer, int] = {}  # how many entries of ``grads`` show a buffer
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
        self.rows.append(
            Instruction(
                op,
                node.name,
                call.kernel,
                tuple([self.operand(node, name, local) for name in call.writes]),
                tuple([self.operand(node, name, local) for name in call.reads]),
                workspace,
                attrs,
                call.accumulates,
                flops=call.flops,
            )
        )

    def workspace(self, node: Node, nbytes: int) -> Value | None:
        """Scratch for one row; with workspace reuse off, one range per layer that lives for the whole step."""
        if not nbytes:
            return None
        spec = TensorSpec((nbytes,), "uint8")
        if self.plan.reuse.workspace:
            return self.new(f"{node.name}.workspace", spec, Role.WORKSPACE, node)
        if node not in self.workspaces:
            directions = ("forward", "backward_data", "backward_weight")
            largest = max(self.recipe.engine(node.name, d).workspace_bytes for d in directions)
            whole = TensorSpec((largest,), "uint8")
            self.workspaces[node] = self.new(f"{node.name}.workspace", whole, Role.WORKSPACE, node, hold=True)
        return self.workspaces[node]._replace(spec=spec)

    def copy(self, op: Op, target: str, destination: Value, source: Value, stream: str = COMPUTE) -> None:
        """Append a copy of equally many bytes."""
        self.rows.append(Instruction(op, target, "", (destination,), (source,), stream=stream))

    # -- forward ----------------------------------------------------------------------------------------------------
    def make(
        self,
        op: Op,
        node: Node,
        calls: tuple[Any, ...],
        stored: set[str],
        *,
        aux: bool = True,
        decision: Decision = Decision.KEEP,
    ) -> None:
        """Emit the rows that make a layer's output and aux: FORWARD and RECOMPUTE alike. No rows: the output is an alias."""
        if not calls:
            return
        rows: NodeRows = self.analysis.rows[node.index]
        hold = not self.plan.reuse.lifetimes
        written = {name for call in calls for name in call.writes}
        local: dict[str, Value] = {"scalars": self.persistent.scalars, "counters": self.persistent.counters}
        for entry in rows.aux if aux else ():
            if entry.key in written:
                key = aux_key(node, entry.key)
                spec = self.analysis.precision.resolve(entry.spec)
                local[entry.key] = self.device[key] = self.new(key, spec, Role.AUX, node, hold=hold, decision=decision)
        name, spec = node.output.name, self.analysis.specs[node.output]
        for call in calls:
            if "y" in call.writes:
                source = self._overwritable(op, node, call, spec, stored)
                if source is None:
                    local["y"] = self.new(name, spec, Role.ACTIVATION, node, hold=hold, decision=decision)
                else:
                    local["y"] = self.over(name, spec, self.device[source])
            self.emit(op, node, call, local)
            if "y" in call.writes:
                if source is not None:
                    del self.device[source]  # overwritten: from here on the input is dead
                self.device[name] = local["y"]

    def _overwritable(self, op: Op, node: Node, call: Any, spec: TensorSpec, stored: set[str]) -> str | None:
        """Key of an input that this call may overwrite with its output: nobody reads it afterwards."""
        if not self.plan.reuse.in_place:
            return None
        for operand in call.over:
            tensor = self.analysis.root[node.inputs[input_index(operand) or 0]]
            value = self.device[tensor.name]
            if tensor.producer is None or value.buffer.persistent or value.spec.nbytes != spec.nbytes:
                continue
            if op is Op.RECOMPUTE:  # only what this backward remade, and only if no backward row wants it
                free = value.buffer.decision == Decision.RECOMPUTE and self.analysis.readers[tensor] == 1
                free = free and tensor.name not in self.analysis.read_by_backward
            else:
                free = tensor.name not in stored and self.analysis.last_reader[tensor] == node.index
            if free:
                return tensor.name
        return None

    # -- backward ---------------------------------------------------------------------------------------------------
    def set_grad(self, tensor: Tensor, value: Value) -> None:
        """Record ``value`` as the gradient of ``tensor`` so far."""
        self.grads[tensor.name] = value
        self.sharers[value.buffer] = self.sharers.get(value.buffer, 0) + 1

    def pop_grad(self, tensor: Tensor) -> Value | None:
        """Take the gradient of ``tensor``, complete since all its readers are done."""
        value = self.grads.pop(tensor.name, None)
        if value is not None:
            self.sharers[value.buffer] -= 1
        return value

    def contribute(self, tensor: Tensor, value: Value) -> None:
        """Add a contribution to the gradient of ``tensor``: the first is taken as it is, later ones by an ADD row.

        The sum goes in place into a contribution that nobody else shows; otherwise into a buffer of its own.
        """
        first = self.pop_grad(tensor)
        if first is None:
            self.set_grad(tensor, value)
            return
        name = f"d_{tensor.name}"
        exclusive = [v for v in (first, value) if not self.sharers.get(v.buffer)] if self.plan.reuse.in_place else []
        total = self.over(name, first.spec, exclusive[0]) if exclusive else self.new_grad(tensor, tensor.producer)
        self.rows.append(Instruction(Op.ADD, name, "add_forward", (total,), (first, value)))
        self.set_grad(tensor, total)

    def new_grad(self, tensor: Tensor, node: Node | None) -> Value:
        """A buffer for the gradient of a tensor."""
        hold = not self.plan.reuse.gradient_window
        return self.new(f"d_{tensor.name}", self.analysis.specs[tensor], Role.GRAD, node, hold=hold)

    def backward_weight(
        self, node: Node, calls: tuple[Any, ...], local: dict[str, Value], *, accumulates: bool
    ) -> Value | None:
        """Emit the weight-gradient rows and return the layer's gradient block, complete for this micro-batch.

        ``accumulates``: add to what earlier micro-batches left, by the kernel itself where the recipe says that it can,
        else through a temporary. ``local`` receives this micro-batch's own gradients.
        """
        if not calls:
            return None
        total = self.persistent.gradients.get(node.name)
        direct = accumulates and all(call.kernel in self.recipe.accumulating for call in calls)
        if total is None or (accumulates and not direct):
            spec = self.persistent.weights[node.name].spec
            hold = not self.plan.reuse.lifetimes
            block = self.new(f"{node.name}.gradient", spec, Role.PARAM_GRAD, node, hold=hold)
        else:
            block = total
        local.update({f"d_{key}": value for key, value in slices(node, block).items()})
        for call in calls:
            if direct:
                call = call._replace(attrs={**call.attrs, "accumulate": True}, accumulates=True)
            self.emit(Op.BACKWARD_WEIGHT, node, call, local)
        if total is not None and block is not total:
            self.rows.append(Instruction(Op.ADD, f"{node.name}.gradient", "add_forward", (total,), (total, block)))
            return total
        return block

    def backward_data(
        self, node: Node, index: int, calls: tuple[Any, ...], local: dict[str, Value], *, last: bool
    ) -> None:
        """Emit the rows of one input's gradient and add it to what that input has. No rows: it is the output's gradient."""
        tensor = node.inputs[index]
        spec = self.analysis.specs[tensor]
        if not calls:
            self.contribute(tensor, local["dy"].alias(f"d_{tensor.name}", spec))
            return
        target = "dx" if "dx" in calls[-1].writes else f"dx{index}"
        source = next((local.get(o) or self.device.get(aux_key(node, o)) for o in calls[-1].over), None)
        if (
            source is not None
            and last
            and len(calls) == 1
            and self.plan.reuse.in_place
            and source.spec.nbytes == spec.nbytes
            and not source.buffer.persistent
            and not self.sharers.get(source.buffer)
        ):
            local[target] = self.over(f"d_{tensor.name}", spec, source)
        else:
            local[target] = self.new_grad(tensor, tensor.producer)
        for call in calls:
            self.emit(Op.BACKWARD_DATA, node, call, local)
        self.contribute(tensor, local[target])

    def update(self, node: Node, gradient: Value) -> None:
        """Emit the update of a layer's weights; 16-bit weights are rounded from their master copy."""
        p = self.persistent
        weight = p.weights[node.name]
        master = p.slots["master"].get(node.name, weight) if "master" in p.slots else weight
        state = tuple(p.slots[slot][node.name] for slot in p.optimizer.slots)
        kernel, attrs = p.optimizer.kernel, p.optimizer.attrs
        writes, reads = (master, *state), (gradient, p.scalars)
        self.rows.append(Instruction(Op.UPDATE, node.name, kernel, writes, reads, attrs=attrs, accumulates=True))
        if master is not weight:
            self.rows.append(Instruction(Op.UPDATE, node.name, "convert", (weight,), (master,)))

    def hold(self, values: Iterable[Value]) -> None:
        """End of the step: read what a switched-off reuse keeps alive, so that its lifetime reaches here."""
        held = tuple(values)
        if held:
            self.rows.append(Instruction(Op.HOLD, "step", reads=held))
