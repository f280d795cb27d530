"""The model zoo against published numbers: parameters, multiply-adds, names."""

import time

import pytest

import models
from minidnn.errors import UserError
from minidnn.graph import Node
from minidnn.layers import Conv2d, Linear, Shapes

# torchvision's documentation of its weights (num_params, GFLOPS at 224 x 224), 1000 classes
TORCHVISION = {
    "alexnet": (61_100_840, 0.714),
    "vgg11": (132_863_336, 7.609),
    "vgg11_bn": (132_868_840, 7.609),
    "vgg13": (133_047_848, 11.308),
    "vgg13_bn": (133_053_736, 11.308),
    "vgg16": (138_357_544, 15.47),
    "vgg16_bn": (138_365_992, 15.47),
    "vgg19": (143_667_240, 19.632),
    "vgg19_bn": (143_678_248, 19.632),
    "resnet18": (11_689_512, 1.814),
    "resnet34": (21_797_672, 3.664),
    "resnet50": (25_557_032, 4.089),
    "resnet101": (44_549_160, 7.801),
    "resnet152": (60_192_808, 11.514),
    "googlenet": (6_624_904, 1.498),
    "densenet121": (7_978_856, 2.834),
}
# classes, channels, parameters
OTHERS = {
    "lenet": (10, 1, 431_080),  # Caffe's log for examples/mnist/lenet
    "lenet5": (10, 1, 156 + 12 + 6 * 16 * 25 + 16 + 32 + 48_120 + 10_164 + 850),  # the paper's table but for a full C3
    "cifar_quick": (10, 3, 145_578),
    "alexnet_2012": (1000, 3, 60_965_224),
}
CIFAR_A = {20: 269_722, 32: 464_154, 44: 658_586, 56: 853_018, 110: 1_727_962}
"""CIFAR ResNets with option A: 464 for the stem, 6n layers of 16, 32, 64 channels, 650 for the classifier."""

OPTION_B = (16 * 32 + 2 * 32) + (32 * 64 + 2 * 64)  # two projections with batch norm


