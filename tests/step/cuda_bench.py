"""What the tests of training steps on a CUDA device share: a GPU or a fake one, a net that reaches every kind of row, batches."""

import weakref

import numpy as np

import minidnn
from minidnn.device.cuda import CudaDevice
from minidnn.precision import precision
from minidnn.recipes import numpy_recipe
from minidnn.schedule.plan import Decision, Plan

OPTIMIZER = minidnn.SGD(lr=0.01, momentum=0.9)
MOVING = Plan({"relu1": Decision.OFFLOAD, "conv2": Decision.OFFLOAD, "relu2": Decision.RECOMPUTE})


class Bench:
    """Where the steps of a test run."""

    def __init__(self, cupy, fake):
        self.cupy, self.fake = cupy, fake

    def device(self, kind="fp32"):
        return CudaDevice(precision=kind, refuse=("convolution", "matmul") if self.fake else ())

    def compile(self, graph, plan=None, kind="fp32", device=None, **how):
        recipe = numpy_recipe(graph, precision("fp32"), None, True) if self.fake else None
        how |= {"recipe": recipe} if self.fake and "workspace_limit" not in how else {}
        device = device or self.device(kind)
        return minidnn.compile(graph, plan, optimizer=OPTIMIZER, device=device, precision=kind, **how)

    @property
    def used_bytes(self):
        """What the driver counts as taken on the GPU, by whomever."""
        free, total = self.cupy.cuda.runtime.memGetInfo()
        return total - free


class Allocations:
    """Device memory that is asked for through ``cupy.cuda.Memory`` from now on, until the test ends.

    One entry for each request, in order: ``sizes``, then ``held``, what of all requests was alive right after it, and ``used``,
    what the driver counted right after it. ``held_bytes``: what is alive now.
    """

    def __init__(self, monkeypatch, bench):
        self.sizes, self.held, self.used, self.held_bytes = [], [], [], 0
        noted = self

        class Counted(bench.cupy.cuda.Memory):
            def __init__(self, nbytes):
                super().__init__(nbytes)
                noted.held_bytes += nbytes
                for entries, entry in (
                    (noted.sizes, nbytes),
                    (noted.held, noted.held_bytes),
                    (noted.used, bench.used_bytes),
                ):
                    entries.append(entry)
                weakref.finalize(self, noted.free, nbytes)

        monkeypatch.setattr(bench.cupy.cuda, "Memory", Counted)

    def free(self, nbytes):
        self.held_bytes -= nbytes


def close(step):
    """Close a step and the device it was given."""
    step.close()
    step.request.device.close()


def net(batch=4, height=13, width=11, norm=True):
    """Two convolutions of odd extents, with batch normalisation or without, a pool and a linear layer."""
    g = minidnn.Graph()
    h = g.conv2d(g.input((batch, height, width, 3)), 8, 3, padding=1, name="conv1")
    h = g.relu(g.batch_norm(h) if norm else h, name="relu1")
    h = g.max_pool(h, 2, 2)
    h = g.conv2d(h, 8, 3, padding=1, name="conv2")
    h = g.relu(g.batch_norm(h) if norm else h, name="relu2")
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(h), 5), g.label((batch,)))
    return g


def batches(graph, count):
    """Pixels and labels for a graph."""
    rng = np.random.default_rng(5)
    shape, classes = graph.inputs[0].shape, graph.logits.shape[-1]
    return [(rng.standard_normal(shape, np.float32), rng.integers(0, classes, shape[0])) for _ in range(count)]
