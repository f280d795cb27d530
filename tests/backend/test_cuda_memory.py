"""Memory of the CUDA device on a fake CUDA: the pool, the bound on the whole process, and how long the GPU is idle."""

import gc
from itertools import pairwise

import numpy as np
import pytest

import layup
import minidnn
import tests.backend.fake_cuda as fake_cuda
from minidnn.budget import MODULE_BYTES
from minidnn.device.cuda_pool import CudaPool
from minidnn.device.emulated import EmulatedDevice
from minidnn.device.pool import PoolModel, PoolOutOfMemory
from minidnn.errors import DoesNotFit, UserError
from minidnn.kernels.problem import own
from minidnn.precision import precision
from minidnn.prepare import prepare
from minidnn.recipes import numpy_recipe
from minidnn.schedule.instruction import DEVICE, Op
from minidnn.spec import TensorSpec
from tests.backend.cuda_nets import FIXED_BYTES, MOVING, batches, compiled, device, net

PLANS = {"keep": minidnn.keep(), "moving": MOVING}


@pytest.fixture(params=[0, 1])
def cuda(request, monkeypatch):
    return fake_cuda.install(monkeypatch, request.param)


def outcome(step, data):
    results = [step.run(x, y) for x, y in data]
    logits = step.evaluate(data[0][0])
    return [r.loss for r in results], {**step.state_dict(), "logits": logits, **step.gradients(*data[1])}


# -- the pool ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("plan", PLANS)
def test_the_pool_of_a_gpu_gives_the_bits_of_the_slab_and_holds_what_the_model_says(cuda, plan):
    data = batches(4)
    expected = outcome(compiled(EmulatedDevice(), plan=PLANS[plan]), data)
    model = compiled(EmulatedDevice(), plan=PLANS[plan], allocator="pool")
    outcome(model, data)
    step = compiled(device(), plan=PLANS[plan], allocator="pool")
    found = outcome(step, data)
    assert found[0] == expected[0]
    for name, array in expected[1].items():
        np.testing.assert_array_equal(found[1][name], array, err_msg=name)
    pool, wanted = step.executor.pool, model.executor.pool
    assert pool.peak_used_bytes == wanted.peak_used_bytes == step.program.peak_bytes
    assert (pool.peak_held_bytes, pool.device_allocations) == (wanted.peak_held_bytes, wanted.device_allocations)
    assert step.executor.pinned_pool.held_bytes == model.executor.pinned_pool.held_bytes
    assert cuda.used == pool.held_bytes + FIXED_BYTES
    assert step.executor.device.outside_bytes() == FIXED_BYTES
    step.close()
    gc.collect()
    assert cuda.used == FIXED_BYTES


def test_a_pool_under_a_limit_never_holds_more_and_refuses_what_cannot_run(cuda):
    step = compiled(device(), plan=PLANS["moving"], allocator="pool", memory=1 << 20)
    outcome(step, batches(2))
    assert step.executor.pool.limit == 1 << 20 and step.executor.pool.peak_held_bytes <= 1 << 20
    with pytest.raises(DoesNotFit, match="short by"):
        compiled(device(), allocator="pool", memory=step.program.peak_bytes - 512)


def test_blocks_of_the_pool_do_not_overlap_and_lie_in_their_allocation():
    rng, fake = np.random.default_rng(0), fake_cuda.FakeCuda()
    pool, alive = CudaPool(fake.module), {}
    for _ in range(600):
        if alive and rng.random() < 0.5:
            pool.free(alive.pop(rng.choice(list(alive)))[0])
        else:
            block = pool.malloc(int(rng.integers(1, 9000)))
            alive[block] = (block, pool.array(block, 0, TensorSpec((1,), "uint8")).data.ptr, pool._in_use[block].nbytes)
        ranges = sorted((begin, begin + nbytes) for _, begin, nbytes in alive.values())
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
        for block in alive:
            memory, offset = pool.place(block)
            assert offset >= 0 and offset + pool._in_use[block].nbytes <= memory.size
        assert fake.used == pool.held_bytes
    del memory
    for block in list(alive):
        pool.free(block)
    pool.free_all_blocks()
    assert fake.used == 0 == pool.held_bytes


def test_where_the_driver_refuses_the_pool_gives_back_what_is_free_before_it_asks_again():
    fake = fake_cuda.FakeCuda(total=10_240)
    pool = CudaPool(fake.module)
    pool.free(pool.malloc(8192))
    block = pool.malloc(10_240)  # fits only after the 8,192 cached bytes went back
    assert pool.held_bytes == 10_240 == fake.used
    with pytest.raises(PoolOutOfMemory, match="10240 of them in use, and cannot add 512"):
        pool.malloc(1)
    pool.free(block)
    assert issubclass(PoolOutOfMemory, UserError)  # one line, exit code 2


