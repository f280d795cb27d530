"""The public Graph: names, refusals, gradients wanted, other batch sizes."""

import time

import pytest

import models
from minidnn.errors import UserError
from minidnn.graph import GraphError, Tensor
from minidnn.layers import Graph, ReLU


def classifier(g: Graph, x: Tensor, y: Tensor) -> Tensor:
    return g.softmax_cross_entropy(g.linear(g.global_avg_pool(x), 10, name="fc"), y)


def small() -> tuple[Graph, Tensor, Tensor]:
    g = Graph()
    return g, g.input((4, 8, 8, 3)), g.label((4,))


def test_a_net_is_one_expression():
    g = Graph()
    x, y = g.input((64, 32, 32, 3)), g.label((64,))
    first = g.relu(g.batch_norm(g.conv2d(x, 16, 3, padding=1, name="conv1")))
    g.softmax_cross_entropy(g.linear(g.global_avg_pool(first), 10), y)
    g.check()
    assert [node.name for node in g.nodes] == ["conv1", "batch_norm1", "relu1", "global_avg_pool1", "linear1", "loss"]
    assert [node.output.shape for node in g.nodes] == [(64, 32, 32, 16)] * 3 + [(64, 16), (64, 10), ()]
    assert g.logits is g.nodes[4].output
    assert g.loss_node is g.nodes[5]
    assert [p.name for p in g.parameters if p.trainable] == [
        "conv1.weight", "batch_norm1.weight", "batch_norm1.bias", "linear1.weight", "linear1.bias",
    ]  # fmt: skip
    assert g.parameter_count == 3 * 3 * 3 * 16 + 2 * 16 + 16 * 10 + 10
    assert "conv1" in g.summary() and "(64, 32, 32, 16)" in g.summary() and "634" in g.summary().splitlines()[-1]


def test_automatic_names_avoid_given_ones_and_given_ones_are_unique():
    g, x, _ = small()
    assert g.relu(x, name="relu2").name == "relu2"
    assert [g.relu(x).name for _ in range(3)] == ["relu1", "relu3", "relu4"]
    with pytest.raises(GraphError, match="'relu3' is taken"):
        g.relu(x, name="relu3")
    with pytest.raises(GraphError, match="'x' is taken"):
        g.relu(x, name="x")


def test_a_refused_layer_is_named_and_leaves_the_graph_as_it_was():
    g, x, _ = small()
    for _ in range(2):  # the second attempt meets the same refusal, not a taken name
        with pytest.raises(GraphError, match=r"^layer 'c': conv2d: .*9x9.*\(4, 8, 8, 3\)"):
            g.conv2d(x, 4, 9, name="c")
    assert g.nodes == []
    g.conv2d(x, 4, 3, name="c")


def test_tensors_of_another_graph_and_arrays_are_refused():
    g, x, _ = small()
    other, foreign, _ = small()
    with pytest.raises(GraphError, match="'x' belongs to another graph"):
        g.relu(foreign)
    produced = other.relu(foreign)
    g.relu(x)  # a node with the same index
    with pytest.raises(GraphError, match="'relu1' belongs to another graph"):
        g.relu(produced)
    with pytest.raises(GraphError, match=r"'r' wants tensors of this graph, not tuple; .*input\(\)"):
        g.relu((4, 8, 8, 3), name="r")  # type: ignore[arg-type]


def test_the_label_goes_into_the_loss_alone():
    g, x, y = small()
    with pytest.raises(GraphError, match="the label 'y' goes into the loss only"):
        g.apply(ReLU(), y)
    logits = g.linear(g.global_avg_pool(x), 4)
    with pytest.raises(GraphError, match="the label 'y' goes into the loss only"):
        g.softmax_cross_entropy(y, logits)


def test_gradients_are_wanted_exactly_below_a_trainable_parameter():
    g, x, y = small()
    pooled = g.max_pool(x, 2)
    first = g.conv2d(pooled, 3, 1)
    joined = g.add(g.relu(first), pooled)
    loss = classifier(g, joined, y)
    assert not (x.requires_grad or y.requires_grad or pooled.requires_grad)
    assert all(t.requires_grad for t in (first, joined, loss))


def test_check_names_what_nobody_uses():
    g, x, y = small()
    g.relu(x, name="idle")
    classifier(g, x, y)
    with pytest.raises(GraphError, match=r"layer 'idle' \(4, 8, 8, 3\)"):
        g.check()
    g, x, y = small()
    g.input((4, 5), name="spare")
    classifier(g, x, y)
    with pytest.raises(GraphError, match=r"input 'spare' \(4, 5\)"):
        g.check()


def test_check_wants_one_loss_and_something_to_train():
    g, x, y = small()
    logits = g.linear(g.global_avg_pool(x), 10)
    with pytest.raises(GraphError, match="no loss"):
        g.check()
    g.softmax_cross_entropy(logits, y)
    g.check()
    g.softmax_cross_entropy(logits, y, name="loss2")
    with pytest.raises(GraphError, match="2 losses, loss, loss2"):
        g.check()
    g, x, y = small()
    g.softmax_cross_entropy(g.global_avg_pool(x), y)
    with pytest.raises(GraphError, match="nothing to train"):
        g.check()


@pytest.mark.parametrize("name", ["alexnet_2012", "resnet20", "lenet5", "vgg11_bn"])
def test_another_batch_is_the_same_net_built_anew(name):
    built = models.build(name, batch=3, classes=7)
    derived = models.build(name, batch=8, classes=7).with_batch(3)
    derived.check()
    for ours, theirs in zip(derived.nodes, built.nodes, strict=True):
        assert (ours.index, ours.name, ours.layer, ours.parameters) == (
            theirs.index, theirs.name, theirs.layer, theirs.parameters,
        )  # fmt: skip
        assert [(t.name, t.spec, t.requires_grad) for t in (*ours.inputs, ours.output)] == [
            (t.name, t.spec, t.requires_grad) for t in (*theirs.inputs, theirs.output)
        ]
    assert [t.spec for t in (*derived.inputs, *derived.labels)] == [t.spec for t in (*built.inputs, *built.labels)]
    with pytest.raises(GraphError, match="is taken"):
        derived.relu(derived.inputs[0], name="loss")
    with pytest.raises(UserError, match="at least 1 sample, not 0"):
        built.with_batch(0)


def test_the_maximum_over_the_map_is_flat_and_refused_beyond_one_byte_of_index():
    g = Graph()
    assert g.global_max_pool(g.input((2, 16, 16, 5))).shape == (2, 5)
    with pytest.raises(GraphError, match=r"17x16 = 272 .* 256"):
        g.global_max_pool(g.input((2, 17, 16, 5), name="larger"))


def test_ten_thousand_layers_build_in_linear_time_and_print():
    g, x, _ = small()
    started = time.perf_counter()
    for _ in range(5_000):
        x = g.relu(g.batch_norm(x))
    assert time.perf_counter() - started < 5
    assert repr(x) == "Tensor('relu5000', compute[4,8,8,3])"  # not the whole chain behind it
    assert "batch_norm5000" in repr(x.producer)
    assert repr(g) == "Graph(10000 layers, 30,000 parameters)"
