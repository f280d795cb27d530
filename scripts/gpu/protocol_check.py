"""Check the CUDA device against the emulated one: the same rows, row by row and captured, on a real GPU.

    python scripts/gpu/protocol_check.py --json protocol_check.json

Every check compares what a user can see: losses, parameters, running statistics, optimizer state, gradients, logits. Where
both sides run on the GPU with one recipe they must be equal to the bit; against NumPy's arithmetic they agree to 1e-5 in true
fp32, and as far as their digits reach in TF32 and in 16 bits. Exits with 1 when a check fails, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import minidnn
from minidnn.cuda_recipes import cuda_recipe
from minidnn.device.cuda import CudaDevice
from minidnn.device.emulated import EmulatedDevice
from minidnn.errors import UserError
from minidnn.executor import BATCHES_IN_FLIGHT
from minidnn.kernels import cuda_kernels
from minidnn.metrics import provenance, write_json
from minidnn.precision import precision as find_precision
from minidnn.schedule.analysis import Analysis
from minidnn.schedule.plan import Decision, Plan, naive

BATCH, CLASSES, STEPS = 16, 10, 4
DRIVER_BLOCK_BYTES = 2 << 20  # what the driver hands out memory in
TOLERANCE = 1e-5  # of true fp32
TOLERANCES = {"tf32": 2e-2, "fp16": 2e-2, "bf16": 1e-1}  # of gradients: the digits of the type, times what BN costs
OPTIMIZERS = {
    "momentum": minidnn.SGD(lr=0.05, momentum=0.9, weight_decay=1e-4),
    "nesterov": minidnn.SGD(lr=0.05, momentum=0.9, nesterov=True),
    "sgd": minidnn.SGD(lr=0.05, weight_decay=1e-4),
    "adam": minidnn.Adam(lr=1e-3, weight_decay=1e-4),
}
MOMENTUM = OPTIMIZERS["momentum"]

Batch = tuple[Any, Any]
State = dict[str, Any]


# -- nets ---------------------------------------------------------------------------------------------------------------
def chain(pool: str = "global", batch: int = BATCH) -> minidnn.Graph:
    """conv, BN, ReLU twice, so that the second one has a data gradient, then Linear and the loss."""
    g = minidnn.Graph()
    x = g.input((batch, 12, 12, 8))
    h = g.relu(g.batch_norm(g.conv2d(x, 16, 3, padding=1, name="conv1")))
    h = g.relu(g.batch_norm(g.conv2d(h, 32, 3, stride=2, padding=1, name="conv2")))
    h = g.global_avg_pool(h) if pool == "global" else g.flatten(g.max_pool(h, 2))
    g.softmax_cross_entropy(g.linear(h, CLASSES, name="fc"), g.label((batch,)))
    return g


def every_layer() -> minidnn.Graph:
    """One layer of each kind, on extents that no vector access divides, with a skip, a concat and grouped convolution."""
    g = minidnn.Graph()
    x = g.input((BATCH, 17, 13, 3))
    h = g.lrn(g.relu(g.conv2d(x, 12, 5, stride=2, padding=2, bias=True)), size=5, alpha=0.1)
    h = g.max_pool(h, 3, stride=2, padding=1)
    left = g.tanh(g.conv2d(h, 9, 3, padding=2, dilation=2, groups=3))
    right = g.avg_pool(h, 3, stride=1, padding=1)
    h = g.concat(left, right)
    h = g.add(h, g.relu(g.batch_norm(g.conv2d(h, 21, 1))))
    h = g.flatten(g.tanh(g.subsample(h, 2)))
    h = g.dropout(g.relu(g.linear(h, 31)), 0.4)
    g.softmax_cross_entropy(g.linear(h, CLASSES), g.label((BATCH,)), smoothing=0.1)
    return g


# -- running ------------------------------------------------------------------------------------------------------------
def batches(graph: minidnn.Graph, seed: int, count: int = STEPS) -> list[Batch]:
    """Random batches for a graph."""
    rng = np.random.default_rng(seed)
    shape = graph.inputs[0].shape
    return [(rng.standard_normal(shape, np.float32), rng.integers(0, CLASSES, shape[0])) for _ in range(count)]


def emulated(graph: minidnn.Graph, seed: int, optimizer: Any = MOMENTUM) -> minidnn.CompiledStep:
    """The step on NumPy."""
    return minidnn.compile(graph, optimizer=optimizer, device=EmulatedDevice(), seed=seed)


@contextmanager
def on_gpu(graph: minidnn.Graph, args: argparse.Namespace, *, optimizer: Any = MOMENTUM, precision: str = "fp32",
           plan: Plan | None = None, refuse: Sequence[str] = ()) -> Iterator[minidnn.CompiledStep]:  # fmt: skip
    """The step on the GPU, with the recipe that cuDNN's heuristics give."""
    device = CudaDevice(args.device, precision=precision, refuse=refuse)
    try:
        recipe = cuda_recipe(graph, find_precision(precision), args.workspace_limit, True, device=device)
        step = minidnn.compile(
            graph, plan, optimizer=optimizer, device=device, precision=precision, recipe=recipe, seed=args.seed
        )
        yield step
        step.close()
    finally:
        device.close()