def test_the_model_counts_the_same_whether_or_not_memory_is_behind_it():
    step = compiled(None, plan=PLANS["moving"])
    model, real = PoolModel(), CudaPool(fake_cuda.FakeCuda().module)
    blocks = {}
    for row in step.program["train"].rows:
        if row.buffer is not None and row.buffer.space == DEVICE:
            for pool in (model, real):
                if row.op is Op.ALLOC:
                    blocks[pool, row.buffer] = pool.malloc(row.buffer.footprint)
                else:
                    pool.free(blocks.pop((pool, row.buffer)))
            assert (model.used_bytes, model.held_bytes) == (real.used_bytes, real.held_bytes)


def test_a_pool_is_not_captured(cuda):
    with pytest.raises(UserError, match="capture='on' needs addresses that stay"):
        compiled(device(), allocator="pool", capture="on")


# -- the whole process ------------------------------------------------------------------------------------------------
def test_process_memory_is_the_slab_and_what_was_measured_outside_it(cuda):
    opened = device()
    cuda.used += 100 << 20  # a context, say
    outside = opened.outside_bytes()
    assert outside == (100 << 20) + FIXED_BYTES
    step = compiled(opened, process_memory="400MiB")
    graphs = len(step.graph.nodes) * 8 * 4096
    assert step.program.reserved_bytes <= (400 << 20) - outside - MODULE_BYTES - graphs
    cuda.used -= 100 << 20


def test_process_memory_bounds_the_search_for_engines(cuda):
    opened, rooms = device(), []
    opened.tune_engine = lambda problem, limit, room=None: rooms.append(room) or own(problem)
    left = (400 << 20) - opened.outside_bytes() - MODULE_BYTES
    for limit, room in (("400MiB", left), (None, None)):
        rooms.clear()
        prepare(net(), device=opened, process_memory=limit)
        assert rooms and set(rooms) == {room}


def test_process_memory_refuses_in_a_sentence_what_does_not_fit(cuda):
    with pytest.raises(
        UserError, match=r"--process-memory 1048576 leaves nothing for the slab: \d+ bytes lie outside it on cuda:0"
    ):
        compiled(device(), process_memory="1MiB")
    opened = device()
    outside, how = opened.outside_bytes() + MODULE_BYTES, {"capture": "off"}
    with pytest.raises(
        DoesNotFit, match=rf"--process-memory {outside + 8192} B less {outside} B outside the slab"
    ) as refusal:
        compiled(opened, process_memory=outside + 8192, **how)
    with pytest.raises(DoesNotFit, match="no plan of policy keep fits in 8192 B"):
        recipe = numpy_recipe(net(), precision("fp32"), None, True)
        layup.compile(net(), policy="keep", device=opened, recipe=recipe, process_memory=outside + 8192, **how)
    step = compiled(opened, process_memory=outside + refusal.value.minimum_bytes, **how)
    assert step.program.reserved_bytes == refusal.value.minimum_bytes


@pytest.mark.parametrize("where", ["emulated", None])
def test_process_memory_without_a_gpu_is_refused_by_name(where):
    with pytest.raises(UserError, match="process_memory='1GiB' bounds what the driver of a GPU counts"):
        minidnn.compile(net(), device=where, process_memory="1GiB")


def test_a_budget_above_the_free_memory_is_refused_with_the_figure(cuda):
    opened = device()
    free = cuda.total - cuda.used
    for compiler in (compiled, lambda where, memory: layup.compile(net(), memory, device=where)):
        with pytest.raises(UserError, match=f"is above what is free on cuda:0: {free} bytes"):
            compiler(opened, memory=free + 1)
    planned = layup.plan(net(), None, device=opened, recipe=numpy_recipe(net(), precision("fp32"), None, True))
    assert planned.memory == free * 97 // 100  # no limit of ours is the limit of the GPU


def test_the_gpu_is_idle_for_what_no_row_explains(cuda):
    """Every task of the fake takes a millisecond: the busy time is the number of rows of ``compute`` that do something."""
    from idle import busy_seconds, by_kernel, furthest_from_floor, host_seconds, row_times

    step = compiled(device(), capture="on")
    for x, y in batches(3):
        step.run(x, y)
    with np.errstate(all="ignore"):  # weights that are updated so often grow
        times = row_times(step)
    assert all(seconds > 0 for seconds in times.values())
    rows = [
        row
        for row, bound in zip(step.program["train"].rows, step.executor.bound("train").rows, strict=True)
        if row.stream == "compute" and bound.works[0] is not None
    ]
    table = by_kernel(step, times)
    assert sum(count for _, count in table.values()) == len(rows) and "sgd_momentum_update" in " ".join(table)
    assert busy_seconds(step, times) == pytest.approx(sum(seconds for seconds, _ in table.values()))
    furthest = furthest_from_floor(step, times)
    assert sum(entry["rows"] for entry in furthest) == sum(bool(row.kernel) for row in rows)
    beyond = [entry["rows"] * (entry["seconds"] - entry["floor_seconds"]) for entry in furthest]
    assert beyond == sorted(beyond, reverse=True) and all(0 <= entry["floor_seconds"] < 1e-3 for entry in furthest)
    x, y = batches(1)[0]
    with np.errstate(all="ignore"):
        assert host_seconds(lambda: step.run(x, y), step.executor.device.synchronize) > 0
