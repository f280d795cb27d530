"""minidnn: a CNN training engine whose subject is where every byte lives and for how long."""

from minidnn.compile import compile
from minidnn.errors import DoesNotFit, UserError, VerificationError
from minidnn.layers import Graph
from minidnn.optim import SGD, Adam
from minidnn.schedule.plan import Decision, Plan, Reuse, keep, naive
from minidnn.schedule.recipe import Recipe
from minidnn.step import CompiledStep
from minidnn.step_result import StepResult

__version__ = "0.1.0"

__all__ = [
    "SGD", "Adam", "CompiledStep", "Decision", "DoesNotFit", "Graph", "Plan", "Recipe", "Reuse", "StepResult", "UserError",
    "VerificationError", "compile", "keep", "naive",
]  # fmt: skip
