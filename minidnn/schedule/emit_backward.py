"""StepEmitter: an Emitter that also knows gradients: contributions, their sums, and the update of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidnn.graph import Node, Role, Tensor
from minidnn.schedule.analysis import Analysis, aux_key
from minidnn.schedule.blocks import slices
from minidnn.schedule.emit import Emitter
from minidnn.schedule.instruction import Buffer, Instruction, Op, Value
from minidnn.schedule.persistent import Persistent
from minidnn.schedule.plan import Plan
from minidnn.schedule.recipe import Recipe


class StepEmitter(Emitter):
    """Rows of one training step under construction.

    Attributes:
        grads: for every tensor, the sum of the gradient contributions so far.
    """

    def __init__(self, analysis: Analysis, persistent: Persistent, plan: Plan, recipe: Recipe) -> None:
        super().__init__(analysis, persistent, plan, recipe)
        self.grads: dict[str, Value] = {}
        self.seconds: dict[str, Value] = {}  # second contributions, which the layer's own backward row will add
        self.sharers: dict[Buffer, int] = {}  # how many entries of ``grads`` and ``seconds`` show a buffer

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

    def pop_second(self, tensor: Tensor) -> Value | None:
        """Take the contribution that is not in the gradient of ``tensor`` yet."""
        value = self.seconds.pop(tensor.name, None)
        if value is not None:
            self.sharers[value.buffer] -= 1
        return value

    def contribute(self, tensor: Tensor, value: Value) -> None:
        """Add a contribution to the gradient of ``tensor``: the first is taken as it is, later ones by an ADD row.

        The sum goes in place into a contribution that nobody else shows; otherwise into a buffer of its own. The last one
        is left to the layer that made the tensor, if its backward can add it.
        """
        first = self.pop_grad(tensor)
        if first is None:
            self.set_grad(tensor, value)
            return
        if self._joins(tensor):
            second = self.pop_second(tensor)
            self.seconds[tensor.name] = value
            self.sharers[value.buffer] = self.sharers.get(value.buffer, 0) + 1
            if second is None:
                self.set_grad(tensor, first)
                return
            value = second
        name = f"d_{tensor.name}"
        exclusive = [v for v in (first, value) if not self.sharers.get(v.buffer)] if self.plan.reuse.in_place else []
        total = self.over(name, first.spec, exclusive[0]) if exclusive else self.new_grad(tensor, tensor.producer)
        self.append(Instruction(Op.ADD, name, "add_forward", (total,), (first, value)))
        self.set_grad(tensor, total)

    def _joins(self, tensor: Tensor) -> bool:
        """Whether the layer that made a tensor adds two contributions itself."""
        calls = () if tensor.producer is None else self.analysis.rows[tensor.producer.index].backward_weight
        return bool(calls) and bool(calls[0].joins)

    def new_grad(self, tensor: Tensor, node: Node | None) -> Value:
        """A buffer for the gradient of a tensor."""
        hold = not self.plan.reuse.gradient_window
        return self.new(f"d_{tensor.name}", self.analysis.specs[tensor], Role.GRAD, node, hold=hold)

    def backward_weight(
        self, node: Node, calls: tuple[Any, ...], local: dict[str, Value], *, total: Value | None, accumulates: bool
    ) -> Value | None:
        """Emit the weight-gradient rows and return the layer's gradient block, complete for this micro-batch.

        ``total``: where the gradients of an accumulation group live; None: in a block of their own. ``accumulates``: add
        to what earlier micro-batches left, by the kernel itself where the recipe says that it can, else through a
        temporary. ``local`` receives this micro-batch's own gradients.
        """
        if not calls:
            return None
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
            if call.joins and "dy1" in local:
                after = call.reads.index("dy") + 1
                call = call._replace(kernel=call.joins, reads=(*call.reads[:after], "dy1", *call.reads[after:]))
            if "dz" in call.writes:
                local["dz"] = self._behind(node, call, local)
            self.emit(Op.BACKWARD_WEIGHT, node, call, local)
        if total is not None and block is not total:
            self.append(Instruction(Op.ADD, f"{node.name}.gradient", "add_forward", (total,), (total, block)))
            return total
        return block

    def _behind(self, node: Node, call: Any, local: dict[str, Value]) -> Value:
        """Where a row puts the gradient behind an activation that is part of its layer: over dy, if nobody else shows it."""
        for name in call.over if self.plan.reuse.in_place else ():
            dy = local.get(name)
            if dy is not None and not dy.buffer.persistent and not self.sharers.get(dy.buffer):
                return self.over(f"d_{node.output.name}:z", dy.spec, dy)
        return self.new_grad(node.output, node)

    def backward_data(
        self, node: Node, index: int, calls: tuple[Any, ...], local: dict[str, Value], *, last: bool
    ) -> None:
        """Emit the rows of one input's gradient and add it to what that input has. No rows: it is the output's gradient."""
        tensor = node.inputs[index]
        spec = self.analysis.specs[tensor]
        if not calls:
            self.contribute(tensor, local.get("dz", local["dy"]).alias(f"d_{tensor.name}", spec))
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

    def update(self, ready: Sequence[tuple[Node, Value]]) -> None:
        """Emit the update of some layers' weights; 16-bit weights are rounded from their master copy.

        Of several layers at once: one row for all whose weights have one type, since each of the rows would take the GPU
        microseconds to begin; not where parameters are streamed, since a row needs all its operands at the same time.
        """
        p = self.persistent
        together: dict[str, list[tuple[Node, Value]]] = {}
        for node, gradient in ready:
            master = "master" in p.slots and node.name in p.slots["master"]
            if master or (len(ready) > 1 and not p.groups):
                key = gradient.spec.dtype if not p.groups else node.name
                together.setdefault(key, []).append((node, gradient))
            else:
                weight, state = p.weights[node.name], [p.slots[slot][node.name] for slot in p.optimizer.slots]
                writes, reads = (weight, *state), (gradient, p.scalars)
                kernel, attrs = p.optimizer.kernel, p.optimizer.attrs
                self.append(Instruction(Op.UPDATE, node.name, kernel, writes, reads, attrs=attrs, accumulates=True))
        for pairs in together.values():
            self._update_all(pairs)

    def _update_all(self, pairs: Sequence[tuple[Node, Value]]) -> None:
        """One row for layers of one type: weights (the master copies, where there are), optimizer state, rounded weights."""
        p, names = self.persistent, [node.name for node, _ in pairs]
        weights = [p.weights[name] for name in names]
        narrow = "master" in p.slots and names[0] in p.slots["master"]
        groups = [[p.slots["master"][name] for name in names] if narrow else weights]
        groups += [[p.slots[slot][name] for name in names] for slot in p.optimizer.slots]
        groups += [weights] if narrow else []
        writes = tuple(value for group in groups for value in group)
        reads = (*(gradient for _, gradient in pairs), p.scalars)
        attrs = {"kernel": p.optimizer.kernel, "count": len(pairs), "narrow": narrow, "settings": p.optimizer.attrs}
        target = names[0] if len(names) == 1 else "optimizer"
        self.append(Instruction(Op.UPDATE, target, "update_all", writes, reads, attrs=attrs, accumulates=True))
