"""ModelState: initial values, and saving and loading of what lives in the persistent region."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidnn.errors import UserError, nearest
from minidnn.executor import Executor
from minidnn.layers import Graph
from minidnn.layers.initial import initialise, parameter_generator
from minidnn.layers.layout import from_torchvision, spatial_columns, to_torchvision
from minidnn.precision import Precision
from minidnn.scalars import INITIAL_SCALE
from minidnn.schedule.blocks import slices
from minidnn.schedule.instruction import Value
from minidnn.schedule.persistent import Persistent
from minidnn.spec import TensorSpec

LOSS_SCALING = "optimizer.loss_scaling"


class ModelState:
    """Reads and writes the persistent region by torchvision's names and layouts. Blocks; never used inside a step."""

    def __init__(self, graph: Graph, persistent: Persistent, executor: Executor, precision: Precision) -> None:
        self._graph = graph
        self._persistent = persistent
        self._executor = executor
        self._spatial = spatial_columns(graph)
        self._parameters = {p.name: p for p in graph.parameters}
        # Of 16-bit weights the master copy is the truth: it is what files hold.
        self._truth: dict[str, Value] = dict(persistent.parameters)
        self._truth.update(self._slot_values("master"))
        self._precision = precision

    def _slot_values(self, slot: str) -> dict[str, Value]:
        """One value a trainable parameter inside an optimizer slot."""
        values: dict[str, Value] = {}
        blocks = self._persistent.slots.get(slot, {})
        for node in self._graph.nodes:
            if node.name in blocks:
                values.update((f"{node.name}.{key}", v) for key, v in slices(node, blocks[node.name]).items())
        return values

    def _write(self, value: Value, array: Any) -> None:
        self._executor.device.put(self._executor.view(value), array)

    def _read(self, value: Value) -> NDArray[Any]:
        array: NDArray[Any] = self._executor.device.get(self._executor.view(value))
        return array

    def initialise(self, seed: int) -> None:
        """Fill parameters by their rules, made on the host from ``seed``; optimizer state and constants with zeros."""
        for buffer in self._persistent.state_buffers:
            self._write(buffer.whole, np.zeros(buffer.nbytes, np.uint8))
        if self._persistent.scaling is not None:
            self._write(self._persistent.scaling, np.array([INITIAL_SCALE, 0.0, 1.0, 0.0]))
        for name, parameter in self._parameters.items():
            dtype = np.float64 if self._precision.compute == "float64" else np.float32
            array = initialise(parameter, parameter_generator(seed, name), dtype)
            self._write(self._truth[name], array)
            if self._truth[name] is not self._persistent.parameters[name]:
                self._write(self._persistent.parameters[name], array)

    def export_all(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Copies in torchvision's layout, in the order of the graph."""
        return {n: to_torchvision(n, arrays[n], self._spatial) for n in self._parameters if n in arrays}

    def parameters(self) -> dict[str, NDArray[Any]]:
        """All parameters and running statistics."""
        self._executor.device.synchronize()
        return self.export_all({name: self._read(self._truth[name]) for name in self._parameters})

    def load_parameters(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take parameters and running statistics; checks everything before it writes anything."""
        self._load("the state", dict.fromkeys(self._parameters, ""), {"": self._truth}, state)
        for name, value in self._persistent.parameters.items():
            if value is not self._truth[name]:
                self._write(value, self._read(self._truth[name]))

    def optimizer(self) -> dict[str, NDArray[Any]]:
        """State of every slot but the master weights, which are the parameters themselves."""
        self._executor.device.synchronize()
        scaling = self._persistent.scaling
        own = {} if scaling is None else {LOSS_SCALING: self._read(scaling)}
        return own | {
            f"optimizer.{slot}.{name}": to_torchvision(name, self._read(value), self._spatial)
            for slot in self._persistent.optimizer.slots
            for name, value in self._slot_values(slot).items()
        }

    def load_optimizer(self, state: Mapping[str, NDArray[Any]], beside: tuple[str, ...] = ()) -> None:
        """Take the state of every slot; ``beside``: names that are not looked at.

        Loss scaling begins anew where the state comes from a run without it.
        """
        scaling = state.get(LOSS_SCALING)
        prefixes = {f"optimizer.{slot}.": self._slot_values(slot) for slot in self._persistent.optimizer.slots}
        names = {prefix + name: prefix for prefix, values in prefixes.items() for name in values}
        self._load("the optimizer state", names, prefixes, state, (LOSS_SCALING, *beside))
        if scaling is not None and self._persistent.scaling is not None:
            self._write(self._persistent.scaling, scaling)

    def _load(
        self,
        what: str,
        names: Mapping[str, str],
        groups: Mapping[str, Mapping[str, Value]],
        state: Mapping[str, NDArray[Any]],
        beside: tuple[str, ...] = (),
    ) -> None:
        """Write ``state[name]`` into the value of ``name`` without its prefix, after all names and shapes are checked.

        One array at a time: ``state`` may be a file larger than the host's memory.
        """
        values = self._checked(what, names, groups, state, beside)
        self._executor.device.synchronize()
        for name, value in values.items():
            self._write(value, self._ours(name.removeprefix(names[name]), state[name]))

    def _ours(self, name: str, array: Any) -> NDArray[Any]:
        """An array of a file in our layout; as it is where its shape cannot be that of ``name``."""
        try:
            return from_torchvision(name, np.asarray(array), self._spatial)
        except ValueError:
            return np.asarray(array)

    def _checked(
        self,
        what: str,
        names: Mapping[str, str],
        groups: Mapping[str, Mapping[str, Value]],
        state: Mapping[str, NDArray[Any]],
        beside: tuple[str, ...] = (),
    ) -> dict[str, Value]:
        """For every name its value. Raises UserError for names and shapes that do not fit; does not look at ``beside``."""
        missing = [name for name in names if name not in state]
        unexpected = sorted(state.keys() - {*names, *beside})
        if missing or unexpected:
            parts = (
                [f"lacks {missing[0]!r}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")]
                if missing
                else []
            )
            if unexpected:
                parts.append(f"has {unexpected[0]!r}, which this net does not; {nearest(unexpected[0], names)}")
            raise UserError(f"{what} {' and '.join(parts)}")
        values = {}
        for full, prefix in names.items():
            name = full.removeprefix(prefix)
            value = values[full] = groups[prefix][name]
            if self._ours(name, state[full]).shape != value.spec.shape:
                ours = to_torchvision(name, np.empty(value.spec.shape, np.uint8), self._spatial).shape
                raise UserError(f"{full!r} has shape {np.shape(state[full])} in {what}, this net wants {ours}")
        return values

    def logits(self, parity: int, offset: int) -> NDArray[np.float32]:
        """Logits in the pinned result slot."""
        spec = TensorSpec(self._graph.logits.shape, "float32")
        value = Value("logits", self._persistent.result, offset, spec, -1)
        array: NDArray[np.float32] = self._executor.view(value, slot=parity)
        return array
