"""cuDNN on a fake frontend: how problems are said to it, which engine is chosen, and what is refused."""

import sys

import pytest

from minidnn.errors import UserError
from minidnn.kernels import cudnn
from minidnn.kernels.cudnn_graphs import OperationGraphs
from minidnn.kernels.problem import BIAS, FILTER, IMAGE, LEFT, OUTPUT, OWN, PRODUCT, RIGHT, Convolution, Product
from minidnn.schedule.recipe import Engine, Recipe

X, Y, WEIGHT = (2, 9, 8, 4), (2, 5, 8, 6), (6, 3, 5, 4)
PROBLEM = Convolution("forward", (2, 8, 8, 4), (2, 8, 8, 8), (8, 3, 3, 4), (1, 1), (1, 1), (1, 1), "float32")


# -- graphs -----------------------------------------------------------------------------------------------------------
class Tensor:
    """An operand or a result, as the frontend is told of it."""

    def __init__(self, **told):
        self.told = told

    def set_output(self, output):
        assert output
        return self

    def __getattr__(self, name):
        return lambda value: self.told.update({name.removeprefix("set_"): value})


class Recorder:
    """A frontend, and a graph of its: notes the operations that are asked for, with what they read."""

    class data_type:
        FLOAT, HALF, BFLOAT16 = "FLOAT", "HALF", "BFLOAT16"

    def __init__(self):
        self.calls, self.results, self.types = [], [], {}

    def pygraph(self, **types):
        self.types = types
        return self

    def tensor(self, **told):
        return Tensor(**told)

    def __getattr__(self, name):
        def operation(**read):
            self.calls.append((name, {k: v.told.get("uid") if isinstance(v, Tensor) else v for k, v in read.items()}))
            self.results.append((Tensor(), [v for v in read.values() if isinstance(v, Tensor)]))
            return self.results[-1][0]

        return operation


def said(problem):
    frontend = Recorder()
    assert OperationGraphs(frontend).build(problem, 7) is frontend
    *operations, validate, finish = frontend.calls
    assert [validate[0], finish[0]] == ["validate", "build_operation_graph"] and frontend.types["handle"] == 7
    result = frontend.results[-3][0].told
    operands = [t.told for _, read in frontend.results for t in read if "uid" in t.told and t.told is not result]
    return operations, {told.pop("uid"): told for told in operands}, result, frontend.types


WINDOW = {"padding": [1, 2], "stride": [2, 1], "dilation": [1, 1]}
NHWC = {
    IMAGE: {"dim": [2, 4, 9, 8], "stride": [288, 1, 32, 4], "data_type": "HALF"},
    FILTER: {"dim": [6, 4, 3, 5], "stride": [60, 1, 20, 4], "data_type": "HALF"},
    OUTPUT: {"dim": [2, 6, 5, 8], "stride": [240, 1, 48, 6], "data_type": "HALF"},
}


@pytest.mark.parametrize(
    ("direction", "operation", "read", "result"),
    [
        ("forward", "conv_fprop", {"image": IMAGE, "weight": FILTER}, OUTPUT),
        ("backward_data", "conv_dgrad", {"loss": OUTPUT, "filter": FILTER}, IMAGE),
        ("backward_weight", "conv_wgrad", {"image": IMAGE, "loss": OUTPUT}, FILTER),
    ],
)
def test_a_convolution_is_said_by_operand_numbers_in_our_layout(direction, operation, read, result):
    problem = Convolution(direction, X, Y, WEIGHT, (2, 1), (1, 2), (1, 1), "float16")
    operations, operands, made, types = said(problem)
    assert operations == [(operation, {**read, **WINDOW})]
    assert operands == {number: NHWC[number] for number in read.values()}
    assert made == {**NHWC[result], "uid": result}
    assert types["io_data_type"] == "HALF"
    assert types["intermediate_data_type"] == types["compute_data_type"] == "FLOAT"


def test_bias_and_relu_follow_the_convolution_in_one_graph():
    problem = Convolution("forward_relu", X, Y, WEIGHT, (2, 1), (1, 2), (1, 1), "float16")
    operations, operands, made, _ = said(problem)
    assert operations == [
        ("conv_fprop", {"image": IMAGE, "weight": FILTER, **WINDOW}),
        ("bias", {"input": None, "bias": BIAS}),  # what no operand holds has no number
        ("relu", {"input": None}),
    ]
    assert operands[BIAS] == {"dim": [1, 6, 1, 1], "stride": [6, 1, 6, 6], "data_type": "HALF"}
    assert made == {**NHWC[OUTPUT], "uid": OUTPUT}


