"""The CUDA device: its ordering and bookkeeping on a fake CUDA everywhere, its arithmetic on a real one where there is one."""

import dataclasses
import gc
import inspect
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import minidnn
import tests.backend.fake_cuda as fake_cuda
from minidnn.capture import head_rows
from minidnn.device.cuda import CudaDevice
from minidnn.device.cuda_libraries import parse_device
from minidnn.device.emulated import EmulatedDevice
from minidnn.errors import UserError
from minidnn.kernels import base, cuda_kernels, cuda_launch, cudnn, cudnn_tune
from minidnn.kernels.problem import OWN, Convolution
from minidnn.precision import precision
from minidnn.recipes import numpy_recipe
from minidnn.schedule.instruction import COMPUTE, D2H, H2D, Op
from minidnn.schedule.plan import Decision, Plan
from minidnn.schedule.recipe import Engine, Recipe
from minidnn.spec import TensorSpec

SOURCES = Path(cuda_launch.SOURCES)


# -- a fake CUDA: what a GPU would do with what the device enqueues ---------------------------------------------------
@pytest.fixture(params=[0, 1, 2])
def cuda(request, monkeypatch):
    """A fake CUDA whose kernels are NumPy's, run when the streams please."""
    return fake_cuda.install(monkeypatch, request.param)


def device():
    return CudaDevice(refuse=("convolution", "matmul"))


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


FIXED_BYTES = cuda_launch.SCRATCH_BYTES
OPTIMIZER = minidnn.SGD(lr=0.1, momentum=0.9, weight_decay=1e-4)


def on_cuda(capture="off", **how):
    """The step on the fake, with the recipe of its stand-ins."""
    recipe = numpy_recipe(net(), precision("fp32"), None, True)
    return minidnn.compile(net(), optimizer=OPTIMIZER, device=device(), recipe=recipe, capture=capture, **how)


def train(step, data):
    results = [step.run(x, y) for x, y in data]  # the host runs ahead; losses are read late
    return [r.loss for r in results], step.state_dict()


