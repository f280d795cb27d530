"""Several GPUs, as far as a machine without one can tell: NCCL's calls, the stream they run on, and who takes which GPU."""

import functools
import importlib
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest

import minidnn
from minidnn import capture as capturing
from minidnn.device.emulated import EmulatedDevice
from minidnn.errors import UserError
from minidnn.kernels.cuda_launch import WITHOUT_SCRATCH
from minidnn.parallel import gpus, nccl
from minidnn.parallel.communicator import PeerLost
from minidnn.parallel.gpus import Seat, assign, own_device
from minidnn.parallel.inprocess import InProcess, run_ranks
from minidnn.parallel.launch import Place
from minidnn.precision import PRECISIONS, Precision, precision
from minidnn.recipes import numpy_recipe
from minidnn.schedule.instruction import COMM, Op
from minidnn.schedule.ranks import STRATEGIES
from tests.parallel.fake_gpus import FakeGpus, Processes, device
from tests.parallel.launching import ROOT
from tests.step import nets

EVERY = (*(f"{name}:steps" for name in STRATEGIES), "ring:nccl", "all_reduce:nccl", "ring_delayed:nccl")
RANKS = 2


@pytest.fixture
def fake(monkeypatch):
    return FakeGpus().install(monkeypatch)


class Ended(NamedTuple):
    """How a rank ends."""

    state: dict
    name: str
    implementation: str
    launches: int


def trained(strategy, made, *, ranks=RANKS, as_processes=False, steps=6, capture="auto", scaling=None):
    """What every rank ends with: its state, how it communicates, what it captures. ``made``: makes a device."""
    graph = nets.chain(2 * ranks)
    recipe = numpy_recipe(graph.with_batch(2), precision("fp32"), None, True)

    def work(communicator):
        opened = made()
        step = minidnn.compile(
            graph, strategy=strategy, communicator=Processes(communicator) if as_processes else communicator, device=opened,
            recipe=recipe, optimizer=nets.MOMENTUM, capture=capture,
        )  # fmt: skip
        for number in range(steps):
            step.run(*nets.batch(graph, number))
            if number in (0, 3):  # the ranks evaluate different numbers of images
                step.evaluate(nets.batch(graph, 9, 1 + 2 * communicator.rank)[0])
        state = nets.state(step)
        step.close()
        launches = getattr(getattr(opened, "fake", None), "launched", 0)
        return Ended(state, step.communicator.name, step.ranks.strategy.implementation, launches)

    return run_ranks(ranks, work)


@functools.cache
def expected(strategy, scaled=False, **options):
    """The same on the emulated device; ``scaled`` says under which precision."""
    return trained(strategy, EmulatedDevice, **options)


@pytest.mark.parametrize("strategy", EVERY[::2])
def test_ranks_that_share_a_gpu_through_the_host_have_the_bits_of_the_emulated_device(fake, monkeypatch, strategy):
    monkeypatch.setattr(capturing, "LEAST_WORKS", 1)
    for ours, theirs in zip(trained(strategy, device), expected(strategy), strict=True):
        assert ours.name == "in-process through the host" and ours.launches
        assert nets.differing(ours.state, theirs.state) == []


@pytest.mark.parametrize("capture", ("auto", "on", "off"))
@pytest.mark.parametrize("strategy", EVERY)
def test_ranks_by_nccl_have_the_bits_of_the_emulated_device(fake, monkeypatch, strategy, capture):
    monkeypatch.setattr(capturing, "LEAST_WORKS", 1)  # the net is small
    ours = trained(strategy, device, as_processes=True, capture=capture)
    for one, theirs in zip(ours, expected(strategy), strict=True):
        assert one.name == "NCCL" and (one.launches > 0) == (capture != "off")
        assert nets.differing(one.state, theirs.state) == []


def test_ranks_keep_a_device_for_one_strategy_after_another(fake):
    graph = nets.chain(2 * RANKS)
    recipe = numpy_recipe(graph.with_batch(2), precision("fp32"), None, True)
    strategies = ("ring_delayed:nccl", "tree", "ring:steps", "ring_delayed:nccl")

    def work(communicator):
        opened, found = device(), []
        for strategy in strategies:
            step = minidnn.compile(
                graph, strategy=strategy, communicator=Processes(communicator), device=opened, recipe=recipe,
                optimizer=nets.MOMENTUM,
            )  # fmt: skip
            for number in range(6):
                step.run(*nets.batch(graph, number))
                if number in (0, 3):
                    step.evaluate(nets.batch(graph, 9, 1 + 2 * communicator.rank)[0])
            found.append(nets.state(step))
            step.close()
            # Between them a step of its own, without the others.
            alone = minidnn.compile(graph.with_batch(2), device=opened, recipe=recipe)
            alone.run(*nets.batch(alone.graph))
            alone.close()
        opened.close()
        return found

    for rank, states in enumerate(run_ranks(RANKS, work)):
        for strategy, state in zip(strategies, states, strict=True):
            assert nets.differing(state, expected(strategy)[rank].state) == [], strategy


