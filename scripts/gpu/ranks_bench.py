"""What the check of the ranks trains, on which ranks and devices, and how it compares."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import minidnn
from minidnn.device.base import Device
from minidnn.device.cuda import CudaDevice
from minidnn.device.cuda_libraries import parse_device
from minidnn.device.emulated import EmulatedDevice
from minidnn.parallel.agree import checksum
from minidnn.parallel.communicator import Communicator
from minidnn.parallel.inprocess import run_ranks
from minidnn.parallel.staged import Staged
from minidnn.parallel.step import ParallelStep
from minidnn.step import CompiledStep

Every = Callable[[Callable[[Communicator], Any]], list[Any]]
"""Does a work on every rank, and gives the results of all to each."""

STEPS, SHARE, CLASSES = 5, 8, 10
PATIENCE = 300.0  # seconds in which a rank compiles its kernels
OPTIMIZER = minidnn.SGD(lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4)


def net(ranks: int, norm: bool = False) -> minidnn.Graph:
    """``norm``: with batch norm, whose statistics are those of a rank, and whose parameters are wider than others in 16 bit."""
    g = minidnn.Graph()
    x = g.input((SHARE * ranks, 14, 14, 3))
    if norm:
        h = g.max_pool(g.relu(g.batch_norm(g.conv2d(x, 32, 3, padding=1))), 2)
        h = g.relu(g.batch_norm(g.conv2d(h, 64, 3, padding=1)))
    else:
        h = g.max_pool(g.relu(g.conv2d(x, 32, 3, padding=1, bias=True)), 2)
        h = g.relu(g.conv2d(h, 64, 3, padding=1, bias=True))
    h = g.relu(g.linear(g.flatten(h), 128))
    g.softmax_cross_entropy(g.linear(h, CLASSES), g.label((SHARE * ranks,)))
    return g


def batch(graph: minidnn.Graph, number: int) -> tuple[Any, Any]:
    """Random pixels and labels of all ranks."""
    rng, shape = np.random.default_rng(number), graph.inputs[0].shape
    return rng.standard_normal(shape, np.float32), rng.integers(0, CLASSES, shape[0])


def index_of(device: str, share: bool) -> int | None:
    """The number of the GPU of this rank; None: the emulated device."""
    return None if device == "emulated" else 0 if share else parse_device(device)


class Bench:
    """Ranks and the devices they compute on. ``open``: makes a device for a precision."""

    def __init__(self, ranks: int, every: Every, index: int | None, share: bool) -> None:
        self.ranks, self.every, self._index, self._share = ranks, every, index, share
        self.graph, self.normed = net(ranks), net(ranks, norm=True)

    def open(self, precision: str = "fp32", seed: int = 0) -> Device:
        """A device of its own for a step."""
        if self._index is None:
            return EmulatedDevice(seed=seed)
        return CudaDevice(self._index, precision=precision)

    def communicator(self, communicator: Communicator, device: Device) -> Communicator:
        """The way to the others; ``--share`` leads through the host."""
        return Staged(communicator, device) if self._share and self._index is not None else communicator

    def train(
        self, strategy: str, precision: str = "fp32", capture: str = "off", emulated: bool = False, norm: bool = False,
        steps: int = STEPS,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """What every rank ends with: state, checksum of its weights after every step, losses, seconds."""

        def work(communicator: Communicator) -> dict[str, Any]:
            device = EmulatedDevice(seed=communicator.rank) if emulated else self.open(precision, communicator.rank)
            step = minidnn.compile(
                self.normed if norm else self.graph, optimizer=OPTIMIZER, device=device, strategy=strategy,
                precision=precision, capture=capture,
                communicator=self.communicator(communicator, device),
            )  # fmt: skip
            assert isinstance(step, ParallelStep)
            return self.trained(step, steps)

        return run_ranks(self.ranks, work, PATIENCE) if emulated else self.every(work)

    def gradients(self, precision: str) -> dict[str, Any]:
        """What the normed net's momentum is after one step, by no strategy: every rank's share trained for itself, and the mean
        of what it finds."""

        def work(communicator: Communicator) -> dict[str, Any]:
            device, first = self.open(precision, communicator.rank), SHARE * communicator.rank
            step = minidnn.compile(
                net(1, norm=True), optimizer=OPTIMIZER, device=device, precision=precision, capture="off"
            )
            step.run(*(array[first : first + SHARE] for array in batch(self.normed, 0)), lr=0.02)
            state = step.optimizer_state_dict()
            step.close()
            device.close()
            return state

        found = self.every(work)
        names = [name for name in found[0] if ".momentum." in name]
        return {name: np.mean([np.asarray(state[name], np.float64) for state in found], 0) for name in names}

    def trained(self, step: CompiledStep, steps: int = STEPS) -> dict[str, Any]:
        """Train a step, and close it and its device."""
        sums, losses, device, begin = [], [], step.executor.device, time.perf_counter()
        for number in range(steps):
            losses.append(step.run(*batch(self.graph, number), lr=0.02 / (1 + number)).loss)
            device.synchronize()
            lines = step.program.persistent.lines
            strips = [s for line in lines for s in (line.weights, line.other_weights) if s is not None]
            found = {s.whole.name: device.get(step.executor.view(s.whole)) for s in strips}
            sums.append(checksum({n: a.view(np.uint16 if a.itemsize == 2 else a.dtype) for n, a in found.items()}))
        seconds = time.perf_counter() - begin
        state = {**step.state_dict(), **step.optimizer_state_dict()}
        how = step.communicator.name if isinstance(step, ParallelStep) else "alone"
        step.close()
        device.close()
        return {"state": state, "sums": sums, "losses": losses, "seconds": seconds, "by": how}

    def alone(self) -> dict[str, Any]:
        """A single process on the joined batch."""
        return self.trained(minidnn.compile(self.graph, optimizer=OPTIMIZER, device=self.open(), capture="off"))


def momentum_distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Relative distance of all momentum of weights, or of that of biases and scales, whichever is larger: of gradients, that is,
    and not of weights, which a step hardly moves."""
    found = []
    for matrices in (True, False):
        names = [n for n, a in other.items() if ".momentum." in n and (np.ndim(a) > 1) == matrices]
        ours, theirs = (np.concatenate([np.asarray(s[n], np.float64).ravel() for n in names]) for s in (one, other))
        found.append(float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)))
    return max(found)


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest relative distance of a tensor."""
    assert one.keys() == other.keys()
    found = 0.0
    for name, array in one.items():
        ours, theirs = (np.asarray(a, np.float64) for a in (array, other[name]))
        if ours.size > 1:
            found = max(found, float(np.linalg.norm(ours - theirs)) / max(float(np.linalg.norm(theirs)), 1e-30))
    return found