def train(step: minidnn.CompiledStep, data: Sequence[Batch]) -> State:
    """Losses and the whole state after some steps. The host runs ahead: losses are read at the end."""
    results = [step.run(x, y) for x, y in data]
    losses = np.array([result.loss for result in results])
    return {"losses": losses, **step.state_dict(), **step.optimizer_state_dict()}


class Replay:
    """Two captured training steps, one for each pinned slot, which take the place of row-by-row execution."""

    def __init__(self, step: minidnn.CompiledStep) -> None:
        self.executor = executor = step.executor
        assert executor._runs % BATCHES_IN_FLIGHT == 0, "capture after an even number of runs"
        runs, self.graphs = executor._runs, []
        for parity in range(BATCHES_IN_FLIGHT):
            executor._runs, executor._last = runs + parity, None  # no wait for an earlier run: the launch is the fence
            self.graphs.append(executor.device.capture(partial(executor.run, "train")))  # type: ignore[attr-defined]
        executor._runs, executor._last, executor._ends = runs, None, [None] * BATCHES_IN_FLIGHT
        setattr(executor, "run", self.run)  # noqa: B010  (a method is replaced on purpose)

    def run(self, name: str) -> Any:
        """Launch the graph of the next slot."""
        assert name == "train", f"only the training step was captured, not {name}"
        executor = self.executor
        parity = executor._runs % BATCHES_IN_FLIGHT
        executor._runs += 1
        executor._ends[parity] = executor.device.launch(self.graphs[parity])  # type: ignore[attr-defined]
        return executor._ends[parity]


