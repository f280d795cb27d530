"""Recipe: every choice that can change a bit. Fixed before planning, without looking at the budget."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minidnn.errors import UserError


class Engine(NamedTuple):
    """How one convolution direction of one layer is computed, and the workspace that takes."""

    name: str
    workspace_bytes: int
    options: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Recipe:
    """All bit-changing choices of a run: equal recipes on one device give equal bits under any plan.

    ``engines`` maps ``"<layer>:<direction>"`` to its engine. ``accumulating`` lists kernels that add into an existing weight
    gradient by themselves; for the others lowering emits a temporary and an ADD row. ``fusions``: chains of layers that are
    computed as one, see ``minidnn.fuse``.
    """

    precision: str = "fp32"
    backend: str = "numpy"
    engines: Mapping[str, Engine] = field(default_factory=dict)
    accumulating: tuple[str, ...] = ()
    workspace_limit: int | None = None
    deterministic: bool = True
    fusions: tuple[str, ...] = ()

    def engine(self, layer: str, direction: str) -> Engine:
        """The engine of a direction of a layer; layers without a choice have the empty engine."""
        return self.engines.get(f"{layer}:{direction}", Engine("", 0))

    def to_json(self) -> dict[str, Any]:
        """Plain data, in a fixed order."""
        return {
            "precision": self.precision,
            "backend": self.backend,
            "workspace_limit": self.workspace_limit,
            "deterministic": self.deterministic,
            "fusions": list(self.fusions),
            "accumulating": sorted(self.accumulating),
            "engines": {k: [e.name, e.workspace_bytes, dict(e.options)] for k, e in sorted(self.engines.items())},
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Recipe:
        """Read what ``to_json`` wrote. Raises UserError naming the first bad field."""
        try:
            engines = {
                key: Engine(str(name), int(nbytes), tuple(sorted((str(k), int(v)) for k, v in options.items())))
                for key, (name, nbytes, options) in data["engines"].items()
            }
            limit = data["workspace_limit"]
            return Recipe(
                precision=str(data["precision"]),
                backend=str(data["backend"]),
                engines=engines,
                accumulating=tuple(data["accumulating"]),
                workspace_limit=None if limit is None else int(limit),
                deterministic=bool(data["deterministic"]),
                fusions=tuple(map(str, data.get("fusions", ()))),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"not a recipe: {type(error).__name__} at {error}; write one with a training run") from None

    @property
    def hash(self) -> str:
        """Sixteen hexadecimal digits that name this recipe."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
