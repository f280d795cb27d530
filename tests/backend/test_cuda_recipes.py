"""Recipes of a CUDA device: which problems the libraries are asked for, and what their answers mean for the rows."""

import numpy as np

import minidnn
from minidnn import cuda_recipes
from minidnn.kernels.problem import Product, linear_product, own
from minidnn.precision import precision
from minidnn.schedule.recipe import Engine
from tests.backend.cuda_nets import net


class Chooser:
    """As much of a CUDA device as makes recipes, whose every engine wants a kilobyte of its own."""

    def __init__(self):
        self.asked = []

    def select_engine(self, problem, limit):
        if limit == 0:
            return own(problem)
        self.asked.append(problem)
        return Engine("cudnn", 1024 * len(self.asked), (("engine", 7),))

    def tune_engine(self, problem, limit, room=None):
        return self.select_engine(problem, limit)


def test_the_workspace_of_a_product_is_in_the_recipe_and_in_the_rows():
    chooser = Chooser()
    recipe = cuda_recipes.cuda_recipe(net(), precision("fp32"), None, True, device=chooser)
    products = [p for p in chooser.asked if isinstance(p, Product)]
    assert [(p.rows, p.columns, p.depth) for p in products] == [(4, 5, 8), (5, 8, 4), (4, 8, 5)]
    step = minidnn.compile(net(), device=None, recipe=recipe)
    rows = {row.kernel: row for row in step.program["train"].rows}
    for direction in ("forward", "backward_data", "backward_weight"):
        row, engine = rows[f"linear_{direction}"], recipe.engine("linear1", direction)
        assert row.workspace is not None and row.workspace.spec.nbytes == engine.workspace_bytes
        assert row.attrs["engine"] == 7


def test_a_product_is_described_as_the_kernels_define_it():
    rng = np.random.default_rng(0)
    n, c, k = 3, 5, 2
    x, dy, weight = (rng.standard_normal(shape) for shape in ((n, c), (n, k), (k, c)))
    operands = {
        "forward": (x, weight, x @ weight.T),
        "backward_data": (dy, weight, dy @ weight),
        "backward_weight": (dy, x, dy.T @ x),
    }
    for direction, (a, b, result) in operands.items():
        p = linear_product(direction, n, c, k, "float64")
        at = np.lib.stride_tricks.as_strided
        left = at(a, (p.rows, p.depth), (8 * p.a_row, 8 * p.a_depth))
        right = at(b, (p.depth, p.columns), (8 * p.b_depth, 8 * p.b_column))
        np.testing.assert_allclose(left @ right, result)


def test_a_refusal_does_not_ask_cudnn_which_engines_have_no_workspace():
    chooser = Chooser()
    chooser.name, chooser.available_bytes = "cuda:0", 1 << 30
    request = minidnn.compile.__globals__["prepare"](net(), device=chooser)
    asked = len(chooser.asked)
    lean = request.with_least_workspace()
    assert len(chooser.asked) == asked
    assert {engine.workspace_bytes for engine in lean.recipe.engines.values()} == {0}
    assert lean.recipe.engines.keys() == request.recipe.engines.keys()