# -- comparing ----------------------------------------------------------------------------------------------------------
def distance(a: Any, b: Any) -> float:
    """The relative distance ||a - b|| / ||b||, in double."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    scale = float(np.linalg.norm(b))
    return float(np.linalg.norm(a - b)) / scale if scale else float(np.linalg.norm(a))


def furthest(found: State, expected: State) -> dict[str, Any]:
    """The largest relative distance of any tensor, and which."""
    assert found.keys() == expected.keys(), f"names differ: {sorted(found.keys() ^ expected.keys())}"
    errors = {name: distance(found[name], expected[name]) for name in expected}
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return {"error": errors[worst], "tensor": worst, "tensors": len(errors)}


def within(result: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """Pass if the error is below the tolerance; NaN never passes."""
    return {"passed": bool(result["error"] < tolerance), "tolerance": tolerance, **result}


def equal(found: State, expected: State) -> dict[str, Any]:
    """Pass if every tensor is equal to the bit."""
    assert found.keys() == expected.keys()
    differing = [name for name in expected if not np.array_equal(found[name], expected[name], equal_nan=True)]
    return {"passed": not differing and all(np.isfinite(v).all() for v in found.values()), "differing": differing}


# -- checks -------------------------------------------------------------------------------------------------------------
def check_net(args: argparse.Namespace, graph: minidnn.Graph, **how: Any) -> dict[str, Any]:
    """State after some steps, gradients and logits, against NumPy."""
    optimizer = how.get("optimizer", MOMENTUM)
    data = batches(graph, args.seed)
    reference = emulated(graph, args.seed, optimizer)
    with on_gpu(graph, args, **how) as step:
        engines = {name: f"{e.name} {dict(e.options)} {e.workspace_bytes} B" for name, e in step.recipe.engines.items()}
        gradients = within(furthest(step.gradients(*data[0]), reference.gradients(*data[0])), TOLERANCE)
        state = within(furthest(train(step, data), train(reference, data)), TOLERANCE)
        logits = within({"error": distance(step.evaluate(data[0][0]), reference.evaluate(data[0][0]))}, TOLERANCE)
    passed = gradients["passed"] and state["passed"] and logits["passed"]
    return {"passed": passed, "gradients": gradients, "state": state, "logits": logits, "engines": engines}


def check_precision(args: argparse.Namespace, precision: str) -> dict[str, Any]:
    """The first update, whose momentum is the gradient, against NumPy in fp32."""
    graph = chain()
    data = batches(graph, args.seed, 1)
    reference = emulated(graph, args.seed)
    expected = train(reference, data)
    with on_gpu(graph, args, precision=precision) as step:
        found = train(step, data)
    names = [name for name in expected if name.startswith("optimizer.momentum")]
    whole = [np.concatenate([np.ravel(state[name]) for name in names]) for state in (found, expected)]
    return within(
        {"error": distance(*whole), "loss_error": distance(found["losses"], expected["losses"])}, TOLERANCES[precision]
    )


def check_repeat(args: argparse.Namespace) -> dict[str, Any]:
    """The same run twice."""
    graph, found = every_layer(), []
    for _ in range(2):
        with on_gpu(graph, args) as step:
            found.append(train(step, batches(graph, args.seed)))
    return equal(found[1], found[0])


def check_capture(args: argparse.Namespace, graph: minidnn.Graph) -> dict[str, Any]:
    """Replays of captured steps against row-by-row execution."""
    data = batches(graph, args.seed, 8)
    with on_gpu(graph, args) as step:
        expected = train(step, data)
    with on_gpu(graph, args) as step:
        first = train(step, data[:2])
        Replay(step)
        found = train(step, data[2:])
    found["losses"] = np.concatenate([first["losses"], found["losses"]])
    return equal(found, expected)


def plans(graph: minidnn.Graph) -> dict[str, Plan]:
    """Plans that move and remake as much as they can."""
    last = Analysis(graph, find_precision("fp32")).units()
    units = [name for name in dict.fromkeys(last.values()) if name != graph.loss_node.name]
    half = {name: (Decision.OFFLOAD, Decision.RECOMPUTE)[i % 2] for i, name in enumerate(units)}
    return {
        "naive": naive(),
        "offload": Plan(dict.fromkeys(units, Decision.OFFLOAD)),
        "recompute": Plan(dict.fromkeys(units[:-1], Decision.RECOMPUTE)),
        "mixed": Plan(half, lag=0, distance=2, memory_centric=True),
        "streamed": Plan(half, streamed=("*",), group_bytes=1),
    }


def check_plans(args: argparse.Namespace) -> dict[str, Any]:
    """Training under other plans has the bits of keep."""
    graph, outcome = every_layer(), {}
    data = batches(graph, args.seed, 6)
    with on_gpu(graph, args) as step:
        expected = train(step, data)
    for name, plan in plans(graph).items():
        with on_gpu(graph, args, plan=plan) as step:
            outcome[name] = equal(train(step, data), expected) | {"reserved_bytes": step.profile.reserved_bytes}
    return {"passed": all(result["passed"] for result in outcome.values()), "plans": outcome}


def check_memory(args: argparse.Namespace) -> dict[str, Any]:
    """The slab is one allocation of the predicted bytes, a step allocates nothing, and closing gives all back."""
    import cupy

    graph = chain(batch=1024)
    data = batches(graph, args.seed)
    with on_gpu(graph, args) as step:
        train(step, data)
        device = step.executor.device
        outside, pool = device.outside_bytes(), cupy.get_default_memory_pool().total_bytes()
        train(step, data)
        grown = device.outside_bytes() - outside
        slab = device._slab.size  # type: ignore[attr-defined]
        free = cupy.cuda.runtime.memGetInfo()[0]
        reserved = step.profile.reserved_bytes
        del device
    del step
    gc.collect()
    returned = cupy.cuda.runtime.memGetInfo()[0] - free
    passed = slab == reserved and grown == 0 and pool == 0 and returned > reserved - DRIVER_BLOCK_BYTES
    return {
        "passed": passed, "slab_bytes": slab, "reserved_bytes": reserved, "outside_bytes": outside,
        "grown_bytes": grown, "cupy_pool_bytes": pool, "returned_bytes": returned,
    }  # fmt: skip


def check_times(args: argparse.Namespace) -> dict[str, Any]:
    """Host time to submit a step, and the GPU's time for it, row by row and replayed. A measurement: it always passes."""
    graph, times = chain(), {}
    with on_gpu(graph, args) as step:
        train(step, batches(graph, args.seed))
        executor = step.executor
        rows = len(step.program["train"].rows)
        for kind in ("rows", "replay"):
            if kind == "replay":
                if executor._runs % BATCHES_IN_FLIGHT:
                    executor.run("train")
                Replay(step)
            executor.run("train")
            host: list[float] = []
            for _ in range(args.repeats):
                executor.device.synchronize()
                begin = time.perf_counter()
                executor.run("train")
                host.append(time.perf_counter() - begin)
            executor.device.synchronize()
            before = executor.device.seconds()
            for _ in range(args.repeats):
                executor.run("train")
            executor.device.synchronize()
            times[f"{kind}_host_us"] = statistics.median(host) * 1e6
            times[f"{kind}_gpu_us"] = (executor.device.seconds() - before) / args.repeats * 1e6
    return {"passed": True, "rows": rows, "repeats": args.repeats, **times}


