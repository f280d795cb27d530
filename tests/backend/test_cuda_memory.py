"""Memory and refusals of the CUDA device on a fake CUDA: the pool, the bound on the whole process, and what cannot be done."""

import gc
import importlib.util
import sys
from itertools import pairwise

import numpy as np
import pytest

import layup
import minidnn
import tests.backend.fake_cuda as fake_cuda
from minidnn import cuda_recipes
from minidnn.budget import MODULE_BYTES
from minidnn.device import cuda_libraries
from minidnn.device.cuda import CudaDevice
from minidnn.device.cuda_pool import CudaPool
from minidnn.device.emulated import EmulatedDevice
from minidnn.device.pool import PoolModel, PoolOutOfMemory
from minidnn.errors import DoesNotFit, UserError
from minidnn.kernels import cuda_launch
from minidnn.kernels.problem import OWN, Product, linear_product, own
from minidnn.precision import precision
from minidnn.recipes import numpy_recipe
from minidnn.schedule.instruction import DEVICE, Op
from minidnn.schedule.plan import Decision, Plan
from minidnn.schedule.recipe import Engine, Recipe
from minidnn.spec import TensorSpec

FIXED_BYTES = cuda_launch.SCRATCH_BYTES
OPTIMIZER = minidnn.SGD(lr=0.1, momentum=0.9, weight_decay=1e-4)
PLANS = {
    "keep": minidnn.keep(),
    "moving": Plan({"relu1": Decision.OFFLOAD, "conv2": Decision.OFFLOAD, "relu2": Decision.RECOMPUTE}),
}


@pytest.fixture(params=[0, 1])
def cuda(request, monkeypatch):
    return fake_cuda.install(monkeypatch, request.param)


def net(batch=4):
    g = minidnn.Graph()
    x = g.input((batch, 8, 8, 3))
    h = g.relu(g.batch_norm(g.conv2d(x, 4, 3, padding=1)))
    h = g.relu(g.batch_norm(g.conv2d(h, 8, 3, stride=2)))
    g.softmax_cross_entropy(g.linear(g.dropout(g.global_avg_pool(h), 0.25), 5), g.label((batch,)))
    return g


def batches(count, batch=4):
    rng = np.random.default_rng(7)
    return [(rng.standard_normal((batch, 8, 8, 3), np.float32), rng.integers(0, 5, batch)) for _ in range(count)]


def device(**how):
    return CudaDevice(refuse=("convolution", "matmul"), **how)


def compiled(where, **how):
    recipe = numpy_recipe(net(), precision("fp32"), None, True)
    return minidnn.compile(net(), optimizer=OPTIMIZER, device=where, recipe=recipe, **how)


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
    assert cuda.used == 0


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
    from idle import busy_seconds, by_kernel, host_seconds, row_times

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
    x, y = batches(1)[0]
    with np.errstate(all="ignore"):
        assert host_seconds(lambda: step.run(x, y), step.executor.device.synchronize) > 0