def assert_same(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name in one[1]:
        np.testing.assert_array_equal(one[1][name], other[1][name], err_msg=name)


def test_a_training_run_gives_the_bits_of_the_emulated_device(cuda):
    data = batches(5)
    expected = train(minidnn.compile(net(), optimizer=OPTIMIZER, device=EmulatedDevice()), data)
    step = on_cuda()
    assert_same(train(step, data), expected)
    reference = minidnn.compile(net(), optimizer=OPTIMIZER, device=EmulatedDevice())
    train(reference, data)
    np.testing.assert_array_equal(step.evaluate(data[0][0]), reference.evaluate(data[0][0]))


def test_gradients_are_those_of_the_emulated_device(cuda):
    x, y = batches(1)[0]
    expected = minidnn.compile(net(), device=EmulatedDevice()).gradients(x, y)
    found = on_cuda().gradients(x, y)
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_no_event_is_created_once_two_runs_have_made_theirs(cuda):
    step = on_cuda()
    train(step, batches(3))
    made = cuda.created
    train(step, batches(6))
    assert cuda.created == made


CAPTURED_PLANS = {
    "keep": minidnn.keep(),
    "moving": Plan({"relu1": Decision.OFFLOAD, "conv2": Decision.OFFLOAD, "relu2": Decision.RECOMPUTE}),
    "streamed": Plan(streamed=("*",), group_bytes=1),
}


@pytest.mark.parametrize("plan", CAPTURED_PLANS)
def test_captured_steps_give_the_same_bits_between_all_that_is_not_captured(cuda, plan):
    """Two runs row by row load the kernels, the others are launches; evaluation and gradients come in between."""
    data = batches(9)
    one, other = (
        minidnn.compile(net(), optimizer=OPTIMIZER, device=EmulatedDevice()),
        on_cuda("auto", plan=CAPTURED_PLANS[plan]),
    )
    outcomes = []
    for step in (one, other):
        found = []
        for count, (x, y) in enumerate(data):
            result = step.run(x, y)
            if count == 4:
                found.append(step.evaluate(x))
            if count == 6:
                found += step.gradients(x, y).values()
            found.append(result.loss if count % 3 else 0.0)
        outcomes.append([*found, *step.state_dict().values()])
    assert cuda.launched == 7
    for found, expected in zip(*reversed(outcomes), strict=True):
        np.testing.assert_array_equal(found, expected)
    other.close()


def test_the_batch_of_a_captured_step_travels_beside_the_step_before(cuda):
    """Its copy waits for the rows that read the staging buffer, not for the end of the graph."""
    step = on_cuda("on")
    data = batches(4)
    train(step, data[:2])
    executor = step.executor
    waits = []
    submit = executor.device.submit

    def spy(stream, work, after, seconds, record):
        if stream == H2D:
            waits.append([event.pointer for event in after])
        return submit(stream, work, after, seconds, record)

    executor.device.submit = spy
    train(step, data[2:3])
    staged, end = [event.pointer for event in executor._staged], executor._end.pointer
    waits.clear()
    train(step, data[3:])
    assert waits[0] == staged and end not in waits[0]


def test_a_head_that_is_more_than_the_way_of_the_batch_goes_into_the_graph():
    schedule = minidnn.compile(net(), minidnn.keep(), device=None).program["train"]
    count = head_rows(schedule)
    assert {row.op for row in schedule.rows[:count]} <= {Op.INPUT, Op.ALLOC} and schedule.rows[count - 1].op is Op.INPUT
    assert all(row.op is not Op.INPUT for row in schedule.rows[count:])
    copy = schedule.rows[count - 1]._replace(op=Op.LOAD, stream=H2D)
    assert head_rows(dataclasses.replace(schedule, rows=(copy, *schedule.rows))) == 0


def test_capture_is_refused_where_there_is_nothing_to_capture():
    with pytest.raises(UserError, match="capture='on' cannot be combined with device='emulated'"):
        minidnn.compile(net(), capture="on")
    with pytest.raises(UserError, match="choose auto, on or off"):
        minidnn.compile(net(), capture="maybe")


def test_a_failing_capture_leaves_the_device_usable(cuda):
    step = on_cuda()
    data = batches(4)
    train(step, data[:2])
    opened = step.executor.device

    def fail():
        opened.submit(H2D, None, (), 0.0, True)
        raise KeyError("in the middle")

    with pytest.raises(KeyError):
        opened.capture(fail)
    reference = minidnn.compile(net(), optimizer=OPTIMIZER, device=EmulatedDevice())
    train(reference, data[:2])
    assert_same(train(step, data[2:]), train(reference, data[2:]))


def test_work_is_ordered_between_streams_by_its_waits_alone(cuda):
    opened = device()
    opened.open(4096, 4096)
    spec = TensorSpec((256,), "float32")
    on_device, on_host = opened.array("device", 512, spec), opened.array("host", 0, spec)
    opened.put(on_device, 1.0)
    batch = np.full(256, 2.0, np.float32)
    ready = opened.submit(H2D, opened.copy(on_device, batch, H2D), (), 0.0, True)
    done = opened.submit(D2H, opened.copy(on_host, on_device, D2H), (ready,), 0.0, True)
    opened.wait(done)
    np.testing.assert_array_equal(on_host, 2.0)
    assert opened.submit(COMPUTE, None, (), 0.0, False) is None


def test_closing_gives_every_byte_back_however_often_it_is_called(cuda):
    step = on_cuda()
    x, y = batches(1)[0]
    result = step.run(x, y)
    opened = step.executor.device
    assert cuda.used == step.profile.reserved_bytes + FIXED_BYTES
    assert opened.outside_bytes() == FIXED_BYTES
    step.close()
    opened.close()
    gc.collect()
    assert cuda.used == 0 and not cuda.recorded
    assert result.loss > 0


def test_a_slab_that_the_gpu_has_not_is_refused_with_the_figures(cuda):
    opened = device()
    with pytest.raises(UserError, match=rf"slab of {cuda.total} bytes does not fit .* {cuda.total - cuda.used} of"):
        opened.open(cuda.total, 512)


def test_an_array_outside_the_slab_is_a_bug(cuda):
    opened = device()
    opened.open(4096, 512)
    with pytest.raises(AssertionError, match="outside the slab"):
        opened.array("device", 4000, TensorSpec((25,), "float32"))


def test_the_clock_counts_what_has_run(cuda):
    opened = device()
    opened.open(4096, 512)
    before = opened.seconds()
    for _ in range(5):
        opened.submit(COMPUTE, lambda: cuda.enqueue(opened._pointers[COMPUTE], lambda: None), (), 0.0, False)
    opened.synchronize()
    assert opened.seconds() - before == pytest.approx(5e-3)


# -- without any CUDA -------------------------------------------------------------------------------------------------
def test_without_cupy_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UserError, match="pip install"):
        CudaDevice()


