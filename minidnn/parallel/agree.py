"""What all ranks must have in common, compared before the first step: a refusal is the same sentence on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minidnn.errors import UserError
from minidnn.parallel.communicator import Communicator


def compare(communicator: Communicator, facts: Mapping[str, Any]) -> None:
    """Raise UserError on every rank, with one sentence, unless all ranks bring the same facts. Collective."""
    difference = disagreement(communicator.exchange(dict(facts)))
    if difference is not None:
        raise UserError(difference)


def disagreement(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """Say in what a rank differs from rank 0; None if in nothing."""
    first = facts[0]
    for name, value in first.items():
        others = [(rank, other.get(name)) for rank, other in enumerate(facts) if other.get(name) != value]
        if others:
            rank, other = others[0]
            more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
            return (
                f"the ranks do not agree on the {name}: rank 0 has {value}, rank {rank} has {other}{more}; start all ranks "
                "with the same program, options and data"
            )
    return None


def digest(value: Any) -> str:
    """Twelve hexadecimal digits that name plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def checksum(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Twelve hexadecimal digits that name arrays, to the bit. Looks at one array at a time."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        found.update(f"{name}{array.dtype}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
        del array  # before the next one is read
    return found.hexdigest()[:12]
