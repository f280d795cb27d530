"""The stages of ``everything.py``, the most valuable first: checks, benchmarks, and what needs two GPUs."""

from __future__ import annotations

from typing import NamedTuple

JSON = "{json}"  # stands for the file of a stage's report
SECONDS = "{seconds}"  # stands for when it must have begun its last piece of work, in seconds
LAST_PIECE_SECONDS = 50  # that the last piece may take
DEEP = "6,32,790,6"  # 2,504 layers
CHECK, BENCHMARK, RANKS = "check", "benchmark", "ranks"


class Stage(NamedTuple):
    """A command under the repository's root, and the seconds after which it is ended. ``kind``: a check, a benchmark, which is
    not disturbed by another on its GPU, or what has two GPUs to itself."""

    name: str
    seconds: int
    command: tuple[str, ...]
    kind: str = CHECK


def _bench(name: str, seconds: int, *options: str) -> Stage:
    return Stage(name, seconds, ("scripts/bench.py", "--against", "torch", "--json", JSON, *options), BENCHMARK)


def _pytest(name: str, seconds: int, *options: str) -> Stage:
    return Stage(name, seconds, ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=short", *options))


def _speed(arch: str, batch: int, precision: str, seconds: int, *compiled: str) -> Stage:
    options = ("-a", arch, "-b", str(batch), "--precision", precision, "--kernels", "--compiled", *compiled)
    return _bench(f"{arch}-{precision}", seconds, *options)


def _host(name: str, seconds: int, *options: str) -> Stage:
    return _bench(name, seconds, "--idle", "--graphed", "--compiled", "--layouts", "first", *options)


def _ring(name: str, seconds: int, *options: str) -> Stage:
    common = ("--device", "cuda", "--precision", "bf16", "--ranks", "1", "2", "--measure-seconds", "1")
    return Stage(
        name, seconds, ("scripts/reproduce/ring.py", *common, "--seconds", SECONDS, "--json", JSON, *options), RANKS
    )


STAGES = (
    Stage("protocol", 120, ("scripts/gpu/protocol_check.py", "--json", JSON)),
    _pytest("kernels", 200, "tests/backend", "--deselect", "tests/backend/test_cuda_device.py::test_the_protocol_check_passes"),
    _pytest("steps", 300, "tests/step"),
    _speed("resnet50", 128, "fp16", 200, "fp16"),
    Stage("resnet50-rows", 60, ("scripts/bench.py", "-a", "resnet50", "-b", "128", "--precision", "fp16", "--capture", "off",
                                "--json", JSON), BENCHMARK),
    Stage("resnet50-any", 90, ("scripts/bench.py", "-a", "resnet50", "-b", "128", "--precision", "fp16", "tf32",
                               "--nondeterministic", "--json", JSON), BENCHMARK),
    _host("host-resnet20", 90, "-a", "resnet20", "-b", "128", "--precision", "tf32", "fp16"),
    _speed("resnet50", 128, "fp32", 120),
    _speed("resnet50", 128, "tf32", 100),
    _host("host-deep", 240, "-a", "resnet", "--blocks", DEEP, "-b", "16", "--precision", "tf32",
          "--steps", "3", "--repeats", "3"),
    _speed("vgg16", 64, "fp16", 120, "fp16"),
    _speed("vgg16", 64, "fp32", 260),
    _speed("vgg16", 64, "tf32", 100),
    _speed("vgg16", 64, "bf16", 120, "bf16"),
    _speed("resnet50", 128, "bf16", 240, "bf16"),
    Stage("ranks", 150, ("scripts/gpu/ranks_check.py", "--threads", "1", "2", "4", "--json", JSON)),
    Stage("doctor", 60, ("scripts/doctor.py", "--json", JSON)),
    Stage("costs", 120, ("scripts/measure_costs.py", "-a", "resnet50", "-b", "128", "--precision", "fp16", "--output", JSON)),
    Stage("ranks-nccl", 200, ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                              "scripts/gpu/ranks_check.py", "--json", JSON), RANKS),
    _ring("ring", 430, "--nets", "resnet50:128", "vgg16:64", "vgg16:16", "lenet:64", "cifar_quick:128"),
    Stage("ranks-train", 240, ("scripts/gpu/ranks_train.py", "--ranks", "2", "--json", JSON), RANKS),
    _ring("ring-capture", 150, "--scaling", "weak", "--nets", "resnet50:128", "cifar_quick:128",
          "--strategies", "ring_delayed", "all_reduce", "--capture", "off", "on", "--ddp", "no"),
)  # fmt: skip
