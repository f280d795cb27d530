"""The same nets in PyTorch: built from our graph, timed eager in both layouts and compiled, on the GPU that ours runs on.

PyTorch gets what it does best with: ``cudnn.benchmark``, TF32 or automatic mixed precision, a fused optimizer, in-place
ReLU, a batch that is on the GPU already.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from minidnn.graph import Node
from minidnn.layers import (
    Add,
    AvgPool,
    BatchNorm,
    Concat,
    Conv2d,
    Dropout,
    Flatten,
    GlobalAvgPool,
    Graph,
    Linear,
    MaxPool,
    ReLU,
    SoftmaxCrossEntropy,
    Tanh,
)

HOST_RUNS = 11
AMP = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Rival(nn.Module):
    """Our graph as a PyTorch module that maps images (N, C, H, W) and labels to the loss."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.steps: list[tuple[str, str, tuple[str, ...]]] = []
        self.parts = nn.ModuleDict()
        for node in graph.nodes:
            name = node.name.replace(".", "_")
            part = module(node)
            if part is not None:
                self.parts[name] = part
            inputs = tuple(tensor.name.replace(".", "_") for tensor in node.inputs)
            self.steps.append((name, type(node.layer).__name__, inputs))
        self.source, self.label = graph.inputs[0].name, graph.labels[0].name

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        values = {self.source: x, self.label: y}
        for name, kind, inputs in self.steps:
            operands = [values[i] for i in inputs]
            if kind == "Add":
                values[name] = operands[0] + operands[1]
            elif kind == "Concat":
                values[name] = torch.cat(operands, 1)
            elif kind == "GlobalAvgPool":
                values[name] = operands[0].mean((2, 3))
            elif kind == "SoftmaxCrossEntropy":
                values[name] = functional.cross_entropy(operands[0], operands[1])
            else:
                values[name] = self.parts[name](operands[0])
        return values[name]


def module(node: Node) -> nn.Module | None:
    """The module of a layer; None where a function does it."""
    layer, x = node.layer, node.inputs[0].shape
    if isinstance(layer, Conv2d):
        return nn.Conv2d(
            x[3], layer.channels, layer.kernel, layer.stride, layer.padding, layer.dilation, layer.groups, layer.bias
        )
    if isinstance(layer, Linear):
        return nn.Linear(x[1], layer.features, layer.bias)
    if isinstance(layer, BatchNorm):
        return nn.BatchNorm2d(x[-1], layer.eps, layer.momentum)
    if isinstance(layer, MaxPool):
        return nn.MaxPool2d(layer.kernel, layer.stride, layer.padding, ceil_mode=layer.ceil_mode)
    if isinstance(layer, AvgPool):
        return nn.AvgPool2d(layer.kernel, layer.stride, layer.padding)
    if isinstance(layer, ReLU):
        return nn.ReLU(inplace=True)
    if isinstance(layer, Dropout):
        return nn.Dropout(layer.p)
    if isinstance(layer, Flatten):
        return nn.Flatten()
    if isinstance(layer, Tanh):
        raise ValueError("PyTorch has no scaled Tanh module")
    if isinstance(layer, Add | Concat | GlobalAvgPool | SoftmaxCrossEntropy):
        return None
    raise ValueError(f"layer {node.name!r} of kind {layer.kind} has no rival here")


def timed(step: Callable[[], Any], steps: int, repeats: int) -> list[float]:
    """Seconds a step, ``repeats`` times, each over ``steps`` steps between two events."""
    cuda: Any = torch.cuda
    found = []
    for _ in range(repeats):
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(steps):
            step()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / steps)
    return found


def host_time(step: Callable[[], Any]) -> float:
    """Median wall clock of submitting one step to an idle GPU."""
    found = []
    for _ in range(HOST_RUNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        found.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(found)


def rival(
    graph: Graph, precision: str, *, channels_last: bool, compiled: bool = False, graphed: bool = False, steps: int,
    repeats: int,
) -> dict[str, Any]:  # fmt: skip
    """Train on one random batch and return seconds a step, images a second and the peak of allocated bytes.

    ``graphed``: the whole step, its update too, is captured once as a CUDA graph and replayed.
    """
    gc.collect()  # of the rival before
    torch.cuda.empty_cache()
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.manual_seed(0)
    batch, h, w, c = graph.inputs[0].shape
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model: Any = Rival(graph).cuda().train()
    model = model.to(memory_format=layout)
    x = torch.randn(batch, c, h, w, device="cuda").to(memory_format=layout)
    y = torch.randint(0, graph.logits.shape[-1], (batch,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    run = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", AMP.get(precision, torch.float16), enabled=precision in AMP):
            loss = run(x, y)
        scaled: Any = scaler.scale(loss)
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()

    started = time.perf_counter()
    run_step: Callable[[], Any] = step
    if graphed:
        run_step = graph_of(step).replay
    else:
        for _ in range(5):
            step()
    torch.cuda.synchronize()
    warm = time.perf_counter() - started
    torch.cuda.reset_peak_memory_stats()
    seconds = timed(run_step, steps, repeats)
    median = statistics.median(seconds)
    return {
        "images_per_second": batch / median, "step_seconds": median, "all_seconds": seconds, "warm_up_seconds": warm,
        "peak_bytes": torch.cuda.max_memory_allocated(), "host_seconds": host_time(run_step),
    }  # fmt: skip


def graph_of(step: Callable[[], Any]) -> Any:
    """A CUDA graph of a step, captured as PyTorch's notes on CUDA graphs prescribe: after some runs on a side stream."""
    cuda: Any = torch.cuda
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for _ in range(5):
            step()
    cuda.current_stream().wait_stream(side)
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        step()
    return graph


def rivals(
    graph: Graph, precision: str, layouts: Sequence[str], *, compiled: bool, graphed: bool, steps: int, repeats: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Eager in the layouts asked for, then the better one compiled or graphed: by name, each as soon as it is measured.

    One that PyTorch cannot run, or for which its memory is too small, has a ``failure`` in place of figures.
    """
    found: dict[str, float] = {}
    how: dict[str, Any] = {"steps": steps, "repeats": repeats}
    for name, layout in (("eager", "first"), ("eager channels-last", "last")):
        if layout in layouts:
            outcome = _attempt(graph, precision, channels_last=layout == "last", **how)
            found[name] = outcome.get("step_seconds", float("inf"))
            yield name, outcome
    last = min(found, key=lambda name: found[name]) == "eager channels-last"
    for name, wanted in (("graphed", graphed), ("compiled", compiled)):
        if wanted:
            yield name + " channels-last" * last, _attempt(graph, precision, channels_last=last, **{name: True}, **how)


def _attempt(graph: Graph, precision: str, **how: Any) -> dict[str, Any]:
    try:
        return rival(graph, precision, **how)
    except RuntimeError as error:  # out of memory is one, and what a capture forbids
        return {"failure": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
