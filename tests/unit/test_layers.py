"""Layers describe kernel calls: their rows match the kernels' signatures, name what backward needs, refuse in words."""

import inspect
import itertools
import re

import numpy as np
import pytest

from minidnn.errors import UserError
from minidnn.graph import GraphError, Node, Parameter
from minidnn.kernels.base import Kernels
from minidnn.layers import Call, Conv2d, Dropout, Graph, Shapes
from minidnn.layers.initial import initialise, parameter_generator
from minidnn.layers.layout import from_torchvision, spatial_columns, to_torchvision
from minidnn.layers.pooling import AvgPool, MaxPool
from minidnn.spec import TensorSpec


def zoo() -> Graph:
    """A net with every layer in it."""
    g = Graph()
    x, y = g.input((2, 8, 8, 4)), g.label((2,))
    first = g.conv2d(x, 6, (3, 1), (2, 1), (1, 0), groups=2, bias=True)
    h = g.relu(g.batch_norm(first))
    h = g.lrn(g.add(h, g.tanh(first)))
    h = g.concat(g.max_pool(h, 2, ceil_mode=True), g.avg_pool(h, 2), g.subsample(h, 2))
    h = g.concat(g.linear(g.dropout(g.flatten(h)), 5), g.global_avg_pool(h))
    g.softmax_cross_entropy(g.linear(h, 3, bias=False), y)
    g.check()
    return g


def shapes(node: Node) -> Shapes:
    return Shapes(tuple(tensor.spec for tensor in node.inputs), node.output.spec, node.index)


def rows(node: Node) -> list[Call]:
    layer, s = node.layer, shapes(node)
    data = [call for i in range(len(node.inputs)) for call in layer.backward_data(s, i)]
    phases = (layer.forward, layer.recompute, layer.once, layer.inference, layer.backward_weight)
    return [*(call for phase in phases for call in phase(s)), *data]


NODES = {node.layer.kind: node for node in zoo().nodes}
OPERANDS = {"loss": "y", "logits": "x0", "labels": "x1", "d_logits": "dx"}  # a kernel's word -> the layer's
CHOSEN_BY_THE_ENGINE = {"images", "scratch", "accumulate"}


@pytest.mark.parametrize("kind", NODES)
def test_rows_name_their_operands_in_the_order_of_the_kernel_s_signature(kind):
    node = NODES[kind]
    for call in rows(node):
        kernel = getattr(Kernels, call.kernel)
        declared = list(inspect.signature(kernel).parameters.values())[1:]
        operands = [re.sub(r"^(d?x)0$", r"\1", name) for name in (*call.writes, *call.reads)]
        if call.kernel.startswith("concat"):
            assert re.sub(r"\d", "", "".join(operands)) in ("y" + "x" * len(node.inputs), "dxdy")
        else:
            words = [p.name for p in declared if p.kind is p.POSITIONAL_OR_KEYWORD]
            expected = [re.sub(r"^(d?x)0$", r"\1", OPERANDS.get(word, word)) for word in words]
            if call.kernel == "dropout" and "dx" in call.writes:  # one kernel for both directions
                expected = ["dx", "dy", "counters"]
            optional = {p.name for p in declared if p.default is None}
            assert operands == [word for word in expected if word in operands or word not in optional]
        keywords = {p.name for p in declared if p.kind is p.KEYWORD_ONLY} - CHOSEN_BY_THE_ENGINE
        assert set(call.attrs) == keywords
        assert set(call.over) <= set(call.reads)
        assert bool(call.over) == ("may be" in (kernel.__doc__ or ""))  # overwriting is what the kernel allows
        assert call.engine == (
            call.kernel.removeprefix(f"{kind}_") if kind in ("conv2d", "linear") and kind in call.kernel else ""
        )


