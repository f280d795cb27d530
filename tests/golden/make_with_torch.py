"""Make the golden files with PyTorch, in float64: ``python -m tests.golden.make_with_torch`` from the root of the project.

One JSON file a net: loss, and fingerprints (norm, four projections) of every layer's output, every gradient and the
running statistics after the step. Weights and images are not stored: ``rule`` makes them again from the seed. How far
PyTorch's own float32 is from its float64 is stored, too: no float32 can be asked to be much nearer.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from tests.golden import rule, torch_nets

MARGIN = 5e-6
"""A seed is taken if no ReLU and no maximum is nearer to its kink: some ten times the rounding of float32."""

KINDS = ("outputs", "gradients", "statistics")


class Step(NamedTuple):
    """Fingerprints of one training step, and its margin. Beyond the outputs empty where the margin is too small."""

    loss: float
    margin: float
    fingerprints: dict[str, dict[str, list[float]]]


def run(case: rule.Case, seed: int, dtype: torch.dtype) -> Step:
    """One forward and, if the margin is kept, one backward pass."""
    model = torch_nets.build(case, dtype)
    torch_nets.set_parameters(model, seed)
    outputs: dict[str, torch.Tensor] = {}
    torch_nets.record(model, outputs)
    margin = torch_nets.Margin(model)
    x, y = rule.batch(seed, case.image_size)
    loss = functional.cross_entropy(model(torch_nets.images(x, dtype)), torch.from_numpy(y))
    if dtype is torch.float64 and margin.smallest < MARGIN:
        return Step(loss.item(), margin.smallest, {})
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    tensors = dict(zip(KINDS, (outputs, gradients, dict(model.named_buffers())), strict=True))
    prints = {k: {n: rule.fingerprint(n, t.numpy()) for n, t in group.items()} for k, group in tensors.items()}
    return Step(loss.item(), margin.smallest, prints)


def write(case: rule.Case, first_seed: int, folder: Path) -> None:
    """Write the file of a net, with the first seed from ``first_seed`` on that keeps the margin."""
    seed, step = first_seed, run(case, first_seed, torch.float64)
    while not step.fingerprints:
        seed += 1
        step = run(case, seed, torch.float64)
    single = run(case, seed, torch.float32).fingerprints
    errors = {
        kind: max(rule.difference(single[kind][name], expected) for name, expected in step.fingerprints[kind].items())
        for kind in KINDS
        if step.fingerprints[kind]
    }
    content: dict[str, Any] = {
        "command": "python -m tests.golden.make_with_torch" + (f" --seed {first_seed}" if first_seed else ""),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__},
        "model": case.model,
        "image_size": case.image_size,
        "seed": seed,
        "margin": step.margin,
        "float32_errors": errors,
        "loss": step.loss,
        **step.fingerprints,
    }
    text = json.dumps(content, indent=1).replace("[\n   ", "[").replace(",\n   ", ", ").replace("\n  ]", "]")
    (folder / f"{case.model}.json").write_text(text + "\n")
    print(f"{case.model}: seed {seed}, loss {step.loss:.6f}, margin {step.margin:.1e}, float32 errors {errors}")


def main() -> None:
    """Write the files of all nets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed to try")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder of the files")
    options = parser.parse_args()
    for case in rule.CASES:
        write(case, options.seed, options.output)


if __name__ == "__main__":
    main()