def test_a_device_that_is_not_there_is_refused(cuda):
    with pytest.raises(UserError, match="cuda:3 does not exist, this machine has 1"):
        CudaDevice(3, refuse=("convolution", "matmul"))


@pytest.mark.parametrize(("text", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:12", 12)])
def test_device_names_are_read(text, index):
    assert parse_device(text) == index


@pytest.mark.parametrize("text", ["cuda:", "cuda:x", "gpu", "cuda0", "cuda:-1"])
def test_other_device_names_are_refused(text):
    with pytest.raises(UserError, match="cuda:0"):
        parse_device(text)


def test_importing_the_cuda_modules_imports_neither_cupy_nor_cudnn():
    code = "import minidnn.device.cuda, minidnn.cuda_recipes, sys; sys.exit('cupy' in sys.modules or 'cudnn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=SOURCES.parents[2], timeout=60, check=False).returncode == 0


def protocol():
    return {name: f for name, f in vars(base.Kernels).items() if inspect.isfunction(f) and name[0] != "_"}


def test_the_backend_has_exactly_the_kernels_of_the_protocol():
    assert sorted(cuda_kernels.__all__) == sorted(protocol())


@pytest.mark.parametrize("name", protocol())
def test_a_kernel_takes_the_operands_of_the_protocol_after_its_launcher(name):
    expected = [
        p.replace(annotation=p.empty) for p in list(inspect.signature(protocol()[name]).parameters.values())[1:]
    ]
    found = [
        p.replace(annotation=p.empty)
        for p in list(inspect.signature(getattr(cuda_kernels, name)).parameters.values())[1:]
    ]
    immediate = inspect.signature(getattr(cuda_kernels.Immediate(None, None), name)).parameters.values()
    assert [p.replace(annotation=p.empty) for p in immediate] == expected
    if name.startswith(
        ("conv2d", "linear")
    ):  # an engine is the backend's own: NumPy's images, cuDNN's number and knobs
        assert found.pop().kind is inspect.Parameter.VAR_KEYWORD
        found = [p for p in found if not (name.startswith("linear") and p.name == "scratch")]
        expected = [p.replace(default=0) if p.name == "images" else p for p in expected]
    assert found == expected


@pytest.mark.parametrize(
    ("rows", "channels", "values"),
    [(1, 1, 1), (7, 3, 2), (10**6, 64, 2), (10**8, 2048, 2), (50, 32768, 2), (10**9, 5, 1)],
)
def test_partial_sums_fit_the_scratch_and_cover_every_row(rows, channels, values):
    width = 4 if channels % 4 == 0 else 1
    columns, lanes, blocks = cuda_launch.reduction_shape(rows, channels, values, width)
    assert columns * lanes == cuda_launch.THREADS
    assert blocks >= 1 and blocks * channels * values * 4 <= cuda_launch.SCRATCH_BYTES
    assert columns <= cuda_launch.MOST_COLUMNS
    # rows_of_block in common.cuh, in Python: what each block visits, `lanes` rows at a time
    groups, rest = divmod(rows, lanes)
    visited = [
        (groups // blocks + (b < groups % blocks)) * lanes + rest * (groups % blocks == b) for b in range(blocks)
    ]
    assert sum(visited) == rows


def test_a_reduction_over_too_many_channels_is_refused():
    with pytest.raises(UserError, match="use at most 32768 channels"):
        cuda_launch.reduction_shape(100, 40000, 2, 4)


def test_what_a_thread_handles_depends_on_the_shape_and_not_on_addresses():
    def array(address, dtype="float32"):
        return fake_cuda.FakeArray((8,), dtype, type("Pointer", (), {"ptr": address}))

    assert cuda_launch.access(array(512), array(1024), extents=(8, 12)) == (4, False)
    assert cuda_launch.access(array(512), array(1028), extents=(8, 12)) == (4, True)
    assert cuda_launch.access(array(512), array(1024), extents=(8, 6)) == (1, False)
    assert cuda_launch.access(array(512, "float16"), extents=(16,)) == (8, False)
    assert cuda_launch.access(array(512), array(520, "float16")) == (4, False)


def launches(name, *shapes, **attrs):
    """(kernel, grid, block, values of the arguments) of what a kernel of the backend launches, without any CUDA."""
    compiled, found = [], []

    class Library:
        def function(self, source, name, *rest):
            compiled.append(name)
            return len(compiled)

    def launch(function, *rest):
        found.append((compiled[function - 1], rest[:3], rest[3:6]))

    def array(shape, dtype="float32"):
        return fake_cuda.FakeArray(shape, dtype, type("Pointer", (), {"ptr": 512}))

    on = cuda_launch.Launcher(Library(), launch, 7, 4096, None)
    operands = [array(*shape) if isinstance(shape[0], tuple) else array(shape) for shape in shapes]
    work = getattr(cuda_kernels, name)(on, *operands, **attrs)
    works = work._works if isinstance(work, cuda_launch.Sequential) else (work,)
    work()
    arguments = [[getattr(a, "value", None) for a in one._arguments[1]] for one in works]
    return [(*launched, values) for launched, values in zip(found, arguments, strict=True)]


def test_the_mean_over_a_map_is_told_the_positions_and_channels_of_the_map():
    ((kernel, grid, block, values),) = launches("global_avg_pool_forward", (3, 20), (3, 5, 9, 20))
    assert kernel == "global_avg_pool_forward" and values[2:] == [45, 20]
    assert grid == (1, 3, 1) and block == (8, 32, 1)  # 20 channels are five packs


@pytest.mark.parametrize(("channels", "packs"), [(6, 6), (8, 2), (1024, 256)])
def test_pooling_has_a_thread_for_every_pack_of_its_result(channels, packs):
    small, large = (2, 5, 7, channels), (2, 10, 14, channels)
    beside = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0)}
    overlapping = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}
    for name, shapes, pool, (n, h, w, _) in (
        ("max_pool_forward", (small, (small, "uint8"), large), beside, small),
        ("max_pool_backward", (large, small, (small, "uint8")), overlapping, large),
        ("max_pool_backward", (large, small, (small, "uint8")), beside, small),  # a thread writes a whole window
    ):
        ((_, grid, block, _),) = launches(name, *shapes, **pool)
        assert grid[0] == n * h and grid[1] * block[0] >= w * packs > (grid[1] - 1) * block[0]
        assert block[0] % 32 == 0 and block[0] <= cuda_launch.THREADS
    ((_, grid, block, _),) = launches("global_avg_pool_backward", large, (2, channels))
    assert grid[0] == 2 * 10 * 14 and grid[1] * block[0] >= packs


