"""A fake GPU for every thread, and a fake NCCL between them: what `cupy` and `cupy.cuda.nccl` would be in as many processes."""

import ctypes
import sys
import threading
from types import SimpleNamespace

import numpy as np

from minidnn.device.cuda import CudaDevice
from minidnn.kernels import cuda_kernels, numpy_kernels
from minidnn.parallel.inprocess import InProcess
from tests.backend.fake_cuda import FakeArray, FakeCuda


class Processes:
    """Threads that pass for processes: their arrays on a GPU travel by NCCL, not through the host."""

    name = "processes"

    def __init__(self, inner):
        self.rank, self.size, self.signs = inner.rank, inner.size, inner.signs
        self.exchange, self.barrier, self.abort = inner.exchange, inner.barrier, inner.abort


class FakeNccl:
    """NCCL's calls run on the streams of the calling thread's GPU, over an in-process group. ``calls``: what each rank called."""

    available = True
    NCCL_SUM = "sum"

    def __init__(self, gpus):
        for name in ("uint8", "int32", "int64", "float16", "float32", "float64"):
            setattr(self, f"NCCL_{name.upper()}", name)
        self._gpus, self._groups, self._lock, self._own = gpus, {}, threading.Lock(), threading.local()
        self.calls = {}
        nccl = self

        class NcclCommunicator:
            def __init__(self, size, identity, rank):
                with nccl._lock:
                    group = nccl._groups.setdefault(identity, InProcess.group(size))
                self.inner, self.rank = group[rank], rank
                nccl.calls.setdefault(rank, [])

            def __getattr__(self, name):
                def call(*arguments):
                    nccl.call(self, name, arguments)

                return call

            def check_async_error(self):
                pass

        self.NcclCommunicator = NcclCommunicator

    def get_unique_id(self):
        with self._lock:
            return f"id {len(self._groups)}"

    def groupStart(self):
        assert getattr(self._own, "group", None) is None, "a group in a group"
        self._own.group = []

    def groupEnd(self):
        group, self._own.group = self._own.group, None
        self.calls[group[0][0].rank].append([name for _, name, _ in group])
        stream = group[0][2][-1]
        assert all(arguments[-1] == stream for _, _, arguments in group)
        # In a group everything is under way at once: all sends first, none of them waits.
        for comm, name, arguments in sorted(group, key=lambda call: call[1] != "send"):
            self.enqueue(comm, name, arguments)

    def call(self, comm, name, arguments):
        if getattr(self._own, "group", None) is not None:
            self._own.group.append((comm, name, arguments))
        else:
            self.calls[comm.rank].append(name)
            self.enqueue(comm, name, arguments)

    def enqueue(self, comm, name, arguments):
        self._gpus.mine.enqueue(arguments[-1], lambda: self.run(comm.inner, name, arguments))

    def run(self, inner, name, arguments):
        if name in ("send", "recv"):
            at, count, kind, peer, _ = arguments
            getattr(inner, name)(array(at, count, kind), peer)
        elif name == "allReduce":
            at, out, count, kind, _, _ = arguments
            assert at == out
            inner.all_reduce(array(at, count, kind))
        elif name == "reduceScatter":
            at, own, part, kind, _, _ = arguments
            whole = array(at, part * inner.size, kind)
            assert own == at + inner.rank * part * whole.itemsize
            inner.reduce_scatter(whole)
        elif name == "allGather":
            own, at, part, kind, _ = arguments
            whole = array(at, part * inner.size, kind)
            assert own == at + inner.rank * part * whole.itemsize
            inner.all_gather(whole)
        else:
            assert name == "broadcast"
            at, _, count, kind, root, _ = arguments
            inner.broadcast(array(at, count, kind), root)


def array(address, count, kind):
    """The numbers at an address."""
    nbytes = count * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), kind)


class FakeGpus:
    """Takes the place of cupy: each thread sees a GPU of its own. ``nccl``: what they meet in."""

    def __init__(self):
        self._local = threading.local()
        self.nccl = FakeNccl(self)

    @property
    def mine(self):
        """The GPU of this thread."""
        if not hasattr(self._local, "gpu"):
            self._local.gpu = gpu = FakeCuda(seed=threading.get_ident() % 97)
            gpu.module.cuda.runtime.getDevice = lambda: 0
        return self._local.gpu

    def install(self, monkeypatch):
        """Take the place of cupy, and NumPy's kernels that of CUDA's."""
        gpus = self

        class Module:
            gpus = self

            def __getattr__(self, name):
                if name.startswith("__"):
                    raise AttributeError(name)
                return getattr(gpus.mine.module, name)

        def host(operand):
            return operand.host() if isinstance(operand, FakeArray) else operand

        def stand_in(name):
            kernel = getattr(numpy_kernels, name)

            def bind(on, *operands, **attrs):
                gpu, arguments = gpus.mine, [host(operand) for operand in operands]
                extra = {key: host(value) for key, value in attrs.items()}

                def run():
                    with np.errstate(all="ignore"):
                        kernel(*arguments, **extra)

                return lambda: gpu.enqueue(on.stream, run)

            return bind

        monkeypatch.setitem(sys.modules, "cupy", Module())
        monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nccl=self.nccl))
        for name in cuda_kernels.__all__:
            monkeypatch.setattr(cuda_kernels, name, stand_in(name))
        return self


def device():
    """This thread's GPU; ``fake``: what is behind it."""
    opened = CudaDevice(refuse=("convolution", "matmul"))
    opened.fake = sys.modules["cupy"].gpus.mine
    return opened
