"""Autotuning on a fake CUDA, whose clock counts the tasks of a stream."""

from types import SimpleNamespace

import numpy as np
import pytest

import tests.backend.fake_cuda as fake_cuda
from minidnn.kernels import cudnn_tune
from minidnn.kernels.problem import BLAS_ENGINE, OWN, Convolution
from minidnn.schedule.recipe import Engine

PROBLEM = Convolution("forward", (2, 4, 4, 8), (2, 4, 4, 16), (16, 1, 1, 8), (1, 1), (0, 0), (1, 1), "float32")


def engine(number, workspace=0):
    return Engine("cublas" if number == BLAS_ENGINE else "cudnn", workspace, (("engine", number),))


class FakeEngines:
    """Engines that take as many tasks as ``tasks`` says, and note when they are run and on what."""

    restrictions = "fp32 deterministic=True"

    def __init__(self, cuda, stream, tasks):
        self.cuda, self.stream, self.tasks, self.runs, self.kept = cuda, stream, tasks, [], []
        self.blas = SimpleNamespace(run=lambda on, problem, options, at, workspace: self.bound(options, at, workspace))

    def engines(self, problem, limit):
        yield from (engine(number) for number in self.tasks if number != BLAS_ENGINE)
        yield from self.others(problem, limit)

    def others(self, problem, limit):
        return [engine(number, 512) for number in self.tasks if number == BLAS_ENGINE]

    def plan(self, problem, options):
        return options

    def run(self, plan, pointers, workspace):
        return self.bound(plan, pointers, workspace)

    def bound(self, options, pointers, workspace):
        number = options["engine"]
        assert (workspace != 0) == (number == BLAS_ENGINE)

        def run():
            self.runs.append(number)
            for _ in range(self.tasks[number]):
                self.cuda.enqueue(self.stream.ptr, lambda: None)

        return run

    def keep_only(self, problem, chosen):
        self.kept.append(chosen)


@pytest.fixture
def tuner():
    def make(tasks):
        cuda = fake_cuda.FakeCuda(0)
        stream = cuda.module.cuda.Stream(non_blocking=True)
        engines = FakeEngines(cuda, stream, tasks)
        return cudnn_tune.Tuner(cuda.module, SimpleNamespace(cudnn=engines), stream), engines

    return make


@pytest.mark.parametrize(("tasks", "fastest"), [({4: 30, 7: 10, 9: 20}, 7), ({4: 30, BLAS_ENGINE: 5}, BLAS_ENGINE)])
def test_the_fastest_engine_of_either_library_is_taken(tuner, tasks, fastest):
    made, engines = tuner(tasks)
    found = made.fastest(PROBLEM, None, np.dtype("float32"))
    assert dict(found.options) == {"engine": fastest}
    assert engines.kept == [found]
    count = len(engines.runs)
    assert made.fastest(PROBLEM, None, np.dtype("float32")) == found and len(engines.runs) == count, "measured again"


def test_an_engine_that_is_far_behind_is_timed_once(tuner):
    made, engines = tuner({7: 10, 4: 11, 9: 40})
    made.fastest(PROBLEM, None, np.dtype("float32"))
    often = 1 + cudnn_tune.TIMED_RUNS
    assert [engines.runs.count(number) for number in (7, 4, 9)] == [often, often, 2]


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