def test_a_product_is_said_with_the_strides_of_its_operands():
    operations, operands, made, _ = said(Product(3, 2, 5, 1, 3, 1, 5, "bfloat16"))
    assert operations == [("matmul", {"A": LEFT, "B": RIGHT})]
    assert operands[LEFT] == {"dim": [1, 3, 5], "stride": [15, 1, 3], "data_type": "BFLOAT16"}
    assert operands[RIGHT] == {"dim": [1, 5, 2], "stride": [10, 1, 5], "data_type": "BFLOAT16"}
    assert made == {"uid": PRODUCT, "dim": [1, 3, 2], "stride": [6, 2, 1], "data_type": "BFLOAT16"}


# -- engines ----------------------------------------------------------------------------------------------------------
class FakeGraph:
    """Plans of a fake cuDNN: (engine, knobs, workspace, builds, builds again)."""

    def __init__(self, plans):
        self.plans, self.built = plans, None

    def create_execution_plans(self, modes):
        self.limit = None

    def deselect_numeric_notes(self, notes):
        self.barred = notes

    def deselect_workspace_greater_than(self, limit):
        self.limit = limit

    def get_execution_plan_count(self):
        return len(self.plans)

    def create_execution_plan(self, engine, knobs):
        self.plans = [
            p for p in self.plans if p[0] == engine and p[4] and {k.name: v for k, v in knobs.items()} == p[1]
        ]
        self.limit = None
        if not self.plans:
            raise RuntimeError("no such engine\nin detail")

    def build_plan_at_index(self, index):
        plan = self.plans[index]
        if not plan[3] or (self.limit is not None and plan[2] > self.limit):
            raise RuntimeError("deselected")

    def get_engine_and_knobs_at_index(self, index):
        return self.plans[index][0], {FakeKnob(name): value for name, value in self.plans[index][1].items()}

    def get_workspace_size_plan_at_index(self, index):
        return self.plans[index][2]


class FakeKnob:
    def __init__(self, name):
        self.name = name


class Knobs:
    def __getattr__(self, name):
        return FakeKnob(name)


PLANS = [
    (11, {"TILE_SIZE": 1}, 0, False, True),  # barred by its notes
    (12, {"NOT_SET": 5}, 0, True, False),  # a knob this frontend cannot name
    (13, {"TILE_SIZE": 2}, 4096, True, False),  # cannot be built again
    (14, {"SPLIT_K_SLC": 4, "STAGES": 2}, 2048, True, True),
    (15, {}, 0, True, True),
]


def fake_cudnn(monkeypatch, **kwargs):
    note = type(
        "Notes",
        (),
        {n: n for n in ("DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "TENSOR_CORE", "NONDETERMINISTIC")},
    )
    module = type(sys)("cudnn")
    module.numerical_note, module.knob_type, module.create_handle = note, Knobs(), lambda: 1
    module.set_stream, module.backend_version = lambda handle, stream: None, lambda: 91900
    module.data_type = type("Types", (), {"FLOAT": 0, "HALF": 1, "BFLOAT16": 2})
    module.heur_mode = type("Modes", (), {"A": 0, "B": 1, "FALLBACK": 2})
    module.cudnnGraphNotSupportedError = KeyError
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(OperationGraphs, "build", lambda self, problem, handle: FakeGraph(list(PLANS)))
    return cudnn.Cudnn(0, "fp32", True, **kwargs)


def test_the_first_engine_that_builds_twice_is_chosen_and_survives_the_recipe_file(monkeypatch):
    engine = fake_cudnn(monkeypatch).select(PROBLEM, None)
    assert engine == Engine("cudnn", 2048, (("engine", 14), ("knob_SPLIT_K_SLC", 4), ("knob_STAGES", 2)))
    recipe = Recipe(engines={"conv:forward": engine}, backend="cuda")
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_a_workspace_limit_skips_the_engines_above_it(monkeypatch):
    assert fake_cudnn(monkeypatch).select(PROBLEM, 2047) == Engine("cudnn", 0, (("engine", 15),))


def test_where_cudnn_refuses_our_own_kernel_is_the_engine(monkeypatch):
    assert fake_cudnn(monkeypatch, refuse=frozenset({"convolution"})).select(PROBLEM, None) == OWN


def test_an_engine_of_another_library_is_refused_with_the_remedy(monkeypatch):
    with pytest.raises(UserError, match="no such engine; the recipe was made elsewhere"):
        fake_cudnn(monkeypatch).plan(PROBLEM, {"engine": 99})
