"""Every check and benchmark that needs a GPU, the most valuable first: python scripts/gpu/everything.py --out gpu --seconds 560

Each stage is a process of its own with a time limit of its own, so that none can take down or starve the rest; one for which
too little of ``--seconds`` is left is not started, and is named in the table. Two files come out: ``everything.json`` with what
every stage reported, rewritten after each, and ``everything.log`` with all that was printed. ``--unpack everything.json --out
DIR`` writes the reports as files of their own. Exits with 1 when a stage failed. It judges no figure: that is a reader's work.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from minidnn.commandline import run
from minidnn.errors import UserError, nearest
from minidnn.metrics import provenance, write_json

ROOT = Path(__file__).resolve().parents[2]
JSON = "{json}"  # stands for the file of a stage's report
DEEP = "6,32,790,6"  # 2,504 layers
LEAST_SECONDS = 15  # with less left a stage is not worth starting


class Stage(NamedTuple):
    """A command under the repository's root, and the seconds after which it is ended."""

    name: str
    seconds: int
    command: tuple[str, ...]


def _bench(name: str, seconds: int, *options: str) -> Stage:
    return Stage(name, seconds, ("scripts/bench.py", "--against", "torch", "--json", JSON, *options))


def _pytest(name: str, seconds: int, *options: str) -> Stage:
    return Stage(name, seconds, ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=short", *options))


def _speed(arch: str, batch: int, precision: str, seconds: int, *compiled: str) -> Stage:
    options = ("-a", arch, "-b", str(batch), "--precision", precision, "--kernels", "--compiled", *compiled)
    return _bench(f"{arch}-{precision}", seconds, *options)


def _host(name: str, seconds: int, *options: str) -> Stage:
    return _bench(name, seconds, "--idle", "--graphed", "--compiled", "--layouts", "first", *options)


STAGES = (
    Stage("protocol", 120, ("scripts/gpu/protocol_check.py", "--json", JSON)),
    _pytest("kernels", 200, "tests/backend", "--deselect", "tests/backend/test_cuda_device.py::test_the_protocol_check_passes"),
    _pytest("steps", 300, "tests/step"),
    _speed("resnet50", 128, "fp16", 200, "fp16"),
    _host("host-resnet20", 90, "-a", "resnet20", "-b", "128", "--precision", "tf32", "fp16"),
    _speed("resnet50", 128, "fp32", 120),
    _speed("resnet50", 128, "tf32", 100),
    _host("host-deep", 240, "-a", "resnet", "--blocks", DEEP, "-b", "16", "--precision", "tf32",
          "--steps", "3", "--repeats", "3"),
    _speed("vgg16", 64, "fp16", 120, "fp16"),
    _speed("vgg16", 64, "fp32", 100),
    _speed("vgg16", 64, "tf32", 100),
    _speed("vgg16", 64, "bf16", 120, "bf16"),
    _speed("resnet50", 128, "bf16", 240, "bf16"),
    Stage("ranks", 150, ("scripts/gpu/ranks_check.py", "--threads", "1", "2", "4", "--json", JSON)),
    Stage("doctor", 60, ("scripts/doctor.py", "--json", JSON)),
    Stage("costs", 120, ("scripts/measure_costs.py", "-a", "resnet50", "-b", "128", "--precision", "fp16", "--output", JSON)),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages, or unpack their reports. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600, metavar="S", help="of all stages together")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="stages: " + " ".join(stage.name for stage in STAGES))
    parser.add_argument("--out", type=Path, default=Path("gpu"), metavar="DIR")
    parser.add_argument("--unpack", type=Path, metavar="FILE", help="only write the reports in FILE to --out")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.unpack is not None:
        return unpack(args.unpack, args.out)
    wanted = chosen(args.only)
    record: dict[str, Any] = {"stages": {}, **provenance()}
    deadline = time.monotonic() + args.seconds
    with (args.out / "everything.log").open("w", encoding="utf-8") as log:
        for stage in wanted:
            left = deadline - time.monotonic()
            record["stages"][stage.name] = carry_out(stage, left, log)
            write_json(args.out / "everything.json", record)
            print(table_line(stage.name, record["stages"][stage.name]), flush=True)
    print("\n".join(["", *(table_line(name, outcome) for name, outcome in record["stages"].items())]))
    return int(any(outcome["outcome"] in ("failed", "out of time") for outcome in record["stages"].values()))


