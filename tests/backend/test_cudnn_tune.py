"""Autotuning on a fake CUDA, whose clock counts the tasks of a stream: what it takes, and that it gives all memory back."""

import gc
import math
from types import SimpleNamespace

import numpy as np
import pytest

import minidnn
import tests.backend.fake_cuda as fake_cuda
from minidnn.device.cuda import CudaDevice
from minidnn.errors import UserError
from minidnn.kernels import cudnn_tune
from minidnn.kernels.engine_cache import EngineCache
from minidnn.kernels.problem import BLAS_ENGINE, OWN, Convolution, linear_product, operand_shapes
from minidnn.schedule.instruction import COMPUTE
from minidnn.schedule.recipe import Engine
from tests.backend.cuda_nets import net

PROBLEM = Convolution("forward", (2, 4, 4, 8), (2, 4, 4, 16), (16, 1, 1, 8), (1, 1), (0, 0), (1, 1), "float32")
WORKSPACES = {BLAS_ENGINE: 512}
LARGE_WORKSPACES = {BLAS_ENGINE: 512, 4: 9000, 7: 4000, 9: 7000}


def operand_bytes(problem):
    return sum(4 * math.prod(shape) for shape in operand_shapes(problem).values())


class FakeEngines:
    """Engines that take as many tasks as ``tasks`` says, and note when they are run and on what.

    ``held``: device memory in use whenever one was run. ``fails``: (engine, how many of its runs went well before).
    """

    restrictions, single = "fp32 deterministic=True", True

    def __init__(self, cuda, stream, tasks, workspaces=WORKSPACES, fails=None):
        self.cuda, self.stream, self.tasks, self.runs, self.kept = cuda, stream, tasks, [], []
        self.workspaces, self.fails, self.held, self.closed = workspaces, fails, [], False
        self.blas = SimpleNamespace(run=lambda on, problem, options, at, workspace: self.bound(options, at, workspace))

    def engine(self, number):
        name = "cublas" if number == BLAS_ENGINE else "cudnn"
        return Engine(name, self.workspaces.get(number, 0), (("engine", number),))

    def offered(self, problem, limit):
        for number in self.tasks:
            if number != BLAS_ENGINE and (limit is None or self.workspaces.get(number, 0) <= limit):
                yield self.engine(number)

    def others(self, problem, limit):
        return [self.engine(number) for number in self.tasks if number == BLAS_ENGINE]

    def plan(self, problem, options):
        return options

    def run(self, plan, pointers, workspace):
        return self.bound(plan, pointers, workspace)

    def bound(self, options, pointers, workspace):
        number = options["engine"]
        assert (workspace != 0) == (self.workspaces.get(number, 0) > 0)
        if self.fails == (number, None):
            raise RuntimeError("it cannot be bound")

        def run():
            if self.fails == (number, self.runs.count(number)):
                raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
            self.runs.append(number)
            self.held.append((number, self.cuda.used))
            for _ in range(self.tasks[number]):
                self.cuda.enqueue(self.stream.ptr, lambda: None)

        return run

    def select(self, problem, limit):
        return OWN

    def keep(self, problem, chosen):
        self.kept.append(chosen)

    def versions(self):
        return {"cudnn": "1"}

    def close(self):
        self.closed = True


@pytest.fixture
def tuner():
    def make(tasks, **how):
        cuda = fake_cuda.FakeCuda(0)
        stream = cuda.module.cuda.Stream(non_blocking=True)
        engines = FakeEngines(cuda, stream, tasks, **how)
        launcher = SimpleNamespace(cudnn=engines, walk=lambda *bound: lambda: None)
        return cudnn_tune.Tuner(cuda.module, launcher, stream), engines

    return make


@pytest.mark.parametrize(("tasks", "fastest"), [({4: 30, 7: 10, 9: 20}, 7), ({4: 30, BLAS_ENGINE: 5}, BLAS_ENGINE)])
def test_the_fastest_engine_of_either_library_is_taken(tuner, tasks, fastest):
    made, engines = tuner(tasks)
    found = made.fastest(PROBLEM, None, np.dtype("float32"))
    assert dict(found.options) == {"engine": fastest}
    assert engines.kept == [found]
    count = len(engines.runs)
    assert made.fastest(PROBLEM, None, np.dtype("float32")) == found and len(engines.runs) == count, "measured again"