@pytest.mark.parametrize("kind", NODES)
def test_every_output_and_gradient_is_written_once(kind):
    node, s = NODES[kind], shapes(NODES[kind])
    layer = node.layer

    def written(calls):
        return sorted(name for call in calls for name in call.writes)

    aux = {a.key: a.kept for a in layer.aux(s)}
    assert written(layer.forward(s)) in (sorted(["y", *aux]), [])
    assert written(layer.recompute(s)) in (
        sorted(["y", *(key for key, kept in aux.items() if not kept)]),
        written(layer.forward(s)),
    )
    assert "y" in written(layer.inference(s)) or not layer.inference(s)
    assert written(layer.backward_weight(s)) == sorted(f"d_{p.key}" for p in node.parameters if p.trainable)
    for i in range(len(node.inputs)):
        assert [re.sub(r"^dx$", "dx0", name) for name in written(layer.backward_data(s, i))] in (
            [f"dx{i}"],
            ["dx0"],
            [],
        )


def test_backward_needs_exactly_this():
    stored = {
        kind: {
            operand
            for i in range(len(node.inputs))
            for call in (*node.layer.backward_weight(shapes(node)), *node.layer.backward_data(shapes(node), i))
            for operand in call.reads
            if operand in {"x", "x0", "y", *(a.key for a in node.layer.aux(shapes(node)))}
        }
        for kind, node in NODES.items()
    }
    assert stored == {
        "conv2d": {"x"}, "linear": {"x"}, "batch_norm": {"x", "mean", "rstd"}, "relu": {"y"}, "tanh": {"y"},
        "max_pool": {"index"}, "avg_pool": set(), "global_avg_pool": set(), "subsample": {"x"}, "dropout": set(),
        "add": set(), "concat": set(), "flatten": set(), "lrn": {"x", "scale"},
        "softmax_cross_entropy": {"probabilities"},
    }  # fmt: skip
    kept = {a.key for node in NODES.values() for a in node.layer.aux(shapes(node)) if a.kept}
    assert kept == {"mean", "rstd", "probabilities"}


def test_batch_norm_moves_its_running_averages_in_no_row_that_can_be_repeated():
    layer, s = NODES["batch_norm"].layer, shapes(NODES["batch_norm"])
    (once,) = layer.once(s)
    assert once.accumulates and once.attrs["count"] == 2 * 4 * 8
    running = set(once.writes)
    assert [call.kernel for call in layer.recompute(s)] == ["batch_norm_apply"]
    assert [call.kernel for call in layer.inference(s)] == ["batch_norm_inference"]
    for phase in (layer.forward, layer.recompute, layer.backward_weight, layer.inference):
        assert not running & {name for call in phase(s) for name in call.writes}
    with pytest.raises(GraphError, match=r"\(1, 1, 1, 6\) has one value per channel"):
        one = TensorSpec((1, 1, 1, 6), "compute")
        layer.forward(Shapes((one,), one, 0))


def test_aliases_cost_nothing():
    for kind in ("flatten", "add", "dropout"):
        node = NODES[kind]
        calls = node.layer.inference(shapes(node)) if kind == "dropout" else node.layer.backward_data(shapes(node), 0)
        assert calls == ()
    assert NODES["flatten"].layer.forward(shapes(NODES["flatten"])) == ()
    spec = TensorSpec((2, 3), "compute")
    assert Dropout(0.0).forward(Shapes((spec,), spec, 0)) == ()


def test_dropout_is_keyed_by_its_node_and_scaled_to_keep_the_mean():
    spec = TensorSpec((2, 3), "compute")
    (forward,), (backward,) = (
        Dropout(0.25).forward(Shapes((spec,), spec, 7)),
        Dropout(0.25).backward_data(Shapes((spec,), spec, 7), 0),
    )
    assert forward.attrs == backward.attrs == {"node": 7, "threshold": 2**30, "scale": 4 / 3}