def chosen(only: Sequence[str] | None) -> tuple[Stage, ...]:
    """The stages of these names, in the order of the table. Raises UserError for a name that is none."""
    known = {stage.name for stage in STAGES}
    for name in only or ():
        if name not in known:
            raise UserError(f"--only {name} is no stage: {nearest(name, known)}")
    return tuple(stage for stage in STAGES if only is None or stage.name in only)


def carry_out(stage: Stage, left: float, log: IO[str]) -> dict[str, Any]:
    """Run a stage within its limit and what is left. Returns outcome, seconds, the last line and the report."""
    if left < LEAST_SECONDS:
        said = f"{max(0.0, left):.0f} s were left"
        return {"outcome": "not started", "seconds": 0.0, "last_line": said, "report": None}
    limit, begin = min(float(stage.seconds), left), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, *(str(report) if part == JSON else part for part in stage.command)]
        log.write(f"\n===== {stage.name}: {' '.join(stage.command)}\n")
        log.flush()
        start = log.tell()
        code = _process(command, limit, log)
        found = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else None
    outcome = "out of time" if code is None else "ok" if code == 0 else "failed"
    return {
        "outcome": outcome, "exit_code": code, "seconds": round(time.monotonic() - begin, 1),
        "last_line": _last_line(Path(log.name), start), "report": found,
    }  # fmt: skip


def _process(command: Sequence[str], limit: float, log: IO[str]) -> int | None:
    """The exit code, or None if the process was ended, with all of its children, because of the limit."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(limit)
    except BaseException as error:  # an interruption must not leave it on the GPU, either
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return None
        raise


def _last_line(path: Path, start: int) -> str:
    """What a stage said last."""
    with path.open(encoding="utf-8", errors="replace") as log:
        log.seek(start)
        lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    return lines[-1] if lines else ""


def table_line(name: str, outcome: dict[str, Any]) -> str:
    """A line about a stage: its figures, where it is a benchmark, else what it said last."""
    rows = (outcome.get("report") or {}).get("rows")
    said = outcome["last_line"] if not isinstance(rows, list) else "; ".join(figures(row) for row in rows)
    return f"{name:<18} {outcome['outcome']:<12} {outcome['seconds']:6.1f} s  {said[:220]}"


def figures(row: dict[str, Any]) -> str:
    """Speed, ratios and host time of a row of ``bench.py``."""
    if "minidnn" not in row:
        return f"{row['precision']} was not measured"
    mine = row["minidnn"]
    text = [f"{row['precision']} {mine['images_per_second']:,.1f} images/s"]
    for name, rival in row.get("torch", {}).items():
        ratio = rival.get("step_seconds", 0.0) / mine["step_seconds"]
        text.append(f"{ratio:.2f} x {name}" if ratio else f"{name} failed")
    text.append(f"host {mine['host_seconds'] * 1e3:.2f} ms = {mine['host_share']:.1%}")
    if "idle_share" in mine:
        text.append(f"idle {mine['idle_share']:.1%}")
    return ", ".join(text)


def unpack(file: Path, out: Path) -> int:
    """Write the report of every stage as ``<stage>.json``."""
    for name, outcome in json.loads(file.read_text(encoding="utf-8"))["stages"].items():
        if outcome.get("report") is not None:
            write_json(out / f"{re.sub('[^a-z0-9]+', '_', name)}.json", outcome["report"])
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
