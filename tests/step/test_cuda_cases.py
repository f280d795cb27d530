"""Failures that users of other systems reported, replayed on the CUDA device: on a fake CUDA everywhere, on a GPU where one is.

On the fake, kernels are NumPy's and streams run late and in an adversarial order; what only a GPU can show is skipped there.
"""

import gc
import shutil
import subprocess
import time

import numpy as np
import pytest

import minidnn
import models
import tests.backend.fake_cuda as fake_cuda
from minidnn.device.cuda_memory import OUTSIDE_MARGIN_BYTES
from minidnn.schedule.instruction import COMPUTE, D2H
from minidnn.spec import TensorSpec
from tests.backend.cuda_nets import usable_cupy
from tests.step.cuda_bench import MOVING, OPTIMIZER, Allocations, Bench, batches, close, net


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def bench(request, monkeypatch):
    if request.param == "fake":
        yield Bench(fake_cuda.install(monkeypatch, 3).module, True)
        return
    yield Bench(usable_cupy(), False)
    gc.collect()


def test_a_loss_read_at_once_is_the_loss_read_after_everything(bench):
    """cupy/cupy#7938: copies to the host were not ordered with what they copied."""
    graph = net()
    data = batches(graph, 40)
    late, soon = bench.compile(graph, MOVING), bench.compile(graph, MOVING)
    results = [late.run(x, y) for x, y in data[:2]]
    late.executor.device.synchronize()
    expected = [result.loss for result in results]
    for x, y in data[2:]:
        result = late.run(x, y)
        late.executor.device.synchronize()
        expected.append(result.loss)
    assert [soon.run(x, y).loss for x, y in data] == expected
    close(late)
    close(soon)


@pytest.mark.gpu
def test_a_copy_to_the_host_returns_before_it_is_done():
    """cupy/cupy#1692: the asynchronous copy went to pageable memory and was synchronous."""
    cupy = usable_cupy()
    nbytes = 256 << 20
    opened = Bench(cupy, False).device()
    opened.open(nbytes, nbytes)
    spec = TensorSpec((nbytes,), "uint8")
    work = opened.copy(opened.array("host", 0, spec), opened.array("device", 0, spec), D2H)
    opened.wait(opened.submit(D2H, work, (), 0.0, True))
    begin = time.perf_counter()
    event = opened.submit(D2H, work, (), 0.0, True)
    returned = time.perf_counter() - begin
    opened.wait(event)
    assert returned < 2e-3 < time.perf_counter() - begin
    opened.close()


def test_nothing_is_allocated_or_pinned_after_the_first_steps(bench, monkeypatch):
    """cupy/cupy#7532, meta-pytorch/torchtune#2076: an upload pinned another buffer; pinning on the fly stops all streams."""
    graph = net()
    step = bench.compile(graph, MOVING)
    data = batches(graph, 12)
    losses = [step.run(x, y).loss for x, y in data[:4]]  # kernels loaded, graphs made

    def refuse(*_, **how):
        raise AssertionError("an allocation inside a step")

    for name in ("Memory", "PinnedMemory"):
        monkeypatch.setattr(bench.cupy.cuda, name, refuse)
    held = bench.used_bytes
    losses += [step.run(x, y).loss for x, y in data[4:]]
    assert bench.used_bytes == held and np.isfinite(losses).all()
    close(step)


def test_building_training_and_closing_again_and_again_keeps_nothing(bench):
    """cupy/cupy#8111: pinned memory came back only when the process ended."""
    graph, held = net(), []
    for _ in range(8):
        step = bench.compile(graph, MOVING)
        for x, y in batches(graph, 3):
            step.run(x, y)
        close(step)
        del step
        gc.collect()
        held.append(bench.used_bytes)
    assert held[-1] <= held[2] * 1.05