def test_a_matrix_product_of_our_own_is_told_its_extents_and_strides():
    ((kernel, grid, _, values),) = launches("linear_forward", (65, 10), (65, 30), (10, 30))
    assert kernel == "matrix_product" and grid == (2, 1, 1)
    assert values[3:] == [65, 10, 30, 30, 1, 1, 30, 0]  # y = x @ weight.T
    ((_, _, _, values),) = launches("linear_backward_data", (65, 30), (65, 10), (10, 30))
    assert values[3:] == [65, 30, 10, 10, 1, 30, 1, 0]  # dx = dy @ weight
    ((_, _, _, values),) = launches("linear_backward_weight", (10, 30), (65, 30), (65, 10), accumulate=True)
    assert values[3:] == [10, 30, 65, 1, 10, 30, 1, 1]  # d_weight += dy.T @ x


class FakeGraph:
    """Plans of a fake cuDNN: (engine, knobs, workspace, builds, builds again)."""

    def __init__(self, plans):
        self.plans, self.built = plans, None

    def create_execution_plans(self, modes):
        self.limit = None

    def deselect_numeric_notes(self, notes):
        self.barred = notes

    def deselect_workspace_greater_than(self, limit):
        self.limit = limit

    def get_execution_plan_count(self):
        return len(self.plans)

    def create_execution_plan(self, engine, knobs):
        self.plans = [
            p for p in self.plans if p[0] == engine and p[4] and {k.name: v for k, v in knobs.items()} == p[1]
        ]
        self.limit = None
        if not self.plans:
            raise RuntimeError("no such engine\nin detail")

    def build_plan_at_index(self, index):
        plan = self.plans[index]
        if not plan[3] or (self.limit is not None and plan[2] > self.limit):
            raise RuntimeError("deselected")

    def get_engine_and_knobs_at_index(self, index):
        return self.plans[index][0], {FakeKnob(name): value for name, value in self.plans[index][1].items()}

    def get_workspace_size_plan_at_index(self, index):
        return self.plans[index][2]


