"""Make the golden files with PyTorch, in float64: ``python -m tests.golden.make_with_torch`` from the root of the project.

One JSON file a net: loss, and fingerprints (norm, four projections) of every layer's output, every gradient and the
running statistics after the step. Weights and images are not stored: ``rule`` makes them again from the seed.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from tests.golden import rule, torch_nets

MARGIN = 5e-6
"""A seed is taken if no ReLU and no maximum is nearer to its kink: some ten times the rounding of float32."""


def measure(case: rule.Case, seed: int) -> tuple[float, dict[str, Any]]:
    """Run one training step. Return its margin, and what the file holds."""
    model = torch_nets.build(case)
    torch_nets.set_parameters(model, seed)
    outputs: dict[str, torch.Tensor] = {}
    torch_nets.record(model, outputs)
    margin = torch_nets.Margin(model)
    x, y = rule.batch(seed, case.image_size)
    loss = functional.cross_entropy(model(torch_nets.images(x, torch.float64)), torch.from_numpy(y))
    if margin.smallest < MARGIN:
        return margin.smallest, {}
    loss.backward()  # type: ignore[no-untyped-call]

    def fingerprints(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
        return {name: rule.fingerprint(name, tensor.numpy()) for name, tensor in tensors.items()}

    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    statistics = {name: s for name, s in model.named_buffers()}
    return margin.smallest, {
        "loss": loss.item(),
        "outputs": fingerprints(outputs),
        "gradients": fingerprints(gradients),
        "statistics": fingerprints(statistics),
    }


def write(case: rule.Case, first_seed: int, folder: Path) -> None:
    """Write the file of a net, with the first seed from ``first_seed`` on that keeps the margin."""
    seed, (margin, result) = first_seed, measure(case, first_seed)
    while not result:
        seed += 1
        margin, result = measure(case, seed)
    header = {
        "command": "python -m tests.golden.make_with_torch" + (f" --seed {first_seed}" if first_seed else ""),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__},
        "model": case.model,
        "image_size": case.image_size,
        "seed": seed,
        "margin": margin,
    }
    lines = json.dumps({**header, **result}, indent=1).replace("[\n   ", "[").replace(",\n   ", ", ").replace("\n  ]", "]")
    (folder / f"{case.model}.json").write_text(lines + "\n")
    print(f"{case.model}: seed {seed}, loss {result['loss']:.6f}, margin {margin:.1e}")


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
