"""The cases of ``cases`` as our CUDA sources meet them: with 16-bit operands, and with what no shape of ``Maker`` reaches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.backend.cases import Case, Maker

EXTRA = {"concat_forward-packs", "concat_backward-packs", "update_all-adam"}  # what the shapes of Maker do not reach


class HalfMaker(Maker):
    """The same cases on values that float16 holds, so that one definition is that of both types."""

    def normal(self, *shape: int, mean: float = 0.0) -> Any:
        return super().normal(*shape, mean=mean).astype(np.float16).astype(np.float32)

    def positive(self, *shape: int) -> Any:
        return super().positive(*shape).astype(np.float16).astype(np.float32)


def made(maker: Maker) -> dict[str, Case]:
    return {case.id: case for case in [*maker.all(), *extra(maker)]}


def extra(maker: Maker) -> list[Case]:
    n, h, w, c = maker.shape
    parts = (maker.normal(n, h, w, c), maker.normal(n, h, w, 16))
    whole = np.concatenate(parts, axis=3)
    (adam,) = (case for case in maker.update() if case.kernel == "adam_update")
    cut = np.array_split(np.arange(adam.outputs[0].size), 3)

    def slices(arrays: Any) -> tuple[Any, ...]:
        return tuple(np.ascontiguousarray(array[place]) for array in arrays for place in cut)

    return [
        Case("concat_forward", (whole,), parts, {}, lambda: (whole,), tag="packs"),
        Case("concat_backward", (parts[1],), (whole,), {"offset": c}, lambda: (parts[1],), tag="packs"),
        Case("update_all", slices(adam.outputs), (*slices(adam.inputs[:1]), adam.inputs[1]),
             {"kernel": "adam_update", "count": 3, "narrow": False, "settings": adam.attrs},
             lambda: slices(adam.expected()), updates=True, tag="adam"),
    ]  # fmt: skip


def halved(case: Case) -> Case | None:
    """The case with its operands of the element type in float16; None where it has none."""
    kernel, outputs, inputs = case.kernel, [False] * len(case.outputs), [False] * len(case.inputs)
    if kernel.startswith(("channel_sum", "relu_bias", "subsample", "linear")):
        outputs, inputs = [True] * len(outputs), [True] * len(inputs)
    elif kernel in ("check_finite", "clip_scale", "sgd_update", "sgd_momentum_update", "adam_update", "update_all"):
        inputs = [array.shape != (8,) for array in case.inputs]
        outputs = [case.tag == "rounded" and i >= 3 for i in range(len(outputs))]
    elif kernel.startswith("softmax"):
        outputs, inputs = ([True], [False] * 3) if kernel.endswith("backward") else ([False, False], [True, False])
    else:
        outputs, inputs = ([array.ndim in (2, 4) for array in part] for part in (case.outputs, case.inputs))
    if not any(outputs + inputs):
        return None

    def narrow(arrays: Any, which: list[bool]) -> tuple[Any, ...]:
        pairs = zip(arrays, which, strict=True)
        return tuple(a.astype(np.float16) if half and a.dtype == np.float32 else a for a, half in pairs)

    return replace(case, outputs=narrow(case.outputs, outputs), inputs=narrow(case.inputs, inputs))