# -- what cannot be done ----------------------------------------------------------------------------------------------
def test_memory_that_runs_out_beside_the_slab_is_said_with_the_figures(cuda):
    step = compiled(device(), capture="off")
    opened, (x, y) = step.executor.device, batches(1)[0]
    step.run(x, y)
    step.settle()

    def load():
        raise fake_cuda.FakeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory")

    reserved = step.program.reserved_bytes
    with pytest.raises(
        UserError,
        match=rf"out of memory outside the slab .* the slab takes {reserved} bytes, {opened.outside_bytes()} lie",
    ):
        opened.submit("compute", load, (), 0.0, False)
    with pytest.raises(fake_cuda.FakeError, match="launch failure"):  # what is no lack of memory stays what it is
        opened.submit("compute", lambda: (_ for _ in ()).throw(fake_cuda.FakeError("launch failure")), (), 0.0, False)


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ({"count": 0}, "fp32", "no GPU can be used here .*no CUDA device"),
        (
            {"driver": 12040},
            "fp32",
            r"built for CUDA 13.2 and the driver supports CUDA 12.4: .*minidnn-layup\[cuda12\]",
        ),
        (
            {"capability": (6, 1)},
            "fp32",
            "Fake has compute capability 6.1, and cuDNN 9 needs 7.0; use device='emulated'",
        ),
        ({"capability": (7, 5)}, "bf16", "compute capability 7.5, and precision bf16 needs 8.0; use fp32 or fp16"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused_in_a_sentence(monkeypatch, how, kind, said):
    fake_cuda.install(monkeypatch, **how)
    with pytest.raises(UserError, match=said) as refusal:
        device(precision=kind)
    assert "\n" not in str(refusal.value)


def frontend(monkeypatch, create, version=91900):
    module = type(sys)("cudnn")
    module.create_handle, module.backend_version = create, lambda: version
    module.set_stream = module.destroy_handle = lambda *a, **k: None
    notes = ("DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "TENSOR_CORE", "NONDETERMINISTIC")
    module.numerical_note = type("Notes", (), dict.fromkeys(notes, 0))
    module.data_type = type("Types", (), {"FLOAT": 0, "HALF": 1, "BFLOAT16": 2})
    module.cudnnGraphNotSupportedError, module.__version__ = KeyError, "1.26.0"
    monkeypatch.setitem(sys.modules, "cudnn", module)


def no_library():
    raise RuntimeError("libcudnn.so.9: cannot open shared object file\nand more")


def test_a_cudnn_that_is_missing_or_too_old_is_said_with_the_pip_line(monkeypatch):
    frontend(monkeypatch, no_library)
    with pytest.raises(UserError, match=r"cuDNN cannot be used \(libcudnn.so.9: .* file\); pip install 'minidnn-layup"):
        cuda_libraries.open_cudnn(0, "fp32", True, frozenset())
    frontend(monkeypatch, lambda: 1, version=8907)
    with pytest.raises(UserError, match="cuDNN 8907 is too old, at least 90000 is needed: pip install"):
        cuda_libraries.open_cudnn(0, "fp32", True, frozenset())
    monkeypatch.setitem(sys.modules, "cudnn", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="cuDNN frontend, which is not installed"):
        cuda_libraries.open_cudnn(0, "fp32", True, frozenset())


def test_a_cupy_that_cannot_be_loaded_is_not_called_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UserError, match="CuPy is installed but cannot be loaded"):
        cuda_libraries.import_cupy()


def test_what_cudnn_refuses_is_told_with_layer_shapes_and_type():
    graph = net()
    engines = {"conv1:forward": OWN, "conv2:forward": Engine("cudnn", 0, (("engine", 1),))}
    (note,) = cuda_recipes.fallback_notes(graph, Recipe("fp16", "cuda", engines))
    assert "forward of 'conv1', x (4, 8, 8, 3), y (4, 8, 8, 4), weight (4, 3, 3, 3), float16" in note
    assert "our own kernel" in note
    assert cuda_recipes.fallback_notes(graph, numpy_recipe(graph, precision("fp32"), None, True)) == ()


# -- engines ----------------------------------------------------------------------------------------------------------
class Chooser:
    """As much of a CUDA device as makes recipes, whose every engine wants a kilobyte of its own."""

    def __init__(self):
        self.asked = []

    def select_engine(self, problem, limit):
        if limit == 0:
            return own(problem)
        self.asked.append(problem)
        return Engine("cudnn", 1024 * len(self.asked), (("engine", 7),))

    tune_engine = select_engine


def test_the_workspace_of_a_product_is_in_the_recipe_and_in_the_rows():
    chooser = Chooser()
    recipe = cuda_recipes.cuda_recipe(net(), precision("fp32"), None, True, device=chooser)
    products = [p for p in chooser.asked if isinstance(p, Product)]
    assert [(p.rows, p.columns, p.depth) for p in products] == [(4, 5, 8), (5, 8, 4), (4, 8, 5)]
    step = minidnn.compile(net(), device=None, recipe=recipe)
    rows = {row.kernel: row for row in step.program["train"].rows}
    for direction in ("forward", "backward_data", "backward_weight"):
        row, engine = rows[f"linear_{direction}"], recipe.engine("linear1", direction)
        assert row.workspace is not None and row.workspace.spec.nbytes == engine.workspace_bytes
        assert row.attrs["engine"] == 7


def test_a_product_is_described_as_the_kernels_define_it():
    rng = np.random.default_rng(0)
    n, c, k = 3, 5, 2
    x, dy, weight = (rng.standard_normal(shape) for shape in ((n, c), (n, k), (k, c)))
    operands = {
        "forward": (x, weight, x @ weight.T),
        "backward_data": (dy, weight, dy @ weight),
        "backward_weight": (dy, x, dy.T @ x),
    }
    for direction, (a, b, result) in operands.items():
        p = linear_product(direction, n, c, k, "float64")
        at = np.lib.stride_tricks.as_strided
        left = at(a, (p.rows, p.depth), (8 * p.a_row, 8 * p.a_depth))
        right = at(b, (p.depth, p.columns), (8 * p.b_depth, 8 * p.b_column))
        np.testing.assert_allclose(left @ right, result)


def test_a_refusal_does_not_ask_cudnn_which_engines_have_no_workspace():
    chooser = Chooser()
    chooser.name, chooser.available_bytes = "cuda:0", 1 << 30
    request = minidnn.compile.__globals__["prepare"](net(), device=chooser)
    asked = len(chooser.asked)
    lean = request.with_workspace_limit(1)
    assert len(chooser.asked) == asked
    assert {engine.workspace_bytes for engine in lean.recipe.engines.values()} == {0}
    assert lean.recipe.engines.keys() == request.recipe.engines.keys()


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
