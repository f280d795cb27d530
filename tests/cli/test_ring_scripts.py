"""plan.py --ranks, and the reproductions of the ring: they say what the cost model says, measure what they claim, and refuse
what means nothing."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import minidnn
from minidnn.device.emulated import EmulatedDevice
from minidnn.errors import UserError
from minidnn.parallel.inprocess import InProcess
from tests.cli.running import Script
from tests.parallel.launching import MISSING, REASON, ROOT

REPRODUCE = ROOT / "scripts" / "reproduce"
VGG = ("--data", "synthetic:64,32,32,3,10", "-a", "vgg11", "-b", "32", "--precision", "tf32")
RANKED = ("--ranks", "4", "--strategy")
LINK = ("--latency", "5e-6", "--bandwidth", "25GB")


def planned(script: Script, path: Path, *options: str) -> dict:
    """The scaling part of the JSON, and what was printed."""
    done = script("plan", *VGG, *options, "--json", str(path))
    assert done.code == 0, done.err
    return json.loads(path.read_text(encoding="utf-8")) | {"printed": done.out}


def test_plan_predicts_a_row_for_every_number_of_ranks(script: Script, tmp_path: Path) -> None:
    found = planned(script, tmp_path / "weak.json", *RANKED, "master_slave", *LINK, "--scaling", "weak")
    rows = found["scaling"]
    assert [(row["ranks"], row["batch"]) for row in rows] == [(1, 32), (2, 64), (3, 96), (4, 128)]
    assert rows[0]["speed_up"] == rows[0]["efficiency"] == 1 and rows[0]["exposed_seconds"] == 0
    for row in rows[1:]:
        message = 5e-6 + row["sent_bytes"] / (row["ranks"] - 1) / 25e9
        assert row["communication_seconds"] == pytest.approx(2 * (row["ranks"] - 1) * message, rel=0.01)
        assert row["images_per_second"] == pytest.approx(row["batch"] / row["step_seconds"])
        assert row["speed_up"] == pytest.approx(row["images_per_second"] / rows[0]["images_per_second"])
        assert f"{row['speed_up']:.2f}" in found["printed"] and f"{row['efficiency']:.1%}" in found["printed"]
    assert found["links"]["bandwidth"] == 25e9 and "weak scaling of master_slave" in found["printed"]
    strong = planned(script, tmp_path / "strong.json", *RANKED, "ring_delayed", *LINK)["scaling"]
    assert {row["batch"] for row in strong} == {32} and strong[-1]["speed_up"] < 4
    nodes = ("--ranks-per-node", "2", "--node-latency", "1e-4", "--node-bandwidth", "1GB")
    slow = planned(script, tmp_path / "nodes.json", *RANKED, "ring_delayed", *LINK, *nodes)["scaling"]
    assert slow[:2] == strong[:2]  # two ranks share a node
    assert slow[2]["step_seconds"] > slow[2]["communication_seconds"] > 0.05 > strong[2]["communication_seconds"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ranks", "0", "--strategy", "ring"), "--ranks 0: give at least 1"),
        (("--ranks", "4"), "--ranks 4 needs a --strategy"),
        (("--ranks", "4", "--strategy", "rong"), "strategy='rong' is unknown; did you mean ring"),
        (("--strategy", "ring"), "--strategy has no effect without --ranks"),
        (("--node-bandwidth", "1GB"), "--node-bandwidth has no effect without --ranks"),
        (("--scaling", "weak"), "--scaling has no effect without --ranks"),
        ((*RANKED, "ring", "--latency", "1e-6"), "--latency and --bandwidth describe one link"),
        ((*RANKED, "ring", "--latency", "-1", "--bandwidth", "1GB"), "a latency of -1 s"),
        ((*RANKED, "ring", "--ranks-per-node", "2"), "--ranks-per-node, --node-latency and --node-bandwidth"),
        ((*RANKED, "ring", "--min-memory"), "--ranks 4 cannot be combined with --max-batch or --min-memory"),
        (("--ranks", "64", "--strategy", "ring"), "the global batch of 32 is smaller than the 64 ranks"),
    ],
)
def test_plan_refuses_ranks_and_links_that_mean_nothing(script: Script, options: tuple[str, ...], words: str) -> None:
    done = script("plan", *VGG, *options)
    assert done.code == 2 and done.err.startswith(f"error: {words}") and done.err.count("\n") == 1


def test_the_report_of_ranks_is_that_of_rank_0(script: Script, tmp_path: Path) -> None:
    from layup.report import read_data

    options = ("--data", "synthetic:44,8,8,3,4", "-a", "tiny", "-b", "8", "--curve", "no")
    assert script("report", *options, *RANKED, "ring", "--output", "ranks").code == 0
    data = read_data((tmp_path / "ranks" / "report.html").read_text(encoding="utf-8"))
    assert data["ring"]["strategy"] == "ring" and data["ring"]["net"]["ranks"] == 4 and "batch 2," in data["subtitle"]
    assert script("report", *options, "--ranks", "4").err.startswith("error: --ranks and --strategy go together")


@pytest.mark.skipif(MISSING, reason=REASON)
def test_ring_measures_strategies_beside_the_model_goes_on_after_an_interruption_and_remembers(tmp_path: Path) -> None:
    out, cache = tmp_path / "ring.json", tmp_path / "cache.json"
    command = [
        sys.executable,
        str(REPRODUCE / "ring.py"),
        "--tiny",
        "--scaling",
        "strong",
        "--strategies",
        "ring",
        "tree",
    ]
    command += ["--json", str(out), "--cache", str(cache)]
    environ = import_from("reproduce", "ring_points").environment(1)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as interrupted:
        assert interrupted.stderr is not None
        assert [next(interrupted.stderr) for _ in range(2)][1].startswith("lenet 4 2 none")
        interrupted.send_signal(signal.SIGTERM)
        said = interrupted.stderr.read()
    assert interrupted.returncode == 143 and "not finished: " in said and "lenet 4 2 tree" in said, said
    found = json.loads(out.read_text(encoding="utf-8"))
    row = next(row for row in found["rows"] if row["strategy"] == "tree")
    assert row["missing"] and "lenet 4 2 tree capture=auto" in found["missing"]
    early = [*command, "--seconds", "0"]
    late = subprocess.run(early, capture_output=True, text=True, env=environ, timeout=60, check=False)
    assert late.returncode == 3 and "| lenet | strong | 2 | 4 | tree | auto |  | missing |" in late.stdout
    first = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120, check=True)
    found = json.loads(out.read_text(encoding="utf-8"))
    rows = {(row["ranks"], row["strategy"]): row for row in found["rows"]}
    assert {name for ranks, name in rows if ranks == 2} == {"none", "ring", "tree"}
    link = found["links"]["2"]
    for (ranks, name), row in rows.items():
        assert "failed" not in row, (ranks, name, row)
        assert row["images_per_second"] == pytest.approx(row["batch"] / row["step_seconds"])
        if name != "none":
            alone = rows[ranks, "none"]["step_seconds"]
            added = row["predicted_step_seconds"] - alone
            if name == "ring":  # two ring steps of half the parameters
                assert added == pytest.approx(2 * link["latency_seconds"] + row["sent_bytes"] / link["bandwidth"])
            assert 0 < added == pytest.approx(row["predicted_communication_seconds"], rel=0.5)
    assert (
        "| lenet | strong | 2 | 4 | tree |" in first.stdout and "2 none" not in first.stderr and found["missing"] == []
    )
    again = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60, check=True)
    assert again.stderr == "" and json.loads(out.read_text(encoding="utf-8"))["rows"] == found["rows"]  # from the cache


def import_from(folder: str, name: str) -> Any:
    """A script, found as when its folder is the first on the path."""
    sys.path.insert(0, str(ROOT / "scripts" / folder))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(ROOT / "scripts" / folder))


SLOW = """
import json, sys, time
asked = json.load(open(sys.argv[1]))
for point in asked["points"]:
    key = " ".join(map(str, point)).strip()
    if "late" in key:
        time.sleep(max(0, asked["deadline"] - time.time()))
        break
    with open(asked["out"], "a") as file:
        file.write(json.dumps({"key": key}) + "\\n")
    if "hangs" in key:
        time.sleep(60)
    if "dies" in key:
        raise SystemExit("SomeError: no memory is left")
    with open(asked["out"], "a") as file:
        file.write(json.dumps({"key": key, "result": {"step_seconds": 1.0}}) + "\\n")