def test_a_scaled_loss_is_judged_on_the_stream_of_the_transfers(fake, monkeypatch):
    monkeypatch.setitem(PRECISIONS, "fp32", PRECISIONS["fp32"]._replace(scaled=True))
    for strategy in ("ring:nccl", "ring_delayed:steps", "tree"):
        ours = trained(strategy, device, as_processes=True)
        for one, theirs in zip(ours, expected(strategy, scaled=True), strict=True):
            assert nets.differing(one.state, theirs.state) == []


def test_a_ring_step_is_one_group_and_every_other_call_stands_alone(fake):
    trained("ring:steps", device, as_processes=True, steps=1)
    warm = ["allReduce", "reduceScatter", "allGather", "broadcast", ["send", "recv"]]
    assert fake.nccl.calls == {rank: [*warm, ["send", "recv"], ["send", "recv"]] for rank in range(RANKS)}
    fake.nccl.calls.clear()
    trained("tree:steps", device, as_processes=True, steps=1)
    assert fake.nccl.calls == {0: [*warm, "recv", "send"], 1: [*warm, "send", "recv"]}


def test_one_captured_rank_has_the_bits_of_a_single_process(fake):
    (ours,) = trained("ring", device, ranks=1)
    (theirs,) = expected("ring", ranks=1)
    assert nets.differing(ours.state, theirs.state) == [] and ours.launches and fake.nccl.calls == {}


def test_collectives_are_the_default_on_a_gpu_and_steps_elsewhere(fake):
    assert trained("ring", device, steps=0)[0].implementation == "nccl"
    assert trained("tree", device, steps=0)[0].implementation == expected("ring", steps=0)[0].implementation == "steps"


def test_two_steps_of_one_group_share_a_communicator_and_have_streams_of_their_own(fake):
    def work(communicator):
        bootstrap = Processes(communicator)
        one, other = (nccl.Nccl(bootstrap, device().stream(COMM)) for _ in range(2))
        return one._comm is other._comm, one._stream != other._stream, len(bootstrap.signs.checks)

    assert run_ranks(2, work) == [(True, True, 1)] * 2


def test_a_kernel_that_needs_scratch_cannot_run_beside_computation(fake):
    opened = device()
    with pytest.raises(AssertionError, match="channel_sum cannot run on stream comm"):
        opened.kernel("channel_sum", (), None, {}, COMM)
    program = minidnn.compile(
        nets.residual(4), strategy="ring_delayed", communicator=InProcess.group(2)[0], device=None, precision="fp16"
    ).program
    beside = {row.kernel for row in program["train"].rows if row.stream == COMM and row.op in (Op.ADD, Op.UPDATE)}
    assert {"add_forward", "adapt_scale", "check_finite", "convert", "relu_backward"} < beside
    for name in beside:
        assert name in WITHOUT_SCRATCH


@pytest.mark.parametrize("absent", ("import", "empty"))
def test_nccl_missing_on_one_rank_is_refused_on_all_with_the_pip_line(fake, monkeypatch, absent):
    whole = nccl._import

    def some():
        if not fake.mine.first:
            return whole()
        monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nccl=SimpleNamespace(available=False)))
        if absent == "import":
            monkeypatch.setitem(sys.modules, "cupy.cuda", None)
        return whole()

    monkeypatch.setattr(nccl, "_import", some)

    def work(communicator):
        fake.mine.first = communicator.rank == 1
        communicator.barrier()
        try:
            nccl.Nccl(Processes(communicator), 1)
        except UserError as error:
            return str(error)
        return None

    first, second = run_ranks(2, work)
    assert first == second and "pip install 'minidnn-layup[cuda13]'" in first


def test_what_nccl_notices_is_a_lost_peer_and_a_hanging_abort_is_left_behind(fake, monkeypatch):
    monkeypatch.setattr(nccl, "ABORT_SECONDS", 0.05)
    communicator = nccl.Nccl(Processes(InProcess.group(1)[0]), device().stream(COMM))

    def broken():
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")

    waiting = threading.Event()
    communicator._comm = SimpleNamespace(check_async_error=broken, abort=waiting.wait)
    with pytest.raises(PeerLost, match="NCCL reports on rank 0: NCCL_ERROR_SYSTEM_ERROR"):
        communicator.signs.checks[0]()
    communicator.abort("the disk is full")
    waiting.set()
    with pytest.raises(PeerLost, match="rank 0 failed: the disk is full"):
        communicator.barrier()


