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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from protocol_bandwidth import bandwidths
from protocol_nets import (
    MOMENTUM,
    OPTIMIZERS,
    batches,
    chain,
    distance,
    emulated,
    equal,
    every_layer,
    furthest,
    on_gpu,
    train,
    within,
)

import minidnn
from minidnn.device.cuda import CudaDevice
from minidnn.errors import UserError
from minidnn.fuse import fuse
from minidnn.metrics import provenance, write_json
from minidnn.precision import precision as find_precision
from minidnn.schedule.analysis import Analysis
from minidnn.schedule.plan import Decision, Plan, naive

DRIVER_BLOCK_BYTES = 2 << 20  # what the driver hands out memory in
TOLERANCE = 1e-5  # of true fp32
TOLERANCES = {"tf32": 2e-2, "fp16": 2e-2, "bf16": 1e-1}  # of gradients: the digits of the type, times what BN costs


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
    with on_gpu(graph, args, capture="on") as step:
        found = train(step, data)
        captured = step.executor.graphs  # type: ignore[attr-defined]
    result = equal(found, expected)
    return result | {"passed": result["passed"] and captured >= 2, "graphs": captured}


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
        expected, fusions = train(step, data), step.recipe.fusions
    for name, plan in plans(fuse(graph, fusions).graph).items():
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
    for kind, capture in (("rows", "off"), ("replay", "on")):
        with on_gpu(graph, args, capture=capture) as step:
            train(step, batches(graph, args.seed))
            executor = step.executor
            rows = len(step.program["train"].rows)
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
    found = {dtype: bandwidths(device, cupy, dtype) for dtype in ("float32", "float16")}
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
        "tuned": lambda: check_net(args, every_layer(), tune=True),
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