class FakeKnob:
    def __init__(self, name):
        self.name = name


class Knobs:
    def __getattr__(self, name):
        return FakeKnob(name)


PLANS = [
    (11, {"TILE_SIZE": 1}, 0, False, True),  # barred by its notes
    (12, {"NOT_SET": 5}, 0, True, False),  # a knob this frontend cannot name
    (13, {"TILE_SIZE": 2}, 4096, True, False),  # cannot be built again
    (14, {"SPLIT_K_SLC": 4, "STAGES": 2}, 2048, True, True),
    (15, {}, 0, True, True),
]
PROBLEM = Convolution("forward", (2, 8, 8, 4), (2, 8, 8, 8), (8, 3, 3, 4), (1, 1), (1, 1), (1, 1), "float32")


def fake_cudnn(monkeypatch, **kwargs):
    note = type(
        "Notes",
        (),
        {n: n for n in ("DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "TENSOR_CORE", "NONDETERMINISTIC")},
    )
    module = type(sys)("cudnn")
    module.numerical_note, module.knob_type, module.create_handle = note, Knobs(), lambda: 1
    module.set_stream, module.backend_version = lambda handle, stream: None, lambda: 91900
    module.data_type = type("Types", (), {"FLOAT": 0, "HALF": 1, "BFLOAT16": 2})
    module.heur_mode = type("Modes", (), {"A": 0, "B": 1, "FALLBACK": 2})
    module.cudnnGraphNotSupportedError = KeyError
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(cudnn.Cudnn, "_convolution", lambda self, problem: FakeGraph(list(PLANS)))
    return cudnn.Cudnn(0, "fp32", True, **kwargs)


def test_the_first_engine_that_builds_twice_is_chosen_and_survives_the_recipe_file(monkeypatch):
    engine = fake_cudnn(monkeypatch).select(PROBLEM, None)
    assert engine == Engine("cudnn", 2048, (("engine", 14), ("knob_SPLIT_K_SLC", 4), ("knob_STAGES", 2)))
    recipe = Recipe(engines={"conv:forward": engine}, backend="cuda")
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_a_workspace_limit_skips_the_engines_above_it(monkeypatch):
    assert fake_cudnn(monkeypatch).select(PROBLEM, 2047) == Engine("cudnn", 0, (("engine", 15),))


def test_tuning_takes_the_fastest_and_of_equally_fast_ones_the_first():
    slow, good, close, quick = (Engine("cudnn", 0, (("engine", i),)) for i in range(4))
    assert cudnn_tune.best(iter([(slow, 2.0), (good, 1.0), (close, 0.99)])) == good
    assert cudnn_tune.best(iter([(slow, 2.0), (good, 1.0), (quick, 0.5)])) == quick
    assert cudnn_tune.best(iter([])) == OWN


def test_measured_engines_are_remembered_for_one_gpu_and_library(tmp_path):
    problem = Convolution("forward", (1, 4, 4, 8), (1, 4, 4, 8), (8, 1, 1, 8), (1, 1), (0, 0), (1, 1), "float32")
    engine = Engine("cudnn", 64, (("engine", 3), ("knob_TILE", 1)))

    class Library:
        restrictions = "fp32 deterministic=True"
        workspace_bytes = 64

        def plan(self, problem, options):
            if options["engine"] != 3:
                raise UserError("no such engine")
            return self

        def engines(self, problem, limit):
            raise AssertionError("measured again")

    cache = cudnn_tune.EngineCache(tmp_path, "NVIDIA H200 91900")
    tuner = cudnn_tune.Tuner(None, SimpleNamespace(cudnn=Library()), None, cache)
    cache.put(f"{tuple(problem)} None {Library.restrictions}", engine)
    again = cudnn_tune.EngineCache(tmp_path, "NVIDIA H200 91900")
    assert cudnn_tune.Tuner(None, SimpleNamespace(cudnn=Library()), None, again).fastest(problem, None, None) == engine
    assert tuner.fastest(problem, None, None) == engine
    other = Library()
    other.workspace_bytes = 128  # the library has changed: what was measured does not count
    name = f"{tuple(problem)} None {Library.restrictions}"
    assert cudnn_tune.Tuner(None, SimpleNamespace(cudnn=other), None, again)._known(name, problem) is None
    elsewhere = cudnn_tune.EngineCache(tmp_path, "NVIDIA H200 92000")
    assert cudnn_tune.Tuner(None, SimpleNamespace(cudnn=Library()), None, elsewhere)._known(name, problem) is None
    (file,) = tmp_path.iterdir()
    file.write_text("[1, 2")
    assert cudnn_tune.EngineCache(tmp_path, "NVIDIA H200 91900").get("any") is None


def test_where_cudnn_refuses_our_own_kernel_is_the_engine(monkeypatch):
    assert fake_cudnn(monkeypatch, refuse=frozenset({"convolution"})).select(PROBLEM, None) == OWN


def test_an_engine_of_another_library_is_refused_with_the_remedy(monkeypatch):
    with pytest.raises(UserError, match="no such engine; the recipe was made elsewhere"):
        fake_cudnn(monkeypatch).plan(PROBLEM, {"engine": 99})


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(
    ("source", "flags"), [("pool", ("-DKIND=0", "-DWIDTH=4")), ("norm", ("-DKIND=2", "-DWIDTH=8", "-DNARROW"))]
)
def test_sources_compile(source, flags, tmp_path):
    code = tmp_path / "source.cu"
    code.write_text("".join((SOURCES / name).read_text(encoding="utf-8") for name in ("common.cuh", f"{source}.cu")))
    command = ["nvcc", "-ptx", "-arch=sm_80", "-std=c++17", *flags, "-o", str(tmp_path / "out.ptx"), str(code)]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0


# -- on a GPU ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def cupy():
    module = pytest.importorskip("cupy", reason="CuPy is not installed: pip install 'minidnn-layup[cuda13]'")
    if not module.cuda.is_available():
        pytest.skip("no usable CUDA device")
    return module


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_address_that_is_not_aligned_changes_no_bit(cupy, dtype):
    rng = np.random.default_rng(0)
    opened = CudaDevice(refuse=("convolution", "matmul"))
    kernels, shape = opened.kernels, (5, 14, 18, 64)
    x, dy = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(2))
    vectors = [rng.standard_normal(64, np.float32) for _ in range(3)]

    def run(shift):
        def place(values):
            memory = cupy.empty(values.size + 8, values.dtype)
            view = memory[shift : shift + values.size].reshape(values.shape)
            view[...] = cupy.asarray(values)
            return view

        def space(*extents, of=dtype):
            return place(np.zeros(extents, of))

        px, pdy, (weight, bias, d_weight) = place(x), place(dy), map(place, vectors)
        mean, rstd, sums, y, dx = (
            space(64, of="float32"),
            space(64, of="float32"),
            space(64),
            space(*shape),
            space(*shape),
        )
        pooled, chosen, grown = space(5, 7, 9, 64), space(5, 7, 9, 64, of="uint8"), space(*shape)
        pool = {"kernel": (3, 2), "stride": (2, 2), "padding": (1, 0)}
        kernels.batch_norm_statistics(mean, rstd, px, eps=1e-5)
        kernels.batch_norm_apply(y, px, mean, rstd, weight, bias)
        kernels.batch_norm_backward_data(dx, pdy, px, mean, rstd, weight, d_weight, bias)
        kernels.channel_sum(sums, pdy)
        kernels.max_pool_forward(pooled, chosen, px, **pool)
        kernels.max_pool_backward(grown, pooled, chosen, **pool)
        return [cupy.asnumpy(a) for a in (mean, rstd, sums, y, dx, pooled, chosen, grown)]

    for aligned, moved in zip(run(0), run(1), strict=True):
        np.testing.assert_array_equal(moved, aligned)
        assert np.isfinite(aligned.astype(float)).all() and aligned.any()
    opened.close()


@pytest.mark.gpu
def test_the_protocol_check_passes(cupy, tmp_path):
    script = SOURCES.parents[2] / "scripts" / "gpu" / "protocol_check.py"
    report = tmp_path / "report.json"
    done = subprocess.run([sys.executable, str(script), "--json", str(report)], timeout=600, check=False)
    assert done.returncode == 0, report.read_text(encoding="utf-8")
