"""Each rank touches its own GPU only (B11): every thread sets it first, and none sets another one, not even back.

Since CUDA 12 ``cudaSetDevice`` makes a context. A thread begins with GPU 0, so whatever it calls before leaves one there.
"""

import sys
import threading
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import minidnn
from minidnn.data import Augment, Batches
from minidnn.data.dataset import Dataset
from minidnn.device.cuda import CudaDevice
from minidnn.device.cuda_libraries import describe_gpu
from minidnn.parallel.gpus import own_device
from minidnn.parallel.inprocess import run_ranks
from minidnn.parallel.launch import Place
from minidnn.parallel.nccl import Nccl
from minidnn.parallel.watchdog import Watchdog
from minidnn.precision import precision
from minidnn.recipes import numpy_recipe
from minidnn.schedule.instruction import COMM
from tests.backend.fake_cuda import FakeCuda
from tests.parallel.fake_gpus import FakeGpus, Processes
from tests.parallel.test_launch import Board
from tests.step import nets

NEED_NO_CONTEXT = {
    "getDeviceCount", "getDeviceProperties", "deviceGetPCIBusId", "driverGetVersion", "runtimeGetVersion", "getDevice",
    "Device", "MemoryPointer", "ndarray", "check_async_error",
}  # fmt: skip
"""What is asked of the driver or made on the host. ``check_async_error`` reads NCCL's own memory."""


class WatchedGpus(FakeGpus):
    """Two GPUs for every thread. ``touched``: thread, its current GPU and the call, of each call that needs a context."""

    def __init__(self):
        super().__init__()
        self.touched, self._now, watched = [], threading.local(), self

        class Communicator(self.nccl.NcclCommunicator):
            def abort(self):
                watched.note("abort")

            def check_async_error(self):
                watched.note("check_async_error")

        self.nccl.NcclCommunicator = Communicator

    @property
    def current(self):
        return getattr(self._now, "gpu", 0)

    def set_device(self, index):
        self._now.gpu = index
        self.note("setDevice")

    def note(self, name):
        if name not in NEED_NO_CONTEXT:
            self.touched.append((threading.current_thread().name, self.current, name))

    @property
    def mine(self):
        if not hasattr(self._local, "gpu"):
            gpu, watched = FakeCuda(seed=threading.get_ident() % 97, count=2), self

            class Device:
                def __init__(self, index):
                    self.index, self.before = index, []

                def use(self):
                    watched.set_device(self.index)

                def __enter__(self):
                    self.before.append(watched.current)
                    self.use()

                def __exit__(self, *_):
                    watched.set_device(self.before.pop())

            runtime = gpu.module.cuda.runtime
            runtime.getDevice, runtime.setDevice = lambda: self.current, self.set_device
            runtime.deviceGetPCIBusId = "bus {}".format
            gpu.module.cuda.Device = Device
            gpu.module = self.watch(gpu.module)
            self._local.gpu = gpu
        return self._local.gpu

    def watch(self, space):
        """A namespace like ``space`` whose calls are noted."""
        found = SimpleNamespace()
        for name, value in vars(space).items():
            if isinstance(value, SimpleNamespace):
                value = self.watch(value)
            elif callable(value) and not (isinstance(value, type) and issubclass(value, Exception)):
                value = self.noted(name, value)
            setattr(found, name, value)
        return found

    def noted(self, name, call):
        def made(*arguments, **options):
            self.note(name)
            return call(*arguments, **options)

        return made


@pytest.fixture
def gpus(monkeypatch):
    frontend = ModuleType("cudnn")
    frontend.__spec__ = ModuleSpec("cudnn", None)
    monkeypatch.setitem(sys.modules, "cudnn", frontend)
    return WatchedGpus().install(monkeypatch)


def test_no_thread_of_a_rank_touches_the_gpu_of_another(gpus):
    graph = nets.residual(8)
    recipe = numpy_recipe(graph.with_batch(4), precision("fp32"), None, True)
    pixels = np.random.default_rng(0).integers(0, 256, (24, 6, 6, 2), np.uint8)
    data = Dataset("made up", pixels, np.arange(24) % 4, 4, (0.5,) * 2, (0.2,) * 2)
    boards = Board(2)

    def work(communicator):
        rank = communicator.rank
        name = own_device(communicator, Place(rank, 2, rank, 2, "Open MPI"), "auto")
        assert "1.0 of 1.0 GiB free" in describe_gpu(name)
        device = CudaDevice(int(name.removeprefix("cuda:")), refuse=("convolution", "matmul"))
        step = minidnn.compile(
            graph, strategy="ring_delayed", communicator=Processes(communicator), device=device, recipe=recipe,
            optimizer=nets.MOMENTUM,
        )  # fmt: skip
        dog = Watchdog(boards.channel(rank), rank, 2, 1.0, end=lambda code: None, signs=communicator.signs)
        for x, y in Batches(data, 8, seed=0, augment=Augment(1, True), workers=2, rank=rank, ranks=2).epoch(0):
            step.run(x, y, of=8)
        time.sleep(0.1)  # the watchdog asks NCCL
        step.evaluate(nets.batch(graph)[0])
        step.close()
        communicator.barrier()
        dog.stop()
        return name

    assert run_ranks(2, work) == ["cuda:0", "cuda:1"]
    used = {thread: {gpu for name, gpu, _ in gpus.touched if name == thread} for thread, _, _ in gpus.touched}
    assert used == {"rank 0": {0}, "rank 1": {1}}, "other threads work on host memory alone"
    assert len({call for _, _, call in gpus.touched}) > 10


def test_the_thread_that_gives_nccl_up_sets_the_gpu_first(gpus):
    def work(communicator):
        device = CudaDevice(communicator.rank, refuse=("convolution", "matmul"))
        opened = Nccl(Processes(communicator), device.stream(COMM))
        communicator.barrier()
        if communicator.rank == 1:
            gpus.touched.clear()
            opened.abort("the disk is full")

    run_ranks(2, work)
    assert [(gpu, call) for _, gpu, call in gpus.touched] == [(1, "setDevice"), (1, "abort")]
