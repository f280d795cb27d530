"""What a CUDA device cannot do, on a fake CUDA: each is refused in one sentence with the remedy or the figures."""

import importlib.util
import sys

import pytest

import tests.backend.fake_cuda as fake_cuda
from minidnn import cuda_recipes
from minidnn.device import cuda_libraries
from minidnn.errors import UserError
from minidnn.kernels.problem import OWN
from minidnn.precision import precision
from minidnn.recipes import numpy_recipe
from minidnn.schedule.recipe import Engine, Recipe
from tests.backend.cuda_nets import batches, compiled, device, net


@pytest.fixture(params=[0, 1])
def cuda(request, monkeypatch):
    return fake_cuda.install(monkeypatch, request.param)


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
            "Fake has compute capability 6.1, and cuDNN 9 needs 7.0; use the device 'emulated'",
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
