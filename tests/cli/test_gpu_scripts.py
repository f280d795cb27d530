"""Scripts that measure GPUs say in one sentence what is missing where there is none; what they write can be read."""

import importlib.util
import subprocess
import sys

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
