"""What the tests of the CUDA device share: a net and batches for it, the device on a fake CUDA, and CuPy where there is a GPU."""

import numpy as np
import pytest

import minidnn
from minidnn.device.cuda import CudaDevice
from minidnn.kernels.cuda_blocks import SCRATCH_BYTES
from minidnn.precision import precision
from minidnn.recipes import numpy_recipe
from minidnn.schedule.plan import Decision, Plan

FIXED_BYTES = SCRATCH_BYTES  # what a device without libraries holds before its slab
OPTIMIZER = minidnn.SGD(lr=0.1, momentum=0.9, weight_decay=1e-4)
MOVING = Plan({"relu1": Decision.OFFLOAD, "conv2": Decision.OFFLOAD, "relu2": Decision.RECOMPUTE})


def usable_cupy():
    """CuPy where there is a GPU; elsewhere the test is skipped, with the reason."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed: pip install 'minidnn-layup[cuda13]'")
    if not cupy.cuda.is_available():
        pytest.skip("no usable CUDA device")
    return cupy


def device(**how):
    """A device whose kernels are all our own, since a fake CUDA has no libraries."""
    return CudaDevice(refuse=("convolution", "matmul"), **how)


def net(batch=4):
    """Two convolutions with batch normalisation, dropout and a linear layer."""
    g = minidnn.Graph()
    x = g.input((batch, 8, 8, 3))
    h = g.relu(g.batch_norm(g.conv2d(x, 4, 3, padding=1)))
    h = g.relu(g.batch_norm(g.conv2d(h, 8, 3, stride=2)))
    g.softmax_cross_entropy(g.linear(g.dropout(g.global_avg_pool(h), 0.25), 5), g.label((batch,)))
    return g


def batches(count, batch=4):
    """Pixels and labels for it."""
    rng = np.random.default_rng(7)
    return [(rng.standard_normal((batch, 8, 8, 3), np.float32), rng.integers(0, 5, batch)) for _ in range(count)]


def compiled(where, **how):
    """The step of the net on a device, with the recipe of NumPy's kernels, which stand in for CUDA's on a fake."""
    recipe = numpy_recipe(net(), precision("fp32"), None, True)
    return minidnn.compile(net(), optimizer=OPTIMIZER, device=where, recipe=recipe, **how)