@pytest.mark.parametrize(("alone", "fastest"), [(10, {"engine": 7, "split": 1}), (40, {"engine": 4})])
def test_bias_and_relu_come_with_a_convolution_where_that_is_faster_than_behind_it(tuner, alone, fastest):
    made, engines = tuner({4: 30, 7: alone})
    every, of = engines.offered, {"forward": 7, "forward_relu": 4}
    engines.offered = lambda problem, limit: (
        engine for engine in every(problem, limit) if dict(engine.options)["engine"] == of[problem.direction]
    )
    found = made.fastest(PROBLEM._replace(direction="forward_relu"), None, np.dtype("float32"))
    assert dict(found.options) == fastest
    assert dict(made.fastest(PROBLEM, None, np.dtype("float32")).options) == {"engine": 7}


def tried(made, engines):
    made.fastest(PROBLEM, None, np.dtype("float32"))
    return engines.runs


def test_after_some_engines_in_a_row_that_are_far_behind_no_more_are_tried(tuner):
    late = {1: 10, **dict.fromkeys(range(2, 2 + cudnn_tune.PATIENCE), 20), 90: 1}
    assert sorted(set(tried(*tuner(late)))) == list(range(1, 2 + cudnn_tune.PATIENCE))
    early = {1: 10, **dict.fromkeys(range(2, 1 + cudnn_tune.PATIENCE), 20), 80: 11, 81: 20, 90: 1}
    assert 90 in tried(*tuner(early)), "80 was not far behind"


def test_engines_that_are_far_behind_may_not_take_long_altogether(tuner, monkeypatch):
    monkeypatch.setattr(cudnn_tune, "PATIENCE_SECONDS", 0.0)
    assert set(tried(*tuner({1: 10, 2: 20, 90: 1}))) == {1, 2}
    assert set(tried(*tuner({1: 10, 2: 11, 90: 1}))) == {1, 2, 90}


def test_an_engine_that_is_far_behind_is_timed_once(tuner):
    made, engines = tuner({7: 10, 4: 11, 9: 40})
    made.fastest(PROBLEM, None, np.dtype("float32"))
    often = 1 + cudnn_tune.TIMED_RUNS
    assert [engines.runs.count(number) for number in (7, 4, 9)] == [often, often, 2]


def test_operands_without_room_are_refused_with_the_figures(tuner):
    made, _ = tuner({7: 10})
    with pytest.raises(UserError, match=r"needs 4294967296 bytes for a tensor \(32768, 32768\), and \d+ are free"):
        made._random((1 << 15, 1 << 15), np.dtype("float32"))


def test_where_no_engine_is_offered_our_own_kernel_is_taken(tuner):
    made, _ = tuner({})
    assert made.fastest(PROBLEM, None, np.dtype("float32")) == OWN


@pytest.mark.parametrize("size", [1, 1000, cudnn_tune.BLOCK_ELEMENTS, 5 * cudnn_tune.BLOCK_ELEMENTS + 3])
def test_operands_are_full_of_random_numbers(tuner, size):
    made, _ = tuner({})
    memory = made._random((size,), np.dtype("float32"))
    values = np.frombuffer(memory._raw, np.uint8)[memory.ptr - memory._raw.ctypes.data :][: 4 * size].view(np.float32)
    assert np.isfinite(values).all() and (values != 0).all()
    assert size < 1000 or abs(values.std() - 1) < 0.1


def test_tuning_takes_the_fastest_and_of_equally_fast_ones_that_with_the_least_workspace():
    slow, good, close, quick = (Engine("cudnn", 0, (("engine", i),)) for i in range(4))
    large = Engine("cudnn", 512, (("engine", 4),))
    assert cudnn_tune.best(iter([(slow, 2.0), (good, 1.0), (close, 0.99)])) == good
    assert cudnn_tune.best(iter([(slow, 2.0), (good, 1.0), (quick, 0.5)])) == quick
    assert cudnn_tune.best(iter([(large, 0.98), (good, 1.0)])) == good, (
        "what it saves is within the spread of the clock"
    )
    assert cudnn_tune.best(iter([(large, 0.9), (good, 1.0)])) == large
    assert cudnn_tune.best(iter([])) == OWN


