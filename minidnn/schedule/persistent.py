"""The persistent region: what lives as long as the program, at the same offsets in every schedule of it."""

from __future__ import annotations

from itertools import count

from minidnn.graph import Graph, Node, Parameter, Role
from minidnn.optim import Optimizer
from minidnn.precision import Precision
from minidnn.scalars import COUNTER_COUNT, SCALAR_COUNT, SCALING_COUNT
from minidnn.schedule.blocks import Flat, Group, laid_out, slices, trainable_size
from minidnn.schedule.flats import Line
from minidnn.schedule.instruction import HOST, Buffer, Value
from minidnn.schedule.plan import Plan, PlanError
from minidnn.schedule.ranks import Ranks
from minidnn.schedule.shared_scale import SharedScale
from minidnn.spec import TensorSpec, round_up

CONSTANT_BYTES = 512  # scalars in the first half, counters in the second
LOGITS_OFFSET = 512  # of the pinned result slots; the loss lies before them


class Persistent:
    """Layout of parameters, optimizer state, running statistics, scalars, staging and pinned slots.

    Attributes:
        parameters: value of every parameter and running statistic, by full name.
        weights: the 1-D block of every layer with trainable parameters, by layer name; ``slots``: the same for every
            optimizer slot (``master`` among them, for 16-bit weights); ``gradients``: the same, where they accumulate, or all
            must be known before the first update: to be finite, or their norm.
        lines: in data parallelism (``ranks``), the flat strips of parameters, gradients and this rank's optimizer state; then
            ``slots`` is empty.
        staging, slot: one batch on the device, and the first of two pinned host copies of it (``other_slot``).
    """

    scaling: Value | None = None  # state of dynamic loss scaling
    shared: SharedScale | None = None  # and what goes with it in data parallelism

    def __init__(
        self, graph: Graph, precision: Precision, optimizer: Optimizer, *, accumulate: bool, plan: Plan,
        ranks: Ranks | None = None, clip_grad_norm: float | None = None,
    ) -> None:  # fmt: skip
        self.contents = count()
        self.ranks = ranks
        self.clip_grad_norm = clip_grad_norm
        self.lines: list[Line] = []
        self.precision = precision
        self.optimizer = optimizer
        self.weights: dict[str, Value] = {}
        self.slots: dict[str, dict[str, Value]] = {}
        self.gradients: dict[str, Value] = {}
        self.parameters: dict[str, Value] = {}
        self.buffers: list[Buffer] = []
        self.host_buffers: list[Buffer] = []
        self.groups: list[Group] = []
        streamed = plan.streamed_layers(node.name for node in graph.nodes)
        if ranks is not None and streamed:
            raise PlanError(
                f"streamed parameters cannot be combined with the strategy {ranks.strategy.name}, which keeps all parameters "
                "in flat buffers on the device; make a plan without them, or train on one rank"
            )
        self._add_groups([n for n in graph.nodes if n.name in streamed and trainable_size(n)], plan.group_bytes)
        by_dtype: dict[str, list[Node]] = {}
        for node in graph.nodes:
            if any(p.trainable for p in node.parameters):
                by_dtype.setdefault(self._dtype(node.parameters[0]), []).append(node)
        for dtype, nodes in by_dtype.items():
            if ranks is not None:
                self._add_line(dtype, nodes, ranks)
                continue
            resident = [node for node in nodes if node.name not in self.weights]
            if resident:
                self._add_flats(dtype, resident, self._flats(dtype))
            if accumulate or precision.scaled or clip_grad_norm is not None:
                self._add_flats(dtype, nodes, [("gradients", dtype, Role.PARAM_GRAD)])
        self._add_state(graph)
        self._add_constants()
        self._add_batch(graph)

    def _add_constants(self) -> None:
        """The numbers of a run, and the state of dynamic loss scaling."""
        statistics = self.precision.statistics
        scalars = Buffer("scalars", CONSTANT_BYTES, Role.OPTIMIZER, persistent=True)
        self.constants = self._value("constants", scalars, 0, TensorSpec((CONSTANT_BYTES,), "uint8"))
        self.scalars = self.constants._replace(name="scalars", spec=TensorSpec((SCALAR_COUNT,), statistics))
        self.counters = self.constants._replace(
            name="counters", offset=CONSTANT_BYTES // 2, spec=TensorSpec((COUNTER_COUNT,), "uint32")
        )
        self.buffers.append(scalars)
        if self.precision.scaled:
            spec = TensorSpec((SCALING_COUNT,), statistics)
            buffer = Buffer("loss scaling", spec.nbytes, Role.OPTIMIZER, persistent=True)
            self.buffers.append(buffer)
            self.scaling = self._value("loss scaling", buffer, 0, spec)
            if self.ranks is not None:
                self.shared = SharedScale(self.ranks, self.scaling, self.constants, self.contents)
                self.buffers += self.shared.buffers

    def _dtype(self, parameter: Parameter) -> str:
        return self.precision.resolve(TensorSpec(parameter.shape, parameter.dtype)).dtype

    def _value(self, name: str, buffer: Buffer, offset: int, spec: TensorSpec) -> Value:
        return Value(name, buffer, offset, spec, next(self.contents))

    def _flats(self, dtype: str) -> list[tuple[str, str, Role]]:
        """What is kept for parameters of a dtype: name, dtype and role of each flat."""
        statistics = self.precision.statistics
        narrow = self.precision.master and dtype != statistics
        master = [("master", statistics, Role.OPTIMIZER)] if narrow else []
        state = [(slot, statistics, Role.OPTIMIZER) for slot in self.optimizer.slots]
        return [("parameters", dtype, Role.PARAMETER), *master, *state]

    def _add_flats(self, dtype: str, nodes: list[Node], wanted: list[tuple[str, str, Role]]) -> None:
        for name, kind, role in wanted:
            flat = Flat(f"{name}.{dtype}", kind, role, nodes, self.contents)
            self.buffers.append(flat.buffer)
            for node in nodes:
                self._set_block(name, node, flat.blocks[node.name])

    def _add_line(self, dtype: str, nodes: list[Node], ranks: Ranks) -> None:
        slots = {name: kind for name, kind, role in self._flats(dtype) if role is Role.OPTIMIZER}
        line = Line(dtype, [(node, trainable_size(node)) for node in nodes], slots, ranks, self.contents)
        self.lines.append(line)
        self.buffers += line.buffers
        for node in nodes:
            self._set_block("parameters", node, line.block(line.weights, node.name))
            self._set_block("gradients", node, line.block(line.gradients, node.name))

    def _add_groups(self, nodes: list[Node], group_bytes: int) -> None:
        """Cut the streamed layers, in graph order, into groups of at least ``group_bytes`` of weights."""
        group: list[Node] = []
        nbytes = 0
        for node in nodes:
            group.append(node)
            nbytes += TensorSpec((trainable_size(node),), self._dtype(node.parameters[0])).nbytes
            if nbytes >= group_bytes or node is nodes[-1]:
                self._add_group(group)
                group, nbytes = [], 0

    def _add_group(self, nodes: list[Node]) -> None:
        parts = [
            (slot, node, TensorSpec((trainable_size(node),), dtype))
            for node in nodes
            for slot, dtype, _ in self._flats(self._dtype(node.parameters[0]))
        ]
        parts.sort(key=lambda part: part[0] != "parameters")  # stable: weights first
        blocks = [(f"{slot}.{node.name}", spec) for slot, node, spec in parts]
        group = Group(f"group {len(self.groups)}", nodes[0].name, blocks, next(self.contents))
        self.groups.append(group)
        self.host_buffers.append(group.buffer)
        for slot, node, _ in parts:
            self._set_block(slot, node, group.blocks[f"{slot}.{node.name}"])

    def _set_block(self, slot: str, node: Node, block: Value) -> None:
        if slot == "parameters":
            self.weights[node.name] = block
            self.parameters.update((f"{node.name}.{key}", value) for key, value in slices(node, block).items())
        elif slot == "gradients":
            self.gradients[node.name] = block
        else:
            self.slots.setdefault(slot, {})[node.name] = block

    @property
    def state_buffers(self) -> list[Buffer]:
        """Every persistent buffer that holds state of the training: all but the pinned slots of batches and results."""
        return [*self.buffers, *(group.buffer for group in self.groups)]

    def _add_state(self, graph: Graph) -> None:
        """What layers keep that is not trained: running statistics."""
        specs = {
            p.name: TensorSpec(p.shape, p.dtype) for node in graph.nodes for p in node.parameters if not p.trainable
        }
        places, nbytes = laid_out((name, self.precision.resolve(spec)) for name, spec in specs.items())
        if places:
            state = Buffer("state", nbytes, Role.STATE, persistent=True)
            self.buffers.append(state)
            self.parameters.update((name, self._value(name, state, at, spec)) for name, (at, spec) in places.items())

    def _add_batch(self, graph: Graph) -> None:
        """A batch travels as one range: constants, labels, pixels. The same layout on host and device."""
        nbytes = self.batch_bytes(graph)
        self.staging = Buffer("staging", nbytes, Role.INPUT, persistent=True)
        self.buffers.append(self.staging)
        self.slot = Buffer("batch slot 0", nbytes, Role.INPUT, space=HOST, persistent=True)
        self.other_slot = Buffer("batch slot 1", nbytes, Role.INPUT, space=HOST, persistent=True)
        # Two results in flight, like the two batches: loss first, logits after.
        nbytes = LOGITS_OFFSET + (graph.loss_node.inputs[0].spec.size * 4 if hasattr(graph, "loss_node") else 0)
        self.result = Buffer("result slot 0", nbytes, Role.ACTIVATION, space=HOST, persistent=True)
        self.other_result = Buffer("result slot 1", nbytes, Role.ACTIVATION, space=HOST, persistent=True)
        self.host_buffers += [self.slot, self.other_slot, self.result, self.other_result]

    @staticmethod
    def batch_bytes(graph: Graph) -> int:
        """Bytes of the constants, the labels and the pixels (always float32) of one batch."""
        labels = sum(round_up(t.spec.nbytes) for t in graph.labels)
        return CONSTANT_BYTES + labels + graph.inputs[0].spec.size * 4

    def batch_values(self, graph: Graph, buffer: Buffer) -> dict[str, Value]:
        """The parts of a batch of ``graph`` inside ``buffer``: constants, labels, pixels, and ``all`` of it."""
        pixels, labels = graph.inputs[0], graph.labels[0]
        after = CONSTANT_BYTES + round_up(labels.spec.nbytes)
        content = next(self.contents)
        spec = TensorSpec(pixels.spec.shape, "float32")
        return {
            "constants": Value(f"{buffer.name}.constants", buffer, 0, TensorSpec((CONSTANT_BYTES,), "uint8"), content),
            "labels": Value(f"{buffer.name}.labels", buffer, CONSTANT_BYTES, labels.spec, content),
            "pixels": Value(f"{buffer.name}.pixels", buffer, after, spec, content),
            "all": Value(f"{buffer.name}.batch", buffer, 0, TensorSpec((after + spec.nbytes,), "uint8"), content),
        }