"""


def test_a_point_that_hangs_or_dies_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = import_from("reproduce", "ring_points")
    worker = tmp_path / "worker.py"
    worker.write_text(SLOW, encoding="utf-8")
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "import sys, runpy\nsys.argv = sys.argv[4:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    monkeypatch.setitem(points.WORKERS, "ring", str(worker))
    group = points.Group([sys.executable, str(launcher)], {}, 2.0, points.environment(1))
    asked = [points.Point(net, 4, 1, "ring") for net in ("a", "hangs", "b", "dies", "c")]
    found = {point.net: result for point, result in group.measure(asked)}
    assert found.pop("hangs") == {"failed": "stopped after 2 s"}
    assert found.pop("dies") == {"failed": "SomeError: no memory is left"}
    assert found == {net: {"step_seconds": 1.0} for net in "abc"}
    soon = group._replace(deadline=time.time() + 2, point_seconds=60.0)
    asked_late = [points.Point(net, 4, 1, "ring") for net in ("a", "late", "b")]
    assert [point.net for point, _ in soon.measure(asked_late)] == ["a"], (
        "a point that is not begun is none that failed"
    )
    assert list(soon.measure(asked_late)) == []
    (tmp_path / "worker.py").write_text("raise SystemExit('ImportError: nothing works')")
    results = [result for _, result in group.measure(asked)]
    assert results == [{"failed": "ImportError: nothing works"}] * 5


def test_the_most_telling_points_come_first_for_every_net() -> None:
    ring, study = import_from("reproduce", "ring"), import_from("reproduce", "ring_study")
    args = ring.parse(["--device", "cuda", "--ddp", "yes", "--ranks", "2", "4", "--nets", "lenet", "vgg16", "--scaling", "weak",
                       "--capture", "off", "on", "--strategies", "tree", "ring_delayed", "ring"])  # fmt: skip
    points = ring.wanted(args)
    launches = study.launches(args, points)
    order = [point for launch in launches for point in launch]
    assert sorted(order) == sorted({point for _, point in points}) and len(order) == 2 * (2 + 1 + 2 * (8 + 1))
    for launch in launches:
        assert len({(point.ranks, point.strategy == "ddp") for point in launch}) == 1, "a group of processes for each"
    told = [(point.ranks, point.strategy, point.net) for point in order if point.capture != "on"]
    assert told[:6] == [
        *((4, name, net) for net in ("lenet", "vgg16") for name in ("none", "ring_delayed")),
        *((4, "ddp", net) for net in ("lenet", "vgg16")),
    ]
    assert told[6:10] == [(1, name, net) for name in ("none", "ddp") for net in ("lenet", "vgg16")]
    assert told[-8:-4] == [(4, name, net) for name in ("tree", "ring") for net in ("lenet", "vgg16")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--capture", "on"), "--capture on needs --device cuda"),
        (("--precision", "bf16"), "--precision bf16 needs --device cuda"),
        (("--latency", "1"), "--latency and --bandwidth describe one link"),
    ],
)
def test_ring_refuses_what_no_worker_could_do(options: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        import_from("reproduce", "ring").parse(options)


def test_a_cache_of_another_precision_is_not_mixed_in(tmp_path: Path) -> None:
    ring, cache = import_from("reproduce", "ring"), tmp_path / "cache.json"
    cache.write_text(json.dumps({"device": "cuda", "precision": "bf16", "points": {"a": {"failed": "x"}, "b": {}}}))
    args = ["--device", "cuda", "--cache", str(cache), "--nets", "lenet"]
    assert ring.remembered(ring.parse([*args, "--precision", "bf16"])) == {"b": {}}
    with pytest.raises(UserError, match="its precision is bf16, not fp32; name another file"):
        ring.remembered(ring.parse(args))


@pytest.mark.parametrize("strategy", ["none", "ring", "ring_delayed"])
def test_a_point_on_a_gpu_tells_steps_with_and_without_the_copy_of_the_batch_and_its_loss(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulated device in place of a GPU: the path is the one of GPUs."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    point, worker = import_from("reproduce", "ring_points").Point, import_from("reproduce", "ring_worker")
    team = SimpleNamespace(communicator=InProcess.group(1)[0])
    settings = {"device": "cuda", "precision": "fp32", "steps": 3, "measure_seconds": 0.1, "repeats": 2}
    found = worker.train(point("lenet", 4, 1, strategy, "auto"), team, EmulatedDevice(), settings)
    assert min(found[key] for key in ("step_seconds", "fed_seconds", "host_seconds")) > 0
    assert found["loss"] == pytest.approx(math.log(10), rel=0.2), "as at the beginning: the rate changes nothing"
    monkeypatch.setattr(worker, "OPTIMIZER", minidnn.SGD(lr=1e30))
    with pytest.raises(ValueError, match="after these steps the loss is nan"), np.errstate(all="ignore"):
        worker.train(point("lenet", 4, 1, strategy, "auto"), team, EmulatedDevice(), settings)