def check_bandwidth(args: argparse.Namespace) -> dict[str, Any]:
    """What memory-bound kernels move, in TB/s, on tensors larger than any cache. A measurement: it always passes."""
    import cupy

    device = CudaDevice(args.device, refuse=("convolution", "matmul"))
    shape, vector = (64, 56, 56, 256), (256,)
    x, y, dy = (cupy.random.standard_normal(shape, dtype="float32") for _ in range(3))
    a, b, c, d, e, f = (cupy.ones(vector, "float32") for _ in range(6))
    small, index = cupy.zeros((64, 28, 28, 256), "float32"), cupy.zeros((64, 28, 28, 256), "uint8")
    pooled, counters, scalars = cupy.zeros((64, 256), "float32"), cupy.zeros(4, "uint32"), cupy.ones(8, "float32")
    pool = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0)}
    flat = [t.reshape(-1) for t in (x, y, dy)]
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any], int]] = {
        "relu_forward": ((y, x), {}, x.nbytes * 2),
        "relu_backward": ((dy, dy, y), {}, x.nbytes * 3),
        "add_forward": ((y, y, x), {}, x.nbytes * 3),
        "dropout": ((y, x, counters), {"node": 1, "threshold": 1 << 31, "scale": 2.0}, x.nbytes * 2),
        "batch_norm_statistics": ((a, b, x), {"eps": 1e-5}, x.nbytes),
        "batch_norm_apply": ((y, x, a, b, c, d), {}, x.nbytes * 2),
        "batch_norm_backward_weight": ((e, f, dy, x, a, b), {}, x.nbytes * 2),
        "batch_norm_backward_data": ((dy, dy, x, a, b, c, e, f), {}, x.nbytes * 3),
        "channel_sum": ((e, dy), {}, x.nbytes),
        "max_pool_forward": ((small, index, x), pool, x.nbytes + small.nbytes + index.nbytes),
        "max_pool_backward": ((y, small, index), pool, x.nbytes + small.nbytes + index.nbytes),
        "avg_pool_forward": ((small, x), pool, x.nbytes + small.nbytes),
        "global_avg_pool_forward": ((pooled, x), {}, x.nbytes),
        "sgd_momentum_update": (
            (*flat, scalars), {"momentum": 0.9, "nesterov": False, "weight_decay": 1e-4}, x.nbytes * 5
        ),
    }  # fmt: skip
    cupy.cuda.runtime.deviceSynchronize()
    found = {}
    for name, (operands, attrs, nbytes) in calls.items():
        work = getattr(cuda_kernels, name)(device._launcher, *operands, **attrs)
        seconds = []
        for _ in range(12):
            before = device.seconds()
            for _ in range(5):
                work()
            device.synchronize()
            seconds.append((device.seconds() - before) / 5)
        found[name] = round(nbytes / statistics.median(seconds[2:]) / 1e12, 2)
    del x, y, dy, small, index, pooled, flat, calls, operands
    device.close()
    cupy.get_default_memory_pool().free_all_blocks()
    return {"passed": True, "terabytes_per_second": found}