def test_all_ranks_take_the_recipe_that_rank_0_has_measured(fake, monkeypatch):
    graph = nets.chain(4)
    recipe = numpy_recipe(graph.with_batch(2), precision("fp32"), None, True)
    monkeypatch.setattr(
        minidnn.prepare, "make_recipe", lambda *rest, **how: replace(recipe, workspace_limit=100 + fake.mine.rank)
    )

    def work(communicator):
        fake.mine.rank = communicator.rank
        step = minidnn.compile(graph, strategy="ring", communicator=Processes(communicator), device=device())
        return step.recipe.workspace_limit

    assert run_ranks(2, work) == [100, 100]


def test_the_check_for_gpus_tries_every_call_of_nccl(fake, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu"))
    check = importlib.import_module("ranks_check")
    bench = check.Bench(3, lambda work: run_ranks(3, lambda c: work(Processes(c))), None, False)
    monkeypatch.setattr(bench, "open", device)
    found = check.check_nccl(bench)
    assert found["passed"] and len(found["errors"]) == 5


def test_the_check_of_16_bit_compares_gradients_with_the_mean_of_all_shares(monkeypatch):
    """With types that NumPy computes in, and then with other gradients of scales and biases."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu"))
    check = importlib.import_module("ranks_check")
    monkeypatch.setitem(PRECISIONS, "bf16", Precision("bf16", "float32", "float64", master=True))
    bench, trained = check.Bench(2, functools.partial(run_ranks, 2), None, False), {}
    found = check.check_precision(bench, "all_reduce:steps", "bf16", trained)
    assert found["passed"] and found["to_shares"] < 1e-6
    shares = trained["bf16 shares"]
    shares |= {name: array * 1.02 for name, array in shares.items() if array.ndim == 1}
    assert not check.check_precision(bench, "all_reduce:steps", "bf16", trained)["passed"]


# -- who takes which GPU ----------------------------------------------------------------------------------------------
def seats(*given):
    return [Seat(host, local, tuple(buses.split())) for host, local, buses in given]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([("a", 0, "x y"), ("a", 1, "x y")], [0, 1]),
        ([("a", 0, "x"), ("a", 1, "y")], [0, 0]),  # each sees its own alone
        ([("a", 0, "x y"), ("b", 0, "x y"), ("a", 1, "x y"), ("b", 1, "x y")], [0, 0, 1, 1]),
        ([("a", None, "x y z"), ("a", None, "x y z")], [0, 1]),
    ],
)
def test_each_rank_of_a_host_takes_a_gpu_of_its_own(given, expected):
    assert assign(seats(*given)) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            [("a", 0, "x"), ("a", 1, "x")],
            "2 ranks run on a, which has 1 GPU for them: start 1, or use --device emulated",
        ),
        ([("a", i, "x y") for i in range(3)], "3 ranks run on a, which has 2 GPUs for them: start 2"),
        ([("a", 0, "x y"), ("a", 1, "")], "rank 1 on a has no GPU that it can use: it sees none"),
        ([("a", 0, "x y"), ("a", 3, "x y")], "calls rank 1 number 3 on a, where it is number 1"),
    ],
)
def test_ranks_and_gpus_that_do_not_go_together_are_refused(given, words):
    with pytest.raises(UserError, match=words):
        assign(seats(*given))


def test_all_ranks_learn_their_device_or_one_sentence(monkeypatch):
    def work(device):
        def told(communicator):
            try:
                return own_device(communicator, Place(communicator.rank, 2, communicator.rank), device)
            except UserError as error:
                return str(error)

        return run_ranks(2, told)

    monkeypatch.setattr(gpus, "_gpus", lambda: (("x", "y"), ""))
    assert work("auto") == work("cuda") == ["cuda:0", "cuda:1"] and work("emulated") == ["emulated"] * 2
    assert work("cuda:1") == ["--device cuda:1 on 2 ranks: each takes its own GPU; write --device cuda"] * 2
    monkeypatch.setattr(gpus, "_gpus", lambda: ((), "CUDA needs CuPy"))
    assert work("auto") == ["auto"] * 2
    first, second = work("cuda")
    assert first == second and first.startswith("rank 0 on ") and first.endswith("that it can use: CUDA needs CuPy")
    assert own_device(InProcess.group(1)[0], Place(), "cuda:3") == "cuda:3"


def test_arrays_of_the_emulated_device_travel_as_they_are():
    communicator = InProcess.group(1)[0]
    assert gpus.on_device(communicator, EmulatedDevice()) is gpus.on_device(communicator, None) is communicator
