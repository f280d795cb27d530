"""Scripts that measure GPUs say in one sentence what is missing where there is none; what they write can be read."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minidnn import profiles
from minidnn.profiles import Profile

WITHOUT = pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed here")
COMMANDS = {
    "doctor.py": [],
    "bench.py": ["-a", "resnet20", "-b", "4"],
    "measure_costs.py": ["-a", "resnet20", "-b", "4", "--output", "never.json"],
    "train.py": ["--data", "digits", "-a", "resnet20", "--device", "cuda:0"],
}


@WITHOUT
@pytest.mark.parametrize("script", COMMANDS)
def test_without_cupy_one_line_has_the_pip_command(root, tmp_path, script):
    command = [sys.executable, str(root / "scripts" / script), *COMMANDS[script]]
    environment = {"PYTHONPATH": str(root), "PATH": ""}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == 2
    said = (done.stdout + done.stderr).strip().splitlines()
    assert "pip install 'minidnn-layup[cuda13]'" in said[-1] and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_measured_profile_can_be_read_and_keeps_what_was_not_measured():
    from measure_costs import content

    base = profiles.load("h200")
    links = {"h2d": 5e10, "d2h": 4e10, "h2d_both": 3e10, "d2h_both": 3e10, "memory": 4e12, "latency": 1e-5}
    made = Profile.from_json(content(base, links, {"relu_forward|a<-b|": 2e-6}, "NVIDIA H200"))
    assert made.rows == {"relu_forward|a<-b|": 2e-6} and made.flops == base.flops
    assert made.h2d_bandwidth == 5e10 and made.d2h_bandwidth_both == 3e10 and made.copy_latency_seconds == 1e-5
    assert made.memory_efficiency == pytest.approx(4e12 / base.memory_bandwidth)
    assert "NVIDIA H200" in made.sources["h2d_bandwidth"]


def test_the_rival_computes_our_graph():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import models
    from rivals import Rival

    graph = models.build("resnet20", batch=2, image_size=16)
    rival = Rival(graph).train()
    loss = rival(torch.randn(2, 3, 16, 16), torch.tensor([1, 2]))
    loss.backward()
    assert sum(p.numel() for p in rival.parameters()) == graph.parameter_count
    assert all(p.grad is not None for p in rival.parameters())


def test_a_bound_on_the_process_is_refused_where_there_is_no_driver_to_count(root, tmp_path):
    command = [sys.executable, str(root / "scripts" / "train.py"), "--data", "digits", "-a", "resnet20", "--device", "emulated",
               "--process-memory", "1GiB", "--max-steps", "1"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert (
        "process_memory='1GiB' bounds what the driver of a GPU counts for the process" in done.stderr.splitlines()[-1]
    )


@pytest.fixture
def everything(root):
    spec = importlib.util.spec_from_file_location("everything", root / "scripts" / "gpu" / "everything.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WRITES = "import json, sys; json.dump({'rows': []}, open(sys.argv[1], 'w')); print('done')"
HANGS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"


def test_every_gpu_stage_is_a_process_with_a_limit_and_the_others_go_on(everything, tmp_path, capsys):
    stages = {
        "good": everything.Stage("good", 30, ("-c", WRITES, everything.JSON)),
        "bad": everything.Stage("bad", 30, ("-c", "raise SystemExit('it broke')")),
        "hangs": everything.Stage("hangs", 1, ("-c", HANGS)),
    }
    everything.STAGES = tuple(stages.values())
    begin = time.monotonic()
    assert everything.main(["--out", str(tmp_path)]) == 1
    assert time.monotonic() - begin < 20
    found = json.loads((tmp_path / "everything.json").read_text())["stages"]
    assert {name: stage["outcome"] for name, stage in found.items()} == {
        "good": "ok", "bad": "failed", "hangs": "out of time",
    }  # fmt: skip
    assert found["good"]["report"] == {"rows": []} and found["bad"]["last_line"] == "it broke"
    assert capsys.readouterr().out.splitlines()[-1].startswith("hangs")
    assert everything.main(["--out", str(tmp_path), "--unpack", str(tmp_path / "everything.json")]) == 0
    assert json.loads((tmp_path / "good.json").read_text()) == {"rows": []}


def test_a_gpu_stage_without_time_is_named_and_not_started(everything, tmp_path):
    everything.STAGES = (everything.Stage("late", 30, ("-c", "raise SystemExit(1)")),)
    assert everything.main(["--out", str(tmp_path), "--seconds", "5"]) == 0
    stage = json.loads((tmp_path / "everything.json").read_text())["stages"]["late"]
    assert stage["outcome"] == "not started"
    with pytest.raises(everything.UserError, match="did you mean late"):
        everything.main(["--only", "lat"])


SEES = """
import os, sys, time
from pathlib import Path
own, other = Path(sys.argv[1]), Path(sys.argv[2])
own.touch()
while not other.exists():
    time.sleep(0.02)
print(os.environ.get("CUDA_VISIBLE_DEVICES"), time.time())
"""
STOPS = """
import json, signal, sys, time
told = []
def stop(*_):
    told.append(1)
    time.sleep(0.2)
    assert len(told) == 1, "told twice"
    json.dump({"rows": [], "missing": ["b"]}, open(sys.argv[1], "w"))
    sys.exit(3)