def test_concat_gives_every_input_its_own_slice():
    g = Graph()
    parts = [g.input((2, 3, 3, c), name=f"x{c}") for c in (4, 1, 2)]
    g.concat(*parts)
    node = g.nodes[0]
    calls = [node.layer.backward_data(shapes(node), i)[0] for i in range(3)]
    assert [(call.writes, call.attrs["offset"]) for call in calls] == [(("dx0",), 0), (("dx1",), 4), (("dx2",), 5)]
    assert node.layer.forward(shapes(node))[0].reads == ("x0", "x1", "x2")


def test_window_counts_equal_their_enumeration():
    for h, k, s, d in itertools.product(range(1, 12), range(1, 5), range(1, 5), (1, 2)):
        for pad in range(k // 2 + 1):
            reach = d * (k - 1) + 1
            starts = [i for i in range(-pad, h + pad, s) if i + reach <= h + pad]
            if not starts:
                continue
            spec = TensorSpec((1, h, h, 2), "compute")
            conv = Conv2d(3, (k, k), (s, s), (pad, pad), (d, d)).infer([spec])
            assert conv.shape == (1, len(starts), len(starts), 3)
            if d == 1:
                assert MaxPool((k, k), (s, s), (pad, pad)).infer([spec]).shape[1] == len(starts)
                assert AvgPool((k, k), (s, s), (pad, pad)).infer([spec]).shape[2] == len(starts)
                following = (
                    starts[-1] + s
                )  # rounding up adds a window for pixels left over, if it starts before their end
                overhang = starts[-1] + k < h + pad and following < h
                rounded = MaxPool((k, k), (s, s), (pad, pad), ceil_mode=True).infer([spec])
                assert rounded.shape == (1, len(starts) + overhang, len(starts) + overhang, 2)


def test_convolution_counts_two_operations_for_every_multiply_add():
    node = NODES["conv2d"]
    n, p, q, k = node.output.shape
    macs = n * p * q * k * 3 * 1 * (4 // 2)
    assert (n, p, q, k) == (2, 4, 8, 6)
    assert [call.flops for call in rows(node) if call.engine == "backward_data"] == [2.0 * macs]
    assert node.parameter("weight").shape == (6, 3, 1, 2)


IMAGE, FLAT = (4, 8, 8, 6), (4, 10)
REFUSALS = {
    "linear of an image": (lambda g, x, f, y: g.linear(x, 3), "(4, 8, 8, 6)", "flatten or global_avg_pool"),
    "conv of a flat tensor": (lambda g, x, f, y: g.conv2d(f, 3, 1), "(N, H, W, C)", "(4, 10)"),
    "groups that do not divide": (
        lambda g, x, f, y: g.conv2d(x, 8, 1, groups=4),
        "groups=4",
        "6 channels",
        "(4, 8, 8, 6)",
    ),
    "kernel larger than the image": (
        lambda g, x, f, y: g.conv2d(x, 8, 5, dilation=2),
        "5x5",
        "(4, 8, 8, 6)",
        "more padding",
    ),
    "kernel of three numbers": (lambda g, x, f, y: g.conv2d(x, 8, (3, 3, 3)), "kernel", "(3, 3, 3)"),
    "stride of zero": (lambda g, x, f, y: g.max_pool(x, 2, 0), "stride", "at least 1", "0"),
    "no output channels": (lambda g, x, f, y: g.conv2d(x, 0, 1), "channels 0"),
    "no features": (lambda g, x, f, y: g.linear(f, 0), "features", "0"),
    "window of more than a byte": (lambda g, x, f, y: g.max_pool(x, 17), "17x17 = 289", "256"),
    "padding that hides a window": (lambda g, x, f, y: g.avg_pool(x, 2, 2, 2), "padding (2, 2)", "(2, 2)"),
    "pooling window too large": (lambda g, x, f, y: g.max_pool(x, 9), "9x9", "(4, 8, 8, 6)", "smaller window"),
    "sub-sampling window too large": (lambda g, x, f, y: g.subsample(x, 9), "9x9", "(4, 8, 8, 6)"),
    "pooling a flat tensor": (lambda g, x, f, y: g.global_avg_pool(f), "(4, 10)"),
    "add of unequal shapes": (
        lambda g, x, f, y: g.add(x, g.max_pool(x, 2)),
        "(4, 8, 8, 6)",
        "(4, 4, 4, 6)",
        "1x1 conv2d",
    ),
    "concat of unequal maps": (lambda g, x, f, y: g.concat(x, g.max_pool(x, 2)), "(4, 8, 8, 6)", "(4, 4, 4, 6)"),
    "concat of one": (lambda g, x, f, y: g.concat(x), "two inputs or more", "1"),
    "dropout of everything": (lambda g, x, f, y: g.dropout(x, 1.0), "below 1", "1.0"),
    "negative eps": (lambda g, x, f, y: g.batch_norm(x, eps=-1), "eps", "-1"),
    "momentum beyond one": (lambda g, x, f, y: g.batch_norm(x, momentum=1.5), "momentum", "1.5", "None"),
    "lrn of no channels": (lambda g, x, f, y: g.lrn(x, size=0), "size 0"),
    "flat tanh": (lambda g, x, f, y: g.tanh(x, slope=0), "slope 0"),
    "loss of an image": (lambda g, x, f, y: g.softmax_cross_entropy(x, y), "(4, 8, 8, 6)", "end the net with linear"),
    "labels of another batch": (
        lambda g, x, f, y: g.softmax_cross_entropy(f, g.label((5,), "z")),
        "(4, 10)",
        "label((4,))",
        "[5]",
    ),
    "smoothing of one": (lambda g, x, f, y: g.softmax_cross_entropy(f, y, smoothing=1.0), "smoothing", "1.0"),
    "two inputs for one": (lambda g, x, f, y: g.apply(Dropout(), x, x), "one input, not 2"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_values_and_the_remedy(case):
    build, *parts = REFUSALS[case]
    g = Graph()
    with pytest.raises(GraphError) as refusal:
        build(g, g.input(IMAGE), g.input(FLAT, name="f"), g.label((4,)))
    assert [part for part in parts if part not in str(refusal.value)] == [], str(refusal.value)


# -- initial values ---------------------------------------------------------------------------------------------------
FIRST_WORD = 12934875403945768524  # of the stream of seed 0 and "conv1.weight", on every machine and in every process


def initial(init, shape, *, seed=0, name="w", dtype=np.float32):
    return initialise(Parameter(name, "weight", shape, init), parameter_generator(seed, name), dtype)


def test_initial_values_depend_on_seed_and_name_alone():
    first = initial("kaiming_normal_fan_out", (8, 3, 3, 4))
    assert np.array_equal(first, initial("kaiming_normal_fan_out", (8, 3, 3, 4)))
    assert not np.array_equal(first, initial("kaiming_normal_fan_out", (8, 3, 3, 4), seed=1))
    assert not np.array_equal(first, initial("kaiming_normal_fan_out", (8, 3, 3, 4), name="v"))
    assert np.array_equal(first, initial("kaiming_normal_fan_out", (8, 3, 3, 4), dtype=np.float64))
    assert parameter_generator(0, "conv1.weight").bit_generator.random_raw() == FIRST_WORD
    with pytest.raises(UserError, match="not -1"):
        parameter_generator(-1, "w")


def test_initial_values_have_the_stated_distribution():
    weight = initial("kaiming_normal_fan_out", (256, 3, 3, 64))
    assert weight.std() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.01)  # fan-out: K R S, not the 576 of fan-in
    assert abs(weight.mean()) < 1e-3
    weight = initial("uniform_fan_in", (300, 400))
    assert 0.99 * 0.05 < weight.max() <= 0.05 and -0.05 <= weight.min() < -0.99 * 0.05
    assert weight.std() == pytest.approx(0.05 / 3**0.5, rel=0.01)
    assert initial("normal_0.01", (300, 400)).std() == pytest.approx(0.01, rel=0.01)
    assert abs(initial("uniform:0.25", (9999,))).max() == pytest.approx(0.25, rel=0.01)
    assert np.array_equal(initial("constant:0.25", (3,)), np.full(3, 0.25, np.float32))
    assert np.array_equal(initial("zeros", (3,)), np.zeros(3)) and np.array_equal(initial("ones", (3,)), np.ones(3))
    assert initial("zeros_int", (1,)).dtype == np.int64
    with pytest.raises(UserError, match=r"'kaiming_norm' of w; did you mean kaiming_normal_fan_out"):
        initial("kaiming_norm", (3, 3))


def test_a_bias_follows_its_weight_s_rule():
    g = Graph()
    x = g.input((2, 6, 6, 4))
    g.conv2d(x, 8, 3, bias=True, groups=2, init="uniform_fan_in", name="c")
    g.conv2d(x, 8, 3, bias=True, name="k")
    g.linear(g.flatten(x), 5, init="normal_0.01", name="l")
    inits = {p.name: p.init for p in g.parameters}
    assert float(inits["c.bias"].partition(":")[2]) == pytest.approx((3 * 3 * 4 / 2) ** -0.5, rel=1e-15)
    assert inits["k.bias"] == inits["l.bias"] == "zeros"


# -- layouts ----------------------------------------------------------------------------------------------------------
def test_files_hold_torchvision_s_layout():
    g = Graph()
    x = g.input((2, 3, 5, 4))
    conv = g.conv2d(x, 4, 3, padding=1, name="conv")
    hidden = g.linear(g.dropout(g.relu(g.batch_norm(g.flatten(conv), name="bn"))), 6, name="first")
    g.concat(g.linear(hidden, 7, name="second"), g.linear(g.global_avg_pool(conv), 7, name="third"))
    spatial = spatial_columns(g)
    assert set(spatial) == {"first.weight", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"}
    assert set(spatial.values()) == {(3, 5, 4)}

    rng = np.random.default_rng(0)
    image, weight = rng.integers(-9, 9, (3, 5, 4)), rng.integers(-9, 9, (6, 60))
    filed = to_torchvision("first.weight", weight, spatial)
    assert np.array_equal(filed @ image.transpose(2, 0, 1).reshape(-1), weight @ image.reshape(-1))
    mean = rng.integers(-9, 9, 60)
    assert np.array_equal(
        to_torchvision("bn.running_mean", mean, spatial), mean.reshape(3, 5, 4).transpose(2, 0, 1).reshape(-1)
    )
    kernel = rng.integers(-9, 9, (4, 3, 2, 5))
    filed = to_torchvision("conv.weight", kernel, spatial)
    assert all(filed[k, c, r, s] == kernel[k, r, s, c] for k, r, s, c in np.ndindex(4, 3, 2, 5))
    assert to_torchvision("bn.num_batches_tracked", np.array([3]), spatial).shape == ()


def test_layouts_come_back_bit_for_bit():
    spatial = {"first.weight": (3, 5, 4), "bn.weight": (3, 5, 4)}
    rng = np.random.default_rng(0)
    shapes = {
        "conv.weight": (4, 3, 2, 5),
        "first.weight": (6, 60),
        "bn.weight": (60,),
        "second.weight": (7, 6),
        "bn.num_batches_tracked": (1,),
    }
    for name, shape in shapes.items():
        ours = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)  # any bits, NaN included
        filed = to_torchvision(name, ours, spatial)
        back = from_torchvision(name, filed, spatial)
        assert back.shape == ours.shape and back.tobytes() == ours.tobytes()
        assert filed.flags.c_contiguous and not np.shares_memory(filed, ours)
        assert sorted(filed.reshape(-1).view(np.uint32)) == sorted(ours.reshape(-1).view(np.uint32))
