"""Cost: what every layer and every in-place unit takes, in seconds and bytes, under the plan ``keep``.

Prices are those of the simulator: each row of the lowered schedule by ``row_seconds``, copies by the profile's
``copy_seconds``. A profile file with measured rows therefore reaches the planner and the prediction alike.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from layup.unit import Key, LayerCost, Unit, columns_of
from minidnn.graph import Node
from minidnn.profiles import Profile
from minidnn.schedule.analysis import Analysis, aux_key
from minidnn.schedule.instruction import COMPUTE, Instruction, Op
from minidnn.schedule.simulate import live_curve, row_seconds
from minidnn.spec import TensorSpec, round_up

_BACKWARD = (Op.BACKWARD_WEIGHT, Op.BACKWARD_DATA)


class Costs:
    """Costs of all layers and units of one request.

    Attributes:
        layers: one entry a layer. units: in the order of their last layers. keys: what they make.
        unit_of: index of the unit of every node. columns: fields of keys and units as arrays.
        forward_seconds, backward_seconds, forward_rows, backward_rows: by node; rows are those of ``compute``, updates apart.
        forward_ends, forward_row_ends: seconds and rows until a node's forward has ended.
        out_seconds, back_seconds, first_readers, last_readers: by key. A copy takes longer by ``out_crowding`` or
            ``back_crowding`` where streamed parameters use the link, too: for ``store_seconds`` and ``load_seconds`` a step.
        around: by position (N forward, then N backward, last node first): bytes alive besides the keys: parameters,
            gradients, workspaces, the batch. entry: the same where a node's rows begin, without its own workspace and results.
        input_seconds: until the batch is where the first layer reads it.
        base_bytes: persistent device bytes.
        step_seconds, peak_bytes: compute time of a step under ``keep``, and most bytes alive.
    """

    def __init__(
        self, analysis: Analysis, rows: list[Instruction], base_bytes: int, gpu: Profile, streamed: Collection[str] = ()
    ) -> None:
        """``rows``: the lowered training step under ``keep``, with ALLOC and FREE; ``base_bytes``: persistent bytes;
        ``streamed``: layers whose parameters visit the device."""
        self.analysis = analysis
        self.gpu = gpu
        self.base_bytes = base_bytes
        nodes = analysis.graph.nodes
        count = len(nodes)
        self.nodes: list[Node] = nodes
        self.forward_seconds, self.backward_seconds = [0.0] * count, [0.0] * count
        self.forward_rows, self.backward_rows = [0] * count, [0] * count
        self._kernels: list[dict[str, float]] = [{} for _ in nodes]  # forward seconds by kernel
        self._alive, self._entry = [0] * (2 * count), [0] * (2 * count)  # by position
        self._forward_workspace = [0] * count
        self.input_seconds = self.load_seconds = self.store_seconds = 0.0
        self._streamed = frozenset(streamed)
        self._read_rows(rows, base_bytes)
        self.forward_ends = list(accumulate(self.forward_seconds, initial=self.input_seconds))[1:]
        self.forward_row_ends = list(accumulate(self.forward_rows))
        self.unit_of, self.keys, self.units = self._units()
        self.reversed_links = [(unit.number, unit.keys, unit.sources) for unit in reversed(self.units)]
        self.columns = columns_of(self.keys, self.units)
        self.first_readers, self.last_readers = [k.first_reader for k in self.keys], [k.last_reader for k in self.keys]
        self.layers = tuple(self._layer(node) for node in nodes)
        self.step_seconds = self.input_seconds + sum(self.forward_seconds) + sum(self.backward_seconds)
        self.out_crowding = 1 / (1 - min(0.9, self.store_seconds / self.step_seconds))
        self.back_crowding = 1 / (1 - min(0.9, self.load_seconds / self.step_seconds))
        self.out_seconds = [self.out_crowding * gpu.copy_seconds(key.nbytes, "d2h") for key in self.keys]
        self.back_seconds = [self.back_crowding * gpu.copy_seconds(key.nbytes, "h2d") for key in self.keys]
        self.peak_bytes = max(self._alive)
        keys_alive = self._keys_alive()
        self.around: NDArray[np.int64] = np.array(self._alive, np.int64) - keys_alive
        self.entry: NDArray[np.int64] = np.array(self._entry, np.int64) - keys_alive

    def position(self, backward_node: int) -> int:
        """Position of a node's backward."""
        return 2 * len(self.nodes) - 1 - backward_node

    def _read_rows(self, rows: list[Instruction], base_bytes: int) -> None:
        """Attribute every row to the forward or backward of a node. ADD and UPDATE rows belong to the backward before them."""
        index = {node.name: node.index for node in self.nodes}
        precision = self.analysis.precision.name
        forward, at = True, -1
        curve = live_curve(rows, base_bytes)
        before = base_bytes  # alive before the ALLOC rows of the next row
        for row, alive in zip(rows, curve, strict=True):
            if row.op is Op.ALLOC:
                continue
            if row.op is Op.FREE:
                before = alive
                continue
            if row.op is Op.FORWARD:
                at = index[row.target]
            elif row.op in _BACKWARD:
                forward, at = False, index[row.target]
            position = max(at, 0) if forward else self.position(at)
            if not self._alive[position]:
                self._entry[position] = before
            self._alive[position] = max(self._alive[position], alive)
            before = alive
            seconds = row_seconds(row, self.gpu, precision)
            self.load_seconds += seconds if row.op is Op.LOAD else 0.0
            self.store_seconds += seconds if row.op is Op.STORE else 0.0
            if row.stream != COMPUTE:
                continue
            if at < 0:
                self.input_seconds += seconds
            elif forward:
                self.forward_seconds[at] += seconds
                self.forward_rows[at] += 1
                if row.op is Op.FORWARD:
                    kernels = self._kernels[at]
                    kernels[row.kernel] = kernels.get(row.kernel, 0.0) + seconds
            else:
                self.backward_seconds[at] += seconds
                self.backward_rows[at] += row.op is not Op.UPDATE  # by which distances count
            if row.workspace is not None and forward:
                self._forward_workspace[at] = max(self._forward_workspace[at], row.workspace.spec.nbytes)

    def _units(self) -> tuple[list[int], tuple[Key, ...], tuple[Unit, ...]]:
        analysis = self.analysis
        ends = analysis.units()
        members: dict[str, list[Node]] = {}
        for node in self.nodes:
            members.setdefault(ends[node.name], []).append(node)
        order = [node.name for node in self.nodes if node.name in members]
        numbers = {name: position for position, name in enumerate(order)}
        unit_of = [numbers[ends[node.name]] for node in self.nodes]
        readers = self._readers()
        keys: list[Key] = []
        by_name: dict[str, int] = {}
        for node in self.nodes:
            for name, nbytes in self._made(node):
                backward = readers.get(name, [])
                forward = analysis.last_reader.get(node.output, node.index) if name == node.name else node.index
                by_name[name] = len(keys)
                key = Key(
                    name=name,
                    unit=unit_of[node.index],
                    nbytes=nbytes,
                    footprint=round_up(nbytes),
                    made=node.index,
                    last_forward=forward,
                    first_reader=max(backward, default=-1),
                    last_reader=min(backward, default=-1),
                )
                keys.append(key)
        units = tuple(self._unit(numbers[name], members[name], keys, by_name) for name in order)
        return unit_of, tuple(keys), units

    def _readers(self) -> dict[str, list[int]]:
        """By key: the nodes whose backward reads it."""
        found: dict[str, list[int]] = {}
        for node in self.nodes:
            for key in self.analysis.rows[node.index].backward_reads:
                found.setdefault(key, []).append(node.index)
        return found

    def _made(self, node: Node) -> list[tuple[str, int]]:
        """Keys of a node and their bytes."""
        analysis, spec = self.analysis, self.analysis.specs[node.output]
        sizes = {node.output.name: spec.nbytes}
        for aux in analysis.rows[node.index].aux:
            sizes[aux_key(node, aux.key)] = analysis.precision.resolve(aux.spec).nbytes
        return [(key, sizes[key]) for key in analysis.outputs(node)]

    def _unit(self, number: int, members: list[Node], keys: list[Key], by_name: dict[str, int]) -> Unit:
        inside = {node.index for node in members}
        own = [by_name[key] for node in members for key in self.analysis.outputs(node)]
        # What the chain overwrites on its way cannot be stored: only the last output, and the aux.
        own = [k for k in own if keys[k].made == members[-1].index or keys[k].name != self.nodes[keys[k].made].name]
        reads = [self.analysis.root[tensor].name for node in members for tensor in node.inputs]
        sources = [by_name[r] for r in dict.fromkeys(reads) if r in by_name and keys[by_name[r]].made not in inside]
        stored = [k for k in own if keys[k].first_reader >= 0]
        moved = stored or own
        return Unit(
            number=number,
            name=members[-1].name,
            layers=tuple(node.name for node in members),
            kinds=tuple(node.layer.kind for node in members),
            first=members[0].index,
            last=members[-1].index,
            keys=tuple(own),
            sources=tuple(sources),
            forward_seconds=sum(self.forward_seconds[node.index] for node in members),
            recompute_seconds=sum(self._recompute_seconds(node) for node in members),
            recompute_rows=sum(len(self.analysis.rows[node.index].recompute) for node in members),
            weight_seconds=sum(self._weight_seconds(node) for node in members),
            footprint=sum(keys[k].footprint for k in own),
            stored=sum(keys[k].footprint for k in stored),
            recompute_workspace=round_up(max(self._forward_workspace[node.index] for node in members)),
            offload_seconds=sum(self.gpu.copy_seconds(keys[k].nbytes, "d2h") for k in moved),
            prefetch_seconds=sum(self.gpu.copy_seconds(keys[k].nbytes, "h2d") for k in moved),
        )

    def _recompute_seconds(self, node: Node) -> float:
        """Recomputing issues kernels that forward has issued, so it is priced by their forward rows."""
        kernels = self._kernels[node.index]
        return sum(kernels[kernel] for kernel in {c.kernel for c in self.analysis.rows[node.index].recompute})

    def _weight_seconds(self, node: Node) -> float:
        if node.name not in self._streamed:
            return 0.0
        resolve = self.analysis.precision.resolve
        nbytes = sum(resolve(TensorSpec(p.shape, p.dtype)).nbytes for p in node.parameters if p.trainable)
        return self.gpu.copy_seconds(nbytes, "h2d") if nbytes else 0.0

    def _layer(self, node: Node) -> LayerCost:
        made = self._made(node)
        read = self.analysis.read_by_backward
        return LayerCost(
            name=node.name,
            kind=node.layer.kind,
            unit=self.units[self.unit_of[node.index]].name,
            forward_seconds=self.forward_seconds[node.index],
            backward_seconds=self.backward_seconds[node.index],
            recompute_seconds=self._recompute_seconds(node),
            stored_bytes=sum(nbytes for key, nbytes in made if key in read),
            offload_seconds=sum(self.gpu.copy_seconds(nbytes, "d2h") for _, nbytes in made),
        )

    def _keys_alive(self) -> NDArray[np.int64]:
        """Bytes of the keys alive at every position under ``keep``."""
        change = np.zeros(2 * len(self.nodes) + 1, np.int64)
        for unit in self.units:
            for k in unit.keys:
                key = self.keys[k]
                end = key.last_forward if key.last_reader < 0 else self.position(key.last_reader)
                change[key.made] += key.footprint
                change[end + 1] -= key.footprint
        alive: NDArray[np.int64] = np.cumsum(change)[:-1]
        return alive