def test_an_engine_that_rounds_to_tf32_is_not_taken_for_single_precision():
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((64, 500)).astype(np.float32) for _ in range(2))

    def rounded(x):
        return ((x.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)

    blas, other = (Engine(name, 0, (("engine", number),)) for name, number in (("cublas", BLAS_ENGINE), ("cudnn", 3)))
    exact, another, coarse = a @ b.T, a[:, ::-1].copy() @ b[:, ::-1].T.copy(), rounded(a) @ rounded(b).T
    check = cudnn_tune.SingleCheck()
    assert check.agrees(other, coarse), "there is nothing to compare it with yet"
    assert check.agrees(blas, exact) and check.agrees(other, another)
    assert not check.agrees(other, coarse)
    assert not check.agrees(other, np.full_like(exact, np.nan))


def test_measured_engines_are_remembered_for_one_gpu_and_library(tmp_path):
    problem = Convolution("forward", (1, 4, 4, 8), (1, 4, 4, 8), (8, 1, 1, 8), (1, 1), (0, 0), (1, 1), "float32")
    engine = Engine("cudnn", 64, (("engine", 3), ("knob_TILE", 1)))

    class Library:
        restrictions, single = "fp32 deterministic=True", True
        workspace_bytes = 64

        def others(self, problem, limit):
            return ()

        def plan(self, problem, options):
            if options["engine"] != 3:
                raise UserError("no such engine")
            return self

        def offered(self, problem, limit):
            raise AssertionError("measured again")

    cache = EngineCache(tmp_path, "NVIDIA H200 91900")
    tuner = cudnn_tune.Tuner(None, SimpleNamespace(cudnn=Library()), None, cache)
    known = f"{tuple(problem)} None {Library.restrictions}"
    name = f"{cudnn_tune.SEARCH} {known}"
    cache.put(name, engine)
    again = EngineCache(tmp_path, "NVIDIA H200 91900")
    assert cudnn_tune.Tuner(None, SimpleNamespace(cudnn=Library()), None, again).fastest(problem, None, None) == engine
    assert tuner.fastest(problem, None, None) == engine
    other = Library()
    other.workspace_bytes = 128  # the library has changed: what was measured does not count
    assert cudnn_tune.Tuner(None, SimpleNamespace(cudnn=other), None, again)._known(name, problem) is None
    older = EngineCache(tmp_path / "older", "NVIDIA H200 91900")
    older.put(f"{cudnn_tune.SEARCH - 1} {known}", engine)
    with pytest.raises(AssertionError, match="measured again"):
        cudnn_tune.Tuner(None, SimpleNamespace(cudnn=Library()), None, older).fastest(problem, None, None)
    elsewhere = EngineCache(tmp_path, "NVIDIA H200 92000")
    assert cudnn_tune.Tuner(None, SimpleNamespace(cudnn=Library()), None, elsewhere)._known(name, problem) is None
    (file,) = tmp_path.glob("*.json")
    file.write_text("[1, 2")
    assert EngineCache(tmp_path, "NVIDIA H200 91900").get("any") is None


def test_processes_that_measure_at_the_same_time_keep_what_the_others_found(tmp_path):
    one, other = (EngineCache(tmp_path, "NVIDIA H200") for _ in range(2))
    for number, cache in enumerate((one, other, one)):
        cache.put(f"problem {number}", Engine("cudnn", number, (("engine", number),)))
    assert one.get("problem 1") == Engine("cudnn", 1, (("engine", 1),)), "read when the file was written again"
    later = EngineCache(tmp_path, "NVIDIA H200")
    assert [later.get(f"problem {number}").workspace_bytes for number in range(3)] == [0, 1, 2]


# -- memory -----------------------------------------------------------------------------------------------------------
def test_a_search_in_bounded_room_tries_no_engine_that_would_leave_it(tuner):
    """``--process-memory`` bounds the search, too: it begins before there is a slab, and takes memory of its own."""
    step, operands = cudnn_tune.ROOM_STEP, len(operand_shapes(PROBLEM)) * cudnn_tune.ALLOCATED
    workspaces = {4: step + 1, 7: step}
    made, engines = tuner({4: 5, 7: 10, 9: 20}, workspaces=workspaces)
    assert dict(made.fastest(PROBLEM, None, np.float32, operands + 2 * step - 1).options) == {"engine": 7}
    assert 4 not in engines.runs and max(nbytes for _, nbytes in engines.held) <= operands + step
    assert dict(made.fastest(PROBLEM, None, np.float32, operands + step - 1).options) == {"engine": 9}
    assert dict(made.fastest(PROBLEM, 512, np.float32, operands + 9 * step).options) == {"engine": 9}, (
        "the limit holds, too"
    )
    engines.runs.clear()
    assert made.fastest(PROBLEM, None, np.float32, operands - 1) == OWN and not engines.runs, (
        "what the heuristics choose"
    )


def test_never_more_is_held_than_the_operands_of_one_problem_and_the_workspace_of_one_engine(tuner):
    """microsoft/CNTK#1516: the search for algorithms took memory of its own, and training needed most when it began."""
    made, engines = tuner({BLAS_ENGINE: 12, 4: 10, 7: 9, 9: 11}, workspaces=LARGE_WORKSPACES)
    product = linear_product("forward", 6, 500, 40, "float32")
    for problem in (PROBLEM, product, PROBLEM._replace(direction="backward_weight")):
        engines.held.clear()
        engines.cuda.most_used = 0
        made.fastest(problem, None, np.dtype("float32"))
        assert {number for number, _ in engines.held} == set(LARGE_WORKSPACES)
        for number, held in engines.held:
            assert held == operand_bytes(problem) + LARGE_WORKSPACES[number]
        assert engines.cuda.most_used == operand_bytes(problem) + max(LARGE_WORKSPACES.values())
        assert engines.cuda.used == 0, "memory is held between two problems"


@pytest.mark.parametrize("when", [None, 0, 3])
@pytest.mark.parametrize("number", [BLAS_ENGINE, 7, 9])
def test_an_engine_that_fails_in_the_middle_leaves_no_memory_behind(tuner, number, when):
    """Not even while its exception is handled, whose traceback holds every frame: the slab may be allocated right then."""
    made, engines = tuner({BLAS_ENGINE: 12, 7: 9, 9: 11}, workspaces=LARGE_WORKSPACES, fails=(number, when))
    with pytest.raises(RuntimeError) as failure:
        made.fastest(PROBLEM, None, np.dtype("float32"))
    assert failure.tb is not None and engines.cuda.most_used > operand_bytes(PROBLEM)
    assert engines.cuda.used == 0


def test_an_engine_without_room_for_its_workspace_is_left_out_and_nothing_of_it_stays(tuner):
    made, engines = tuner({4: 1, 7: 9, 9: 11}, workspaces=LARGE_WORKSPACES)
    engines.cuda.total = operand_bytes(PROBLEM) + LARGE_WORKSPACES[9]
    assert made.fastest(PROBLEM, None, np.dtype("float32")) == engines.engine(7)
    assert set(engines.runs) == {7, 9} and engines.cuda.used == 0


def test_the_slab_is_allocated_after_all_of_the_search_is_given_back(monkeypatch, tmp_path):
    """The engines of a whole net are searched by ``compile``, whose last allocation is the slab."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cuda = fake_cuda.install(monkeypatch)
    opened = CudaDevice(refuse=("convolution", "matmul"))
    stream, tasks = SimpleNamespace(ptr=opened.stream(COMPUTE)), {BLAS_ENGINE: 12, 4: 10, 9: 11}
    engines = FakeEngines(cuda, stream, tasks, workspaces=LARGE_WORKSPACES)
    opened.cudnn = opened._launcher.cudnn = engines
    before, open_slabs, found = cuda.used, opened.open, []
    monkeypatch.setattr(opened, "open", lambda *sizes: (found.append(cuda.used), open_slabs(*sizes)))
    step = minidnn.compile(net(), device=opened)
    assert len(engines.kept) == 8, "two convolutions and a product, of which one reads the batch"
    assert found == [before] and cuda.most_used > before
    assert cuda.used == before + step.program.reserved_bytes
    step.close()
    gc.collect()
    assert cuda.used == before and not engines.closed
    opened.close()
    assert engines.closed
