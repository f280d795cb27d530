"""Fusion rewrites a graph: what it joins, what it leaves, and what names and plans become of it."""

import dataclasses
import inspect
import itertools

import pytest

import minidnn
import models
from minidnn.errors import UserError
from minidnn.fuse import FUSIONS, fuse
from minidnn.graph import GraphError
from minidnn.kernels.base import Kernels
from minidnn.layers.fused import BatchNormAddReLU, BatchNormReLU, Conv2dReLU
from minidnn.precision import precision
from minidnn.recipes import numpy_recipe
from minidnn.schedule.analysis import Analysis
from minidnn.schedule.plan import Decision, Plan, PlanError
from minidnn.schedule.recipe import Recipe


def kinds(graph):
    return [type(node.layer).__name__ for node in graph.nodes]


def test_a_resnet_has_one_layer_for_every_batch_norm():
    graph = models.build("resnet50", batch=2, image_size=64)
    fused = fuse(graph, FUSIONS).graph
    count = {
        kind: kinds(fused).count(kind) for kind in ("BatchNormReLU", "BatchNormAddReLU", "BatchNorm", "ReLU", "Add")
    }
    assert count == {"BatchNormReLU": 33, "BatchNormAddReLU": 16, "BatchNorm": 4, "ReLU": 0, "Add": 0}
    assert {p.name for p in fused.parameters} == {p.name for p in graph.parameters}
    assert fused.logits.shape == graph.logits.shape


def test_a_vgg_has_no_relu_behind_a_convolution():
    fused = fuse(models.build("vgg16", batch=2, image_size=32), FUSIONS).graph
    assert kinds(fused).count("Conv2dReLU") == 13 and kinds(fused).count("ReLU") == 2


@pytest.mark.parametrize("left_out", FUSIONS)
def test_each_fusion_can_be_left_out(left_out):
    names = {"batch_norm_relu": BatchNormReLU, "batch_norm_add_relu": BatchNormAddReLU, "conv_bias_relu": Conv2dReLU}
    g = minidnn.Graph()
    h = g.relu(g.conv2d(g.input((2, 4, 4, 3)), 3, 1, bias=True))
    h = g.relu(g.add(g.batch_norm(g.relu(g.batch_norm(h))), h))
    g.softmax_cross_entropy(g.linear(g.flatten(h), 3), g.label((2,)))
    made = {type(node.layer) for node in fuse(g, [name for name in FUSIONS if name != left_out]).graph.nodes}
    assert {kind for name, kind in names.items() if name != left_out} <= made
    assert names[left_out] not in made


def test_nothing_is_fused_that_somebody_else_reads_or_that_has_another_shape_of_chain():
    g = minidnn.Graph()
    x = g.input((2, 4, 4, 3))
    seen = g.batch_norm(g.conv2d(x, 3, 1, bias=True))
    h = g.add(g.relu(seen), seen)
    h = g.relu(g.conv2d(h, 3, 1))  # no bias
    twice = g.batch_norm(h)
    h = g.relu(g.add(twice, twice))
    g.softmax_cross_entropy(g.linear(g.flatten(h), 3), g.label((2,)))
    assert fuse(g, FUSIONS).graph is g


def test_dropout_keeps_its_random_numbers():
    graph = models.build("vgg16_bn", batch=2, image_size=32)
    fused = fuse(graph, FUSIONS).graph
    found = [
        [c.attrs["node"] for n in g.nodes for c in n.layer.forward(Analysis.shapes(n)) if c.kernel == "dropout"]
        for g in (graph, fused)
    ]
    assert found[0] == found[1] and len(found[0]) == 2


def test_a_plan_for_the_graph_as_written_is_understood():
    graph = models.build("resnet20", batch=2)
    fused = fuse(graph, FUSIONS)
    name = next(node.name for node in graph.nodes if node.name.endswith("relu_1"))
    unit = name.replace("relu_1", "bn2")
    plan = fused.plan(Plan({name: Decision.OFFLOAD, "conv1": Decision.RECOMPUTE}, lags={name: 3}))
    assert plan.decisions == {unit: Decision.OFFLOAD, "conv1": Decision.RECOMPUTE} and plan.lags == {unit: 3}
    with pytest.raises(PlanError, match=unit):
        fused.plan(Plan({name: Decision.OFFLOAD, unit: Decision.RECOMPUTE}))


def test_the_recipe_says_what_is_fused_and_survives_its_file():
    graph = models.build("resnet20", batch=2)
    recipe = numpy_recipe(graph, precision("fp32"), None, True, FUSIONS)
    assert Recipe.from_json(recipe.to_json()) == recipe and recipe.fusions == FUSIONS
    assert recipe.hash != numpy_recipe(graph, precision("fp32"), None, True).hash
    with pytest.raises(UserError, match="fusions"):
        minidnn.compile(graph, device=None, recipe=recipe, fusions=())
    with pytest.raises(UserError, match="emulated device has not"):
        minidnn.compile(graph, recipe=dataclasses.replace(recipe, backend="cuda"))
    with pytest.raises(UserError, match="batch_norm_relu"):
        fuse(graph, ["batch_norm_rely"])


def test_fused_rows_name_their_operands_in_the_order_of_the_kernel_s_signature():
    words = {
        "residual": "x1",
        "old_mean": "running_mean",
        "old_var": "running_var",
        "old_tracked": "num_batches_tracked",
    }
    for graph in (models.build("resnet20", batch=2), models.build("vgg16", batch=2, image_size=32)):
        for node in fuse(graph, FUSIONS).graph.nodes:
            if not type(node.layer).__module__.endswith("fused"):
                continue
            shapes = Analysis.shapes(node)
            data = itertools.chain(*(node.layer.backward_data(shapes, i) for i in range(len(node.inputs))))
            for call in (*node.layer.forward(shapes), *node.layer.backward_weight(shapes), *data):
                if call.kernel in ("conv2d_backward_weight", "conv2d_backward_data", "batch_norm_backward_data"):
                    continue  # read dz as their dy
                signature = list(inspect.signature(getattr(Kernels, call.kernel)).parameters.values())[1:]
                expected = [words.get(p.name, p.name) for p in signature if p.kind is p.POSITIONAL_OR_KEYWORD]
                assert [*call.writes, *call.reads] == expected, call.kernel
            with pytest.raises(GraphError, match="evaluation"):
                node.layer.inference(shapes)
