"""A backend has exactly the kernels of the protocol."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from minidnn.kernels.base import Kernels


def signature(function: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters if p.name != "self"]


def test_backend_has_exactly_the_functions_of_the_protocol(kernels: ModuleType) -> None:
    wanted = {name: signature(f) for name, f in vars(Kernels).items() if inspect.isfunction(f) and name[0] != "_"}
    assert len(wanted) > 30
    assert set(kernels.__all__) == {*wanted, "select_engine"}
    for name, parameters in wanted.items():
        assert signature(getattr(kernels, name)) == parameters, name