def checks(args: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """Every check by name."""
    table: dict[str, Callable[[], dict[str, Any]]] = {
        "global pool": lambda: check_net(args, chain()),
        "flatten": lambda: check_net(args, chain("flatten")),
        "every layer": lambda: check_net(args, every_layer()),
        "own convolution and product": lambda: check_net(args, every_layer(), refuse=("convolution", "matmul")),
        "repeat": lambda: check_repeat(args),
        "captured chain": lambda: check_capture(args, chain()),
        "captured every layer": lambda: check_capture(args, every_layer()),
        "plans": lambda: check_plans(args),
        "memory": lambda: check_memory(args),
        "times": lambda: check_times(args),
        "bandwidth": lambda: check_bandwidth(args),
    }
    for name, optimizer in OPTIMIZERS.items():
        table[f"optimizer {name}"] = partial(check_net, args, chain(), optimizer=optimizer)
    for name in TOLERANCES:
        table[f"precision {name}"] = partial(check_precision, args, name)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results, machine, versions, seed and command")
    parser.add_argument("--device", type=int, default=0, help="number of the GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=100, help="steps that are timed")
    parser.add_argument("--workspace-limit", type=int, default=None, metavar="BYTES", help="of one convolution")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these checks alone")
    args = parser.parse_args(argv)
    try:
        device = CudaDevice(args.device)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    record = provenance(args.seed)
    found = device.versions()
    record["machine"]["gpu"] = found.pop("gpu")
    record["versions"] |= found
    device.close()
    print(record["machine"], record["versions"])
    outcome: dict[str, Any] = {}
    for name, check in checks(args).items():
        if args.only and name not in args.only:
            continue
        begin = time.perf_counter()
        try:
            outcome[name] = check()
        except Exception as error:
            traceback.print_exc()
            outcome[name] = {"passed": False, "exception": f"{type(error).__name__}: {error}"}
        outcome[name]["seconds"] = round(time.perf_counter() - begin, 3)
        print("ok    " if outcome[name]["passed"] else "FAILED", name, outcome[name], flush=True)
        if args.json:
            write_json(args.json, record | {"passed": all(r["passed"] for r in outcome.values()), "checks": outcome})
    failed = [name for name, result in outcome.items() if not result["passed"]]
    print(
        f"{len(outcome) - len(failed)} of {len(outcome)} checks passed"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
