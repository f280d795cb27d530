"""Scripts that measure GPUs say in one sentence what is missing where there is none; what they write can be read."""

import importlib.util
import json
import os
import subprocess
import sys
import time

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


def test_every_gpu_stage_has_options_that_its_script_knows(everything, root):
    known = {}
    assert len({stage.name for stage in everything.STAGES}) == len(everything.STAGES)
    for stage in everything.STAGES:
        script = stage.command[0]
        if script == "-m":
            continue
        if script not in known:
            command = [sys.executable, str(root / script), "--help"]
            environment = os.environ | {"PYTHONPATH": str(root)}
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
            known[script] = set(done.stdout.replace(",", " ").replace("[", " ").replace("]", " ").split())
        assert {part for part in stage.command if part.startswith("-")} <= known[script], stage.name
