"""The CUDA device: its ordering and bookkeeping on a fake CUDA everywhere, its arithmetic on a real one where there is one."""

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import minidnn
import tests.backend.fake_cuda as fake_cuda
from minidnn.capture import segments
from minidnn.device.cuda import CudaDevice
from minidnn.device.cuda_libraries import parse_device
from minidnn.device.emulated import EmulatedDevice
from minidnn.errors import UserError
from minidnn.executor import BoundRow
from minidnn.schedule.instruction import COMPUTE, D2H, H2D
from minidnn.schedule.plan import Plan
from minidnn.spec import TensorSpec
from tests.backend.cuda_nets import FIXED_BYTES, MOVING, OPTIMIZER, batches, compiled, device, net, usable_cupy

ROOT = Path(__file__).resolve().parents[2]


# -- a fake CUDA: what a GPU would do with what the device enqueues ---------------------------------------------------
@pytest.fixture(params=[0, 1, 2])
def cuda(request, monkeypatch):
    """A fake CUDA whose kernels are NumPy's, run when the streams please."""
    return fake_cuda.install(monkeypatch, request.param)


def on_cuda(capture="off", **how):
    """The step on the fake, with the recipe of its stand-ins."""
    return compiled(device(), capture=capture, **how)


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


CAPTURED_PLANS = {"keep": minidnn.keep(), "moving": MOVING, "streamed": Plan(streamed=("*",), group_bytes=1)}


@pytest.mark.parametrize("plan", CAPTURED_PLANS)
def test_captured_steps_give_the_same_bits_between_all_that_is_not_captured(cuda, plan):
    """A run row by row loads the kernels, the others are launches; evaluation and gradients come in between."""
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
    assert cuda.launched == 8 * other.executor.graphs and other.executor.graphs >= 2, "all but the first run"
    for found, expected in zip(*reversed(outcomes), strict=True):
        np.testing.assert_array_equal(found, expected)
    other.close()


def test_the_batch_of_a_captured_step_travels_beside_the_step_before(cuda):
    """Its copy waits for the rows that read the staging buffer, not for the end of a graph."""
    step = on_cuda("on")
    data = batches(4)
    train(step, data[:3])
    executor, submitted = step.executor, []
    submit = executor.device.submit

    def spy(stream, work, after, seconds, record):
        event = submit(stream, work, after, seconds, record)
        submitted.append((stream, getattr(work, "func", None), [e.pointer for e in after], event and event.pointer))
        return event

    executor.device.submit = spy
    train(step, data[3:])
    (copy,) = [waits for stream, _, waits, _ in submitted if stream == H2D]
    last_run = executor.bound("train").events
    graphs = [unit.rows[-1] for unit in executor.units(executor.bound("train")) if len(unit.rows) > 1]
    assert len(graphs) == 2 and copy
    assert not set(copy) & {last_run[row].pointer for row in graphs if last_run[row] is not None}


@pytest.mark.parametrize("plan", CAPTURED_PLANS)
def test_a_segment_waits_at_its_first_row_and_is_waited_for_at_its_last(cuda, plan):
    step = on_cuda("on", plan=CAPTURED_PLANS[plan])
    rows = step.executor.bound("train").rows
    found = segments(rows)
    assert sorted(index for segment in found for row in segment for index in row.rows) == list(range(len(rows)))
    for segment in found:
        assert len(segment) == 1 or all(row.stream == COMPUTE for row in segment)
        assert not any(row.waits for row in segment[1:]) and not any(row.record for row in segment[:-1])
    order = [row.rows[0] for segment in found for row in segment]
    for stream in {row.stream for row in rows}:
        own = [index for index in order if rows[index].stream == stream]
        assert own == sorted(own), "a stream keeps its order"
    place = {segment[-1].rows[0]: number for number, segment in enumerate(found)}
    for number, segment in enumerate(found):
        for row in segment:
            assert all(place[w] < number for w, lag in row.waits if not lag), "what is waited for was submitted before"
    for segment in found:
        for row in segment:
            moved = set(rows[row.rows[0]].waits) - set(row.waits)
            assert moved <= set(segment[0].waits), "a wait that moves, moves to the first row of its segment"
            assert all(lag and w <= row.rows[0] for w, lag in moved), "and is for what a whole run was there for"


def test_waits_for_what_was_submitted_a_whole_run_ago_do_not_cut_a_segment():
    def row(index, waits=(), record=False, stream=COMPUTE):
        return BoundRow((index,), stream, (None,), tuple(waits), 0.0, record)

    found = segments(
        [row(0), row(1, [(1, 1)]), row(2, [(3, 1)]), row(3, [(0, 1), (9, 1)]), row(4), row(5, record=True)]
    )
    assert [[(r.rows[0], r.waits) for r in segment] for segment in found] == [
        [(0, ((1, 1),)), (1, ())],
        [(2, ((3, 1),))],
        [(3, ((0, 1), (9, 1))), (4, ()), (5, ())],
    ]


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


def test_other_plans_of_a_closed_step_ask_the_device_for_nothing(cuda, monkeypatch):
    """A report is made of them at the end, when there may be no device any more; the last batch has its recipe from before."""
    step = on_cuda(tail=2)
    assert step.request.tail_recipe.backend == "cuda"
    monkeypatch.setattr(CudaDevice, "select_engine", lambda *_: pytest.fail("a closed device was asked"))
    step.close()
    assert step.request.program(minidnn.naive())["train_tail"].profile.peak_bytes > 0


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


@pytest.mark.parametrize("how", ({"capture": "on"}, {"capture": "off"}, {"allocator": "pool"}))
def test_a_device_that_was_given_outlives_its_steps_and_serves_one_at_a_time(cuda, how):
    data, opened = batches(5), device()
    expected = train(minidnn.compile(net(), optimizer=OPTIMIZER), data)
    for _ in range(3):
        assert cuda.used == FIXED_BYTES
        step = compiled(opened, **how)
        early = [step.run(x, y).loss for x, y in data[:2]]
        with pytest.raises(UserError, match="cuda:0 holds the memory of another step; close that first"):
            compiled(opened, **how)
        late = train(step, data[2:])
        assert_same((early + late[0], late[1]), expected)
        step.close()
        gc.collect()
    opened.close()
    assert not cuda.recorded


def test_the_emulated_device_serves_one_step_after_another_too():
    data, opened = batches(3), EmulatedDevice()
    expected = train(minidnn.compile(net(), optimizer=OPTIMIZER), data)
    for _ in range(2):
        step = minidnn.compile(net(), optimizer=OPTIMIZER, device=opened)
        with pytest.raises(UserError, match="emulated holds the memory of another step"):
            minidnn.compile(net(), device=opened)
        assert_same(train(step, data), expected)
        step.close()


def test_a_device_that_was_named_is_closed_with_its_step(cuda, monkeypatch):
    opened = device()
    monkeypatch.setattr("minidnn.device.cuda.open_device", lambda *_: opened)
    step = compiled("cuda:0")
    step.run(*batches(1)[0])
    assert cuda.recorded
    step.close()
    assert not cuda.recorded, "events are destroyed when the device is closed"


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
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


# -- on a GPU ---------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
def test_the_protocol_check_passes(tmp_path):
    usable_cupy()
    script = ROOT / "scripts" / "gpu" / "protocol_check.py"
    report = tmp_path / "report.json"
    done = subprocess.run([sys.executable, str(script), "--json", str(report)], timeout=600, check=False)
    assert done.returncode == 0, report.read_text(encoding="utf-8")
