"""ParallelState: state of a model whose optimizer tensors are spread over the ranks. Files hold them whole.

Saving and loading are collective: every rank calls them. What is saved does not depend on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidnn.executor import Executor
from minidnn.layers import Graph
from minidnn.layers.layout import to_torchvision
from minidnn.parallel.communicator import Communicator
from minidnn.precision import Precision
from minidnn.schedule.blocks import slices
from minidnn.schedule.flats import Line
from minidnn.schedule.instruction import Value
from minidnn.schedule.persistent import Persistent
from minidnn.state import LOSS_SCALING, ModelState


class ParallelState(ModelState):
    """See the module."""

    def __init__(
        self,
        graph: Graph,
        persistent: Persistent,
        executor: Executor,
        precision: Precision,
        communicator: Communicator,
    ) -> None:
        super().__init__(graph, persistent, executor, precision)
        self._communicator = communicator
        assert persistent.ranks is not None
        self._ranks = persistent.ranks

    def initialise(self, seed: int) -> None:
        """As on one rank; each rank then takes its part of the master copies."""
        super().initialise(seed)
        if (shared := self._persistent.shared) is not None and self._persistent.scaling is not None:
            for strip in shared.made:
                self._write(strip.whole, self._read(self._persistent.scaling))
        for line in self._persistent.lines:
            if (own := line.slots.get("master")) is not None:
                whole = self._executor.device.get(self._executor.view(line.weights.whole))
                self._write(own.whole, np.asarray(whole[slice(*line.owned)], line.slot_dtypes["master"]))

    # -- whole lines ------------------------------------------------------------------------------------------------
    def _whole(self, line: Line, slot: str) -> NDArray[Any]:
        """All ranks' parts of a slot, put together on the host. Collective."""
        whole = np.zeros(line.size, line.slot_dtypes[slot])
        strip = line.slots.get(slot)
        mine = None if strip is None else self._read(strip.whole)
        for rank, part in enumerate(self._communicator.exchange(mine)):
            if part is not None:
                begin, end = self._ranks.of(rank).owned(line.size)
                whole[begin:end] = part
        return whole

    def _write_own(self, line: Line, slot: str, value: Value, array: NDArray[Any]) -> None:
        """Of one parameter's part of a slot, keep what this rank owns. What lies between parameters is zero and stays so."""
        begin = value.offset // np.dtype(line.slot_dtypes[slot]).itemsize
        first, end = max(begin, line.owned[0]), min(begin + value.spec.size, line.owned[1])
        if first < end:
            part = line.slots[slot].part(first - line.owned[0], end - line.owned[0])
            self._write(part, array.reshape(-1)[first - begin : end - begin])

    def _line_values(self, line: Line, slot: str) -> dict[str, Value]:
        """Where each parameter stands in the whole of a slot."""
        values: dict[str, Value] = {}
        for node in self._graph.nodes:
            if node.name in line.places:
                begin, elements = line.places[node.name]
                spec = line.weights.whole.spec._replace(dtype=line.slot_dtypes[slot])
                block = line.weights.whole._replace(spec=spec)
                offset = spec._replace(shape=(begin,)).nbytes
                block = block._replace(offset=offset, spec=spec._replace(shape=(elements,)))
                values.update((f"{node.name}.{key}", v) for key, v in slices(node, block).items())
        return values

    # -- saving and loading -----------------------------------------------------------------------------------------
    def parameters(self) -> dict[str, NDArray[Any]]:
        """All parameters and running statistics; of 16-bit weights the master copies. Collective where there are any."""
        self._executor.device.synchronize()
        arrays = {name: self._read(self._truth[name]) for name in self._parameters}
        for line in self._persistent.lines:
            if "master" in line.slot_dtypes:
                whole = self._whole(line, "master")
                arrays |= {name: _cut(whole, v) for name, v in self._line_values(line, "master").items()}
        return self.export_all(arrays)

    def load_parameters(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take parameters and running statistics, the same on every rank."""
        super().load_parameters(state)
        for line in self._persistent.lines:
            if "master" in line.slot_dtypes:
                for name, value in self._line_values(line, "master").items():
                    self._write_own(line, "master", value, self._ours(name, state[name]))

    def optimizer(self) -> dict[str, NDArray[Any]]:
        """State of every slot but the master weights, whole. Collective."""
        self._executor.device.synchronize()
        scaling = self._persistent.scaling
        found = {} if scaling is None else {LOSS_SCALING: self._read(scaling)}
        for slot in self._persistent.optimizer.slots:
            for line in self._persistent.lines:
                whole = self._whole(line, slot)
                for name, value in self._line_values(line, slot).items():
                    found[f"optimizer.{slot}.{name}"] = to_torchvision(name, _cut(whole, value), self._spatial)
        return found

    def load_optimizer(self, state: Mapping[str, NDArray[Any]], beside: tuple[str, ...] = ()) -> None:
        """Take the whole state of every slot, the same on every rank; keep this rank's part."""
        scaling = state.get(LOSS_SCALING)
        groups = {f"optimizer.{slot}.": self._merged(slot) for slot in self._persistent.optimizer.slots}
        names = {prefix + name: prefix for prefix, values in groups.items() for name in values}
        self._checked("the optimizer state", names, groups, state, (LOSS_SCALING, *beside))
        self._executor.device.synchronize()
        for slot in self._persistent.optimizer.slots:
            for line in self._persistent.lines:
                for name, value in self._line_values(line, slot).items():
                    self._write_own(line, slot, value, self._ours(name, state[f"optimizer.{slot}.{name}"]))
        if scaling is not None and self._persistent.scaling is not None:
            self._write(self._persistent.scaling, scaling)

    def _merged(self, slot: str) -> dict[str, Value]:
        return {n: v for line in self._persistent.lines for n, v in self._line_values(line, slot).items()}

    # -- agreement --------------------------------------------------------------------------------------------------
    def average_statistics(self) -> None:
        """Give every rank the mean over the ranks of the running statistics, added in the order of the ranks. Collective."""
        if self._communicator.size == 1:
            return
        self._executor.device.synchronize()
        trainable = {name for name, parameter in self._parameters.items() if parameter.trainable}
        mine = {name: self._read(v) for name, v in self._truth.items() if name not in trainable}
        if not mine:
            return
        ranks = self._communicator.exchange(mine)
        for name, array in mine.items():
            if array.dtype.kind == "f":
                total = sum(np.asarray(other[name], np.float64) for other in ranks)
                self._write(self._truth[name], np.asarray(total / len(ranks), array.dtype))


def _cut(whole: NDArray[Any], value: Value) -> NDArray[Any]:
    begin = value.offset // whole.itemsize
    return np.array(whole[begin : begin + value.spec.size].reshape(value.spec.shape))
