"""Every check and benchmark that needs a GPU, the most valuable first: python scripts/gpu/everything.py --out gpu --seconds 560

Each stage is a process of its own with a time limit of its own, so that none can take down or starve the rest; one for which
too little of ``--seconds`` is left is not started, and is named in the table. Two files come out: ``everything.json`` with what
every stage reported, rewritten after each, and ``everything.log`` with all that was printed. ``--unpack everything.json --out
DIR`` writes the reports as files of their own. Exits with 1 when a stage failed. It judges no figure: that is a reader's work.

``--gpus 2``: benchmarks on the first GPU, checks beside them on the second, each process seeing one; then, one after another,
the stages that need both. More GPUs share the checks.
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
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_stages import BENCHMARK, CHECK, JSON, LAST_PIECE_SECONDS, RANKS, SECONDS, STAGES, Stage

from minidnn.commandline import run
from minidnn.errors import UserError, nearest
from minidnn.metrics import provenance, write_json

ROOT = Path(__file__).resolve().parents[2]
LEAST_SECONDS = 15  # with less left a stage is not worth starting
GRACE_SECONDS = 10  # that a stage has to write what there is, after its limit
UNFINISHED = 3  # exit code of a script that had not the time for everything


class Lane(NamedTuple):
    """GPUs that processes on them see, and the stages that wait for them. ``gpus`` (): all that there are."""

    gpus: tuple[int, ...]
    queue: deque[Stage]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages, or unpack their reports. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600, metavar="S", help="of all stages together")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="stages on N GPUs at a time (1)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="stages: " + " ".join(stage.name for stage in STAGES))
    parser.add_argument("--out", type=Path, default=Path("gpu"), metavar="DIR")
    parser.add_argument("--unpack", type=Path, metavar="FILE", help="only write the reports in FILE to --out")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.unpack is not None:
        return unpack(args.unpack, args.out)
    wanted, order = chosen(args.only, args.gpus), [stage.name for stage in STAGES]
    found: dict[str, dict[str, Any]] = {}
    record: dict[str, Any] = {"stages": found, **provenance()}
    deadline = time.monotonic() + args.seconds
    (args.out / "everything.log").write_text("", encoding="utf-8")
    for lanes in waves(wanted, args.gpus):
        with closing(carry_out(lanes, deadline, args.out)) as outcomes:
            for name, outcome in outcomes:
                found[name] = outcome
                record["stages"] = found = dict(sorted(found.items(), key=lambda item: order.index(item[0])))
                write_json(args.out / "everything.json", record)
                print(table_line(name, outcome), flush=True)
    print("\n".join(["", *(table_line(name, outcome) for name, outcome in found.items())]))
    return int(any(outcome["outcome"] in ("failed", "out of time") for outcome in found.values()))


def chosen(only: Sequence[str] | None, gpus: int) -> list[Stage]:
    """The stages of these names that so many GPUs can run, in the order of the table. Raises UserError for what cannot be."""
    if gpus < 1:
        raise UserError(f"--gpus {gpus}: give at least 1")
    if 0 < len(given_gpus()) < gpus:
        raise UserError(f"--gpus {gpus}: CUDA_VISIBLE_DEVICES names {len(given_gpus())}")
    known = {stage.name: stage for stage in STAGES}
    for name in only or ():
        if name not in known:
            raise UserError(f"--only {name} is no stage: {nearest(name, known)}")
        if known[name].kind == RANKS and gpus < 2:
            raise UserError(f"--only {name} needs two GPUs: give --gpus 2")
    return [s for s in STAGES if (s.name in only if only is not None else s.kind != RANKS or gpus > 1)]


def given_gpus() -> list[str]:
    """The GPUs that this process is allowed to see; []: all."""
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


def waves(stages: Sequence[Stage], gpus: int) -> list[list[Lane]]:
    """What runs side by side, and then what runs alone."""
    queues = {kind: deque(stage for stage in stages if stage.kind == kind) for kind in (BENCHMARK, CHECK, RANKS)}
    if gpus == 1:
        return [[Lane((), deque(stages))]]
    side = [Lane((0,), queues[BENCHMARK]), *(Lane((gpu,), queues[CHECK]) for gpu in range(1, gpus))]
    return [side, [Lane((0, 1), queues[RANKS])]]


def carry_out(lanes: Sequence[Lane], deadline: float, out: Path) -> Generator[tuple[str, dict[str, Any]]]:
    """Run the stages of all lanes, one of each at a time. Gives name and outcome of each as it ends.

    ``deadline``: of ``time.monotonic``. Close it where it is left early: stages under way end with it.
    """
    running: list[Process | None] = [None] * len(lanes)
    try:
        while any(running) or any(lane.queue for lane in lanes):
            for at, lane in enumerate(lanes):
                process = running[at]
                if process is not None and (outcome := process.outcome()) is not None:
                    running[at] = None
                    yield process.stage.name, outcome
                if running[at] is None and lane.queue:
                    stage, left = lane.queue.popleft(), deadline - time.monotonic()
                    if left >= LEAST_SECONDS:
                        running[at] = Process(stage, min(float(stage.seconds), left), lane.gpus, out)
                        continue
                    said = f"{max(0.0, left):.0f} s were left"
                    yield stage.name, {"outcome": "not started", "seconds": 0.0, "last_line": said, "report": None}
            time.sleep(0.02)
    finally:
        for process in filter(None, running):  # an interruption must not leave it on a GPU, either
            process.end()


class Process:
    """A stage under way. ``gpus``: the numbers of those it sees, of those that this process sees; (): all."""

    def __init__(self, stage: Stage, limit: float, gpus: Sequence[int], out: Path) -> None:
        self.stage, self._limit, self._begin = stage, limit, time.monotonic()
        self._told = False  # that its time is up
        self._folder = tempfile.TemporaryDirectory()
        self._report, self._all = Path(self._folder.name) / "report.json", out / "everything.log"
        self._log = out / f"{stage.name}.log"
        words = {JSON: str(self._report), SECONDS: f"{max(0.0, limit - LAST_PIECE_SECONDS):.0f}"}
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        if gpus:
            names = given_gpus()
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] if names else str(gpu) for gpu in gpus)
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, *(words.get(part, part) for part in stage.command)],
                cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def outcome(self) -> dict[str, Any] | None:
        """Outcome, seconds, the last line and the report; None while it runs. Ends it, with all its children, at its limit."""
        code, seconds = self._process.poll(), time.monotonic() - self._begin
        if code is None:
            if seconds > self._limit and not self._told:
                self._signal(signal.SIGTERM)  # once: a second one would disturb what it does upon the first
                self._told = True
            if seconds > self._limit + GRACE_SECONDS:
                self._signal(signal.SIGKILL)
            return None
        text, report = self._gathered()
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        word = "out of time" if self._told else "ok" if code == 0 else "failed"
        if code == UNFINISHED and report is not None and report.get("missing"):
            word = "unfinished"
        return {
            "outcome": word, "exit_code": None if self._told else code, "seconds": round(seconds, 1),
            "last_line": lines[-1] if lines else "", "report": report,
        }  # fmt: skip

    def _gathered(self) -> tuple[str, Any]:
        """What it printed, which goes to ``everything.log``, and its report."""
        self._signal(signal.SIGKILL)  # children that it has left
        text = self._log.read_text(encoding="utf-8", errors="replace")
        with self._all.open("a", encoding="utf-8") as log:
            log.write(f"\n===== {self.stage.name}: {' '.join(self.stage.command)}\n{text}")
        self._log.unlink()
        report = json.loads(self._report.read_text(encoding="utf-8")) if self._report.is_file() else None
        self._folder.cleanup()
        return text, report

    def end(self) -> None:
        """End it before its time."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        self._gathered()
        self._process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def table_line(name: str, outcome: dict[str, Any]) -> str:
    """A line about a stage: its figures, where it is a benchmark, else what it said last."""
    rows = (outcome.get("report") or {}).get("rows")
    said = outcome["last_line"] if not isinstance(rows, list) else "; ".join(filter(None, map(figures, rows)))
    return f"{name:<18} {outcome['outcome']:<12} {outcome['seconds']:6.1f} s  {said[:220]}"


def figures(row: dict[str, Any]) -> str:
    """Speed, ratios and host time of a row of ``bench.py``; speed-up of one of ``ring.py`` on several ranks, "" of others."""
    if "strategy" in row:
        told = "speed_up" in row and row["ranks"] > 1
        return f"{row['net']} {row['strategy']} {row.get('capture', '')} {row['speed_up']:.2f} x" if told else ""
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, upon which what it has started ends, too
    sys.exit(run(main))