@pytest.mark.gpu
def test_slab_and_outside_are_what_the_driver_shows():
    """pytorch/pytorch#58466: a bound that leaves out the context is exceeded in the eyes of nvidia-smi."""
    cupy = usable_cupy()
    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is not installed")
    graph = models.build("resnet20", batch=128)
    limit = 4 << 30
    step = Bench(cupy, False).compile(graph, process_memory=limit)
    for x, y in batches(graph, 6):
        step.run(x, y)
    step.executor.device.synchronize()
    outside = step.executor.device.outside_bytes()
    gpu = cupy.cuda.runtime.deviceGetPCIBusId(0)  # nvidia-smi counts the GPUs that are hidden from this process, too
    command = ["nvidia-smi", "-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    shown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) << 20
    assert outside > 0 and abs(shown - outside - step.program.reserved_bytes) < 0.05 * shown + (64 << 20)
    assert outside + step.program.reserved_bytes <= limit
    close(step)


def test_a_pool_under_a_limit_returns_what_is_cached_before_it_fails(bench):
    """cupy/cupy#7678: everything was free, and the next larger array failed."""
    pool, _ = bench.device().pools(200 << 20)
    pool.free(pool.malloc(100 << 20))
    pool.free(pool.malloc(160 << 20))
    assert pool.held_bytes == 160 << 20
    pool.free_all_blocks()
    graph = net()
    data = batches(graph, 6)
    slab, pooled = bench.compile(graph, MOVING), bench.compile(graph, MOVING, allocator="pool", memory=64 << 20)
    assert [pooled.run(x, y).loss for x, y in data] == [slab.run(x, y).loss for x, y in data]
    for name, array in slab.state_dict().items():
        np.testing.assert_array_equal(pooled.state_dict()[name], array, err_msg=name)
    assert pooled.executor.pool.peak_held_bytes <= 64 << 20
    if not bench.fake:
        pooled.verify(*data[0])
        assert pooled.measured.peak_bytes == pooled.profile.peak_bytes
    close(pooled)
    close(slab)


def test_every_workspace_limit_trains(bench):
    """chainer/chainer#3922: a limit too small for any tensor-core algorithm failed in the middle of training."""
    graph, losses = net(), []
    data = batches(graph, 3)
    for limit in (1, "1MB", "8MB", "1GB"):
        how = {} if bench.fake else {"workspace_limit": limit}
        step = bench.compile(graph, **how)
        assert bench.fake or max(e.workspace_bytes for e in step.recipe.engines.values()) <= 10**9
        losses.append([step.run(x, y).loss for x, y in data])
        close(step)
    np.testing.assert_allclose(losses, [losses[0]] * 4, rtol=1e-3)


@pytest.mark.gpu
def test_the_search_for_engines_never_takes_more_than_the_slab_and_gives_all_back(monkeypatch, tmp_path):
    """microsoft/CNTK#1516: the search for algorithms took memory of its own, and training needed most when it began."""
    bench = Bench(usable_cupy(), False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no engine was measured before
    graph, opened = models.build("resnet18", batch=64), bench.device("fp16")
    allocations = Allocations(monkeypatch, bench)
    used, outside = bench.used_bytes, opened.outside_bytes()
    step = bench.compile(graph, kind="fp16", device=opened)
    slab, grown = step.program.reserved_bytes, opened.outside_bytes() - outside
    *searching, _ = allocations.held
    print(
        f"slab {slab}, at most {max(searching)} in {len(searching)} allocations of the search; libraries took {grown}"
    )
    assert max(searching) <= slab
    assert allocations.sizes[-1] == slab == allocations.held_bytes, "memory of the search is alive beside the slab"
    assert bench.used_bytes - used == slab + grown and grown <= OUTSIDE_MARGIN_BYTES
    for x, y in batches(graph, 4):
        step.run(x, y)
    opened.synchronize()
    assert max(allocations.used) <= bench.used_bytes, "training needed most when it began"
    close(step)


@pytest.mark.gpu
def test_a_smaller_last_batch_chooses_no_engine_anew():
    """pytorch/pytorch#2759: every new size was tuned again, in the middle of an epoch."""
    cupy = usable_cupy()
    graph, bench = net(4, norm=False), Bench(cupy, False)
    device = bench.device()
    step = bench.compile(graph, device=device, tail=1)
    data = batches(graph, 6)
    for x, y in data[:2]:
        step.run(x, y)
    step.run(data[2][0][:1], data[2][1][:1])

    def refuse(*_, **how):
        raise AssertionError("an engine was chosen in the middle of training")

    device.select_engine = device.tune_engine = refuse
    plans = len(device.cudnn._plans)
    for x, y in data[3:5]:
        step.run(x, y)
    assert np.isfinite(step.run(data[5][0][:1], data[5][1][:1]).loss)
    assert len(device.cudnn._plans) == plans
    close(step)


@pytest.mark.parametrize(("height", "width"), [(109, 175), (80, 128)])
def test_odd_sizes_train(bench, height, width):
    """pytorch/pytorch#11065: a simple convolution of an odd size was not supported."""
    graph = net(2, height, width, norm=False)
    data = batches(graph, 2)
    step, reference = bench.compile(graph), minidnn.compile(graph, optimizer=OPTIMIZER)
    np.testing.assert_allclose(
        [step.run(x, y).loss for x, y in data], [reference.run(x, y).loss for x, y in data], rtol=1e-5
    )
    close(step)


@pytest.mark.gpu
def test_more_than_two_billion_elements_train():
    """pytorch/pytorch#1664: a batch whose activations need more than 32 bits to count failed."""
    cupy = usable_cupy()
    if cupy.cuda.runtime.memGetInfo()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free memory")
    bench, losses = Bench(cupy, False), []

    def large(batch):
        g = minidnn.Graph()
        h = g.relu(g.conv2d(g.input((batch, 512, 512, 3)), 64, 1))
        g.softmax_cross_entropy(g.linear(g.global_avg_pool(h), 5), g.label((batch,)))
        return g

    whole = large(132)
    assert 132 * 512 * 512 * 64 > 2**31
    ((x, y),) = batches(whole, 1)
    for graph, parts in ((whole, 1), (large(44), 3)):
        step = bench.compile(graph, kind="fp16")
        size, before = 132 // parts, step.state_dict()
        found = []
        for i in range(parts):
            step.load_state_dict(before)
            found.append(step.run(x[i * size : (i + 1) * size], y[i * size : (i + 1) * size]).loss)
        losses.append(np.mean(found))
        step.executor.device.submit(COMPUTE, None, (), 0.0, False)
        close(step)
        gc.collect()
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)