def multiply_adds(node: Node) -> float:
    shapes = Shapes(tuple(t.spec for t in node.inputs), node.output.spec, node.index)
    flops: float = node.layer.forward(shapes)[0].flops
    return flops / 2


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision_nets_have_the_published_parameters_and_multiply_adds(name):
    g = models.build(name, batch=1)
    g.check()
    parameters, giga = TORCHVISION[name]
    assert g.parameter_count == parameters
    counted = sum(multiply_adds(n) for n in g.nodes if isinstance(n.layer, Conv2d | Linear))
    assert counted / 1e9 == pytest.approx(giga, abs=6e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_other_nets_have_the_published_parameters(name):
    classes, channels, parameters = OTHERS[name]
    g = models.build(name, batch=1, classes=classes, in_channels=channels)
    g.check()
    assert g.parameter_count == parameters


@pytest.mark.parametrize("depth", CIFAR_A)
def test_cifar_resnets_differ_from_the_paper_by_their_two_projections(depth):
    n, widths = (depth - 2) // 6, (16, 32, 64)
    convolutions = sum(9 * w * (w + (2 * n - 1) * w) - (9 * w * w // 2 if w > 16 else 0) for w in widths)
    assert 432 + 32 + convolutions + sum(2 * n * 2 * w for w in widths) + 650 == CIFAR_A[depth]
    assert models.build(f"resnet{depth}", batch=1, classes=10).parameter_count == CIFAR_A[depth] + OPTION_B
    for size in (8, 16, 28, 32):
        assert models.build(f"resnet{depth}", batch=1, classes=10, image_size=size).logits.shape == (1, 10)


@pytest.mark.parametrize("name", [n for n in models.available() if n != "resnet"])
def test_every_net_takes_any_classes_and_grey_images_down_to_its_minimum(name):
    smallest = models.MODELS[name].smallest
    for size in (None, smallest, smallest + 1):
        g = models.build(name, batch=3, image_size=size, in_channels=1, classes=2)
        g.check()
        assert g.logits.shape == (3, 2)
        assert all(min(node.output.shape, default=1) >= 1 for node in g.nodes)
    with pytest.raises(
        UserError, match=rf"{name} needs images of at least {smallest} x {smallest} pixels, not {smallest - 1}"
    ):
        models.build(name, batch=3, image_size=smallest - 1)


@pytest.mark.parametrize(
    "name", ["lenet", "cifar_quick", "alexnet", "alexnet_2012", "vgg11", "googlenet", "densenet121"]
)
def test_the_stated_minimum_is_the_true_one(name, monkeypatch):
    model = models.MODELS[name]
    monkeypatch.setitem(models.MODELS, name, model._replace(smallest=1))
    with pytest.raises(UserError, match="does not fit into the input"):
        models.build(name, batch=1, image_size=model.smallest - 1)


def test_names_are_torchvision_s():
    keys = [p.name for p in models.build("resnet18", batch=1).parameters]
    assert len(keys) == 122  # len(torchvision.models.resnet18().state_dict())
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert [key for key in keys if key.startswith("layer2.0.")] == [
        "layer2.0.conv1.weight", *(f"layer2.0.bn1.{key}" for key in norm),
        "layer2.0.conv2.weight", *(f"layer2.0.bn2.{key}" for key in norm),
        "layer2.0.downsample.0.weight", *(f"layer2.0.downsample.1.{key}" for key in norm),
    ]  # fmt: skip
    assert keys[0] == "conv1.weight" and keys[-2:] == ["fc.weight", "fc.bias"]
    assert not any(key.startswith("layer1.0.downsample") for key in keys)
    nodes = [node.name for node in models.build("resnet50", batch=1).nodes]
    assert nodes[:4] == ["conv1", "bn1", "relu", "maxpool"] and nodes[-3:] == ["avgpool", "fc", "loss"]
    assert nodes[4:16] == [
        f"layer1.0.{n}" for n in (
            "conv1", "bn1", "relu", "conv2", "bn2", "relu_1", "conv3", "bn3", "downsample.0", "downsample.1", "add",
            "relu_2",
        )
    ]  # fmt: skip
    assert len(models.build("resnet50", batch=1).parameters) == 320

    def owners(name):
        return list(dict.fromkeys(p.name.rpartition(".")[0] for p in models.build(name, batch=1).parameters))

    linear = ["classifier.0", "classifier.3", "classifier.6"]
    vgg16 = [f"features.{i}" for i in (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)]
    assert owners("vgg16") == vgg16 + linear
    vgg11_bn = [f"features.{i}" for i in (0, 1, 4, 5, 8, 9, 11, 12, 15, 16, 18, 19, 22, 23, 25, 26)]
    assert owners("vgg11_bn") == vgg11_bn + linear
    convolutions = [f"features.{i}" for i in (0, 3, 6, 8, 10)]
    assert owners("alexnet") == [*convolutions, "classifier.1", "classifier.4", "classifier.6"]


def test_branching_nets_have_torchvision_s_names_in_its_order():
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")

    def basic(name):
        return [f"{name}.conv.weight", *(f"{name}.bn.{key}" for key in norm)]

    keys = [p.name for p in models.build("googlenet", batch=1).parameters]
    assert len(keys) == 344  # len(torchvision.models.googlenet(aux_logits=False).state_dict())
    branches = ("branch1", "branch2.0", "branch2.1", "branch3.0", "branch3.1", "branch4.1")
    first = [key for name in ("conv1", "conv2", "conv3") for key in basic(name)]
    assert keys[: len(first)] == first and keys[-2:] == ["fc.weight", "fc.bias"]
    for number in ("3a", "4e", "5b"):
        wanted = [key for branch in branches for key in basic(f"inception{number}.{branch}")]
        assert [key for key in keys if key.startswith(f"inception{number}.")] == wanted
    keys = [p.name for p in models.build("densenet121", batch=1).parameters]
    assert len(keys) == 727  # len(torchvision.models.densenet121().state_dict())
    assert keys[:6] == ["features.conv0.weight", *(f"features.norm0.{key}" for key in norm)]
    layer = "features.denseblock4.denselayer16"
    assert [key for key in keys if key.startswith(f"{layer}.")] == [
        *(f"{layer}.norm1.{key}" for key in norm), f"{layer}.conv1.weight",
        *(f"{layer}.norm2.{key}" for key in norm), f"{layer}.conv2.weight",
    ]  # fmt: skip
    assert [key for key in keys if key.startswith("features.transition3.")] == [
        *(f"features.transition3.norm.{key}" for key in norm), "features.transition3.conv.weight",
    ]  # fmt: skip
    assert keys[-7:] == [*(f"features.norm5.{key}" for key in norm), "classifier.weight", "classifier.bias"]


def test_inception_and_dense_blocks_have_the_published_widths():
    nodes = {node.name: node for node in models.build("googlenet", batch=1).nodes}
    maps = {"3a": (28, 256), "3b": (28, 480), "4a": (14, 512), "4d": (14, 528), "4e": (14, 832), "5b": (7, 1024)}
    for number, (extent, channels) in maps.items():  # the paper's table 1
        assert nodes[f"inception{number}.concat"].output.shape == (1, extent, extent, channels)
    assert nodes["inception3a.branch3.1.conv"].layer.kernel == (3, 3)  # as torchvision, where the paper says 5x5
    assert {n.layer.eps for n in nodes.values() if n.layer.kind == "batch_norm"} == {1e-3}
    assert nodes["dropout"].layer.p == 0.2
    nodes = {node.name: node for node in models.build("densenet121", batch=1).nodes}
    for block, (extent, channels) in enumerate([(56, 256), (28, 512), (14, 1024), (7, 1024)], 1):
        last = max((n for n in nodes if n.startswith(f"features.denseblock{block}.")), key=lambda n: nodes[n].index)
        assert nodes[last].output.shape == (1, extent, extent, channels)
    assert {n.layer.eps for n in nodes.values() if n.layer.kind == "batch_norm"} == {1e-5}


@pytest.mark.parametrize(("name", "size"), [("googlenet", 32), ("googlenet", 64), ("densenet121", 32)])
def test_branching_nets_take_small_images(name, size):
    g = models.build(name, batch=2, image_size=size, classes=10)
    g.check()
    assert g.logits.shape == (2, 10)


def test_a_resnet_of_2504_layers_builds_at_once_and_starts_as_the_identity():
    started = time.perf_counter()
    g = models.build("resnet", batch=16, blocks=(6, 32, 790, 6))
    assert time.perf_counter() - started < 5
    layers = [n for n in g.nodes if isinstance(n.layer, Conv2d | Linear) and "downsample" not in n.name]
    assert len(layers) == 2504
    last = [n.parameter("weight") for n in g.nodes if n.name.endswith(".bn3")]
    assert len(last) == 834 and {p.init for p in last} == {"zeros"}
    others = [n.parameter("weight") for n in g.nodes if n.layer.kind == "batch_norm" and not n.name.endswith(".bn3")]
    assert {p.init for p in others} == {"ones"}


def test_resnet_of_any_blocks_is_resnet50_at_its_blocks():
    ours, theirs = models.build("resnet", batch=2, blocks=(3, 4, 6, 3)), models.build("resnet50", batch=2)
    assert [(n.name, n.layer, n.parameters) for n in ours.nodes] == [
        (n.name, n.layer, n.parameters) for n in theirs.nodes
    ]
    assert all(n.parameter("weight").init == "ones" for n in theirs.nodes if n.layer.kind == "batch_norm")


def test_wrong_use_is_answered_in_words():
    with pytest.raises(UserError, match=r"unknown model 'resnet51'; did you mean .*resnet50"):
        models.build("resnet51", batch=1)
    with pytest.raises(UserError, match=r"resnet needs blocks=.*\(3, 4, 6, 3\)"):
        models.build("resnet", batch=1)
    with pytest.raises(UserError, match=r"resnet18 has a depth of its own; blocks=\(1,\)"):
        models.build("resnet18", batch=1, blocks=(1,))
    with pytest.raises(UserError, match=r"got \(3, 0\)"):
        models.build("resnet", batch=1, blocks=(3, 0))
    with pytest.raises(UserError, match="classes must be at least 2, not 1"):
        models.build("lenet", batch=1, classes=1)
    with pytest.raises(UserError, match="batch must be at least 1, not 0"):
        models.build("lenet", batch=0)
    assert {"lenet", "lenet5", "resnet", "vgg19_bn"} <= set(models.available())
