"""Say what this machine has for CUDA, what is missing, and the pip line that brings it: python scripts/doctor.py"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from minidnn.commandline import Parser, run
from minidnn.device.cuda_libraries import import_cupy, parse_device, require_gpu
from minidnn.errors import UserError
from minidnn.metrics import provenance, write_json

PACKAGES = ("numpy", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12",
            "nvidia-nccl-cu13", "nvidia-nccl-cu12", "ml_dtypes", "mpi4py", "torch")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report. Returns 0 where a GPU can be used, else 2."""
    parser = Parser((__doc__ or "").splitlines()[0], epilog=None)
    parser.add_argument("--device", default="cuda:0", metavar="D")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report, too")
    args = parser.parse_args(argv)
    index = parse_device(args.device)
    report: dict[str, Any] = {"packages": packages()}
    problems: list[str] = []
    for title, look in (("gpu", gpu), ("cudnn", cudnn), ("nccl", nccl), ("links", links), ("host", host)):
        try:
            report[title] = look(index)
        except UserError as error:
            report[title] = None
            problems.append(str(error))
            if title == "gpu":
                break
    report["missing"] = problems
    for title, content in report.items():
        for name, value in content.items() if isinstance(content, dict) else ():
            print(f"{title:<10} {name:<24} {value}")
    for problem in problems:
        print(f"missing: {problem}")
    if args.json is not None:
        write_json(args.json, report | provenance())
    return 2 if report.get("gpu") is None or report.get("cudnn") is None else 0


def packages() -> dict[str, str]:
    """Versions of what is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def gpu(index: int) -> dict[str, Any]:
    """The GPU and its driver. Raises UserError, a sentence, where it cannot be used."""
    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    properties = require_gpu(runtime, index)
    capability = 10 * properties["major"] + properties["minor"]
    cupy.cuda.Device(index).use()
    before = runtime.memGetInfo()[0]
    return {
        "name": properties["name"].decode(), "compute capability": capability / 10,
        "driver supports CUDA": runtime.driverGetVersion() / 1000, "CuPy's CUDA": runtime.runtimeGetVersion() / 1000,
        "memory": gib(properties["totalGlobalMem"]), "free": gib(before), "multiprocessors": properties["multiProcessorCount"],
    }  # fmt: skip


def cudnn(index: int) -> dict[str, Any]:
    """cuDNN and its frontend, and what a device takes outside the slab."""
    from minidnn.device.cuda import CudaDevice

    device = CudaDevice(index)
    try:
        versions = device.versions()
        return {
            "frontend": versions["cudnn_frontend"], "library": versions["cudnn"],
            "outside the slab": gib(device.outside_bytes()),
        }  # fmt: skip
    finally:
        device.close()


def nccl(index: int) -> dict[str, Any]:
    """NCCL, which several GPUs need."""
    del index
    found = _optional("cupy.cuda.nccl", lambda module: module.get_version())
    return {"version": "not there: data parallelism on GPUs needs it" if found is None else found}


def links(index: int) -> dict[str, Any]:
    """Copies between host and device, and within device memory."""
    del index
    import links as probe

    found = probe.measure(import_cupy())
    rates = {name: f"{value / 1e9:,.1f} GB/s" for name, value in found.items() if name != "latency"}
    return rates | {"latency": f"{found['latency'] * 1e6:.1f} us"}


def host(index: int) -> dict[str, Any]:
    """How much memory may be pinned."""
    del index
    limits: dict[str, Any] = {}
    resource = _optional("resource", lambda module: module.getrlimit(module.RLIMIT_MEMLOCK)[0])
    limits["locked memory"] = "unlimited" if resource in (None, -1) else gib(resource)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).is_file():
            text = Path(path).read_text(encoding="ascii").strip()
            limits["memory of the group"] = gib(int(text)) if text.isdigit() else text
    return limits


def _optional(name: str, look: Callable[[Any], Any]) -> Any:
    try:
        return look(importlib.import_module(name))
    except (ImportError, AttributeError, OSError):
        return None


def gib(nbytes: float) -> str:
    """Bytes for a person."""
    return f"{nbytes / 2**30:,.2f} GiB"


if __name__ == "__main__":
    sys.exit(run(main))