signal.signal(signal.SIGTERM, stop)
print("until", sys.argv[2], flush=True)
time.sleep(60 if sys.argv[3] == "waits" else 0)
stop()
"""


def test_two_gpus_have_benchmarks_on_one_checks_on_the_other_and_then_what_needs_both(
    everything, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    out, meet = tmp_path / "out", tmp_path / "meet"
    meet.mkdir()
    waits_for = {"check": "bench 1", "bench 1": "check", "bench 2": "bench 1", "both": "check 2", "check 2": "check"}
    kinds = {"b": everything.BENCHMARK, "c": everything.CHECK}
    everything.STAGES = tuple(
        everything.Stage(name, 30, ("-c", SEES, str(meet / name), str(meet / other)),
                         everything.RANKS if name == "both" else kinds[name[0]])
        for name, other in waits_for.items()
    )  # fmt: skip
    assert everything.main(["--out", str(out), "--gpus", "2"]) == 0
    found = json.loads((out / "everything.json").read_text())["stages"]
    assert list(found) == list(waits_for), "in the order of the table, whichever ends first"
    saw = {name: stage["last_line"].split() for name, stage in found.items()}
    assert {name: gpus for name, (gpus, _) in saw.items()} == {
        "check": "GPU-7", "check 2": "GPU-7", "bench 1": "4", "bench 2": "4", "both": "4,GPU-7",
    }  # fmt: skip
    ended = {name: float(at) for name, (_, at) in saw.items()}
    assert max(ended, key=ended.get) == "both", "alone, when all else is done"
    log = (out / "everything.log").read_text()
    assert all(f"===== {name}: " in log for name in waits_for) and sorted(p.suffix for p in out.iterdir()) == [
        ".json",
        ".log",
    ]
    assert everything.main(["--out", str(out), "--only", "check"]) == 0
    assert json.loads((out / "everything.json").read_text())["stages"]["check"]["last_line"].startswith("4,GPU-7")
    for options, words in (
        (["--only", "both"], "both needs two GPUs"),
        (["--gpus", "3"], "CUDA_VISIBLE_DEVICES names 2"),
    ):
        with pytest.raises(everything.UserError, match=words):
            everything.main(["--out", str(out), *options])


def test_a_gpu_stage_is_told_its_time_and_what_it_wrote_at_its_limit_is_kept(everything, tmp_path):
    command = ("-c", STOPS, everything.JSON, everything.SECONDS)
    everything.STAGES = (
        everything.Stage("soon", 80, (*command, "stops")), everything.Stage("late", 1, (*command, "waits")),
    )  # fmt: skip
    assert everything.main(["--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "everything.json").read_text())["stages"]
    assert {stage["outcome"] for stage in found.values()} == {"unfinished"}
    assert all(stage["report"]["missing"] == ["b"] for stage in found.values())
    assert [stage["last_line"] for stage in found.values()] == ["until 30", "until 0"]


def test_an_interruption_ends_the_stages_under_way(root, tmp_path):
    slow = f"import everything as e; e.STAGES = (e.Stage('slow', 60, ('-c', {HANGS!r} + '#{tmp_path}')),); e.main()"
    environ = os.environ | {"PYTHONPATH": str(root / "scripts" / "gpu")}
    command = [sys.executable, "-c", slow, "--out", str(tmp_path)]
    with subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) as process:
        while not (started := _marked(tmp_path)):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    assert started and not _marked(tmp_path) and (tmp_path / "everything.log").exists()


def _marked(folder):
    """The stages whose code names a folder."""
    lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    return [line for line in lines if f"#{folder}".encode() in line and b"everything as e" not in line]


def test_a_row_of_ring_is_a_line_of_the_table(everything):
    rows = [{"net": "lenet", "ranks": 1, "strategy": "none", "capture": "off", "speed_up": 1.0},
            {"net": "lenet", "ranks": 2, "strategy": "ring", "capture": "off", "speed_up": 1.9},
            {"net": "lenet", "ranks": 2, "strategy": "tree", "missing": True}]  # fmt: skip
    outcome = {"outcome": "unfinished", "seconds": 3.0, "last_line": "", "report": {"rows": rows}}
    assert everything.table_line("ring", outcome).endswith("3.0 s  lenet ring off 1.90 x")


def test_every_gpu_stage_has_options_that_its_script_knows(everything, root):
    known = {}
    assert len({stage.name for stage in everything.STAGES}) == len(everything.STAGES)
    for stage in everything.STAGES:
        at = next((at for at, part in enumerate(stage.command) if part.endswith(".py")), None)
        if at is None or "pytest" in stage.command:
            continue
        script = stage.command[at]
        if script not in known:
            command = [sys.executable, str(root / script), "--help"]
            environment = os.environ | {"PYTHONPATH": str(root)}
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
            known[script] = set(done.stdout.replace(",", " ").replace("[", " ").replace("]", " ").split())
        assert {part for part in stage.command[at:] if part.startswith("-")} <= known[script], stage.name
