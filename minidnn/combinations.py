"""What of a request has no meaning, or does not go together: each rule refuses in one sentence, with the value and the remedy.

Nothing is opened, measured or allocated here. What a plan cannot be combined with is said where the plan is laid out
(``schedule.persistent``, ``schedule.program``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from minidnn.device.base import Device
from minidnn.device.emulated import EmulatedDevice
from minidnn.errors import UserError
from minidnn.fuse import check_fusions
from minidnn.schedule.ranks import Strategy
from minidnn.schedule.recipe import Recipe


def check_values(
    batch: int, tail: int | None, accumulate: int, allocator: str, capture: str, clip_grad_norm: float | None
) -> None:
    """Each value for itself."""
    if allocator not in ("slab", "pool"):
        raise UserError(f"allocator={allocator!r} is unknown; choose slab or pool")
    if accumulate < 1:
        raise UserError(f"accumulate={accumulate} must be at least 1")
    if clip_grad_norm is not None and not 0 < clip_grad_norm < math.inf:
        raise UserError(
            f"clip_grad_norm={clip_grad_norm!r} is no finite norm above 0; 1.0 is usual, None does not clip"
        )
    if tail is not None and not 1 <= tail < batch:
        raise UserError(f"tail={tail} must be at least 1 and below the batch, {batch}")
    if capture not in ("auto", "on", "off"):
        raise UserError(f"capture={capture!r} is unknown; choose auto, on or off")


def check_recipe(recipe: Recipe, precision: str, fusions: Sequence[str] | None) -> None:
    """A recipe that is replayed decides about precision and fusions: what is asked for besides must be the same."""
    if recipe.precision != precision:
        raise UserError(
            f"the recipe was made for precision {recipe.precision}, not {precision}; pass precision={recipe.precision!r}"
        )
    if fusions is not None and check_fusions(fusions) != recipe.fusions:
        raise UserError(f"the recipe has the fusions {recipe.fusions}, not {tuple(fusions)}; leave fusions out")


def check_strategy(strategy: Strategy, accumulate: int, allocator: str, clip_grad_norm: float | None) -> None:
    """What data parallelism excludes."""
    if strategy.delayed and accumulate > 1:
        raise UserError(
            f"accumulate={accumulate} cannot be combined with ring_delayed, whose second gradient buffer is on its way while "
            "the first is written; use strategy ring, or accumulate=1"
        )
    if clip_grad_norm is not None:
        raise UserError(
            f"clip_grad_norm={clip_grad_norm:g} cannot be combined with the strategy {strategy.name}: the norm is over the whole "
            "gradient, of which a rank sees the sums of its shard alone; leave it out, or train on one rank"
        )
    if allocator == "pool":
        raise UserError(
            f"allocator='pool' runs all rows on one stream, and the strategy {strategy.name} needs two; use slab"
        )


def check_capture(capture: str, allocator: str, device: str | Device | None, opened: Device | None) -> None:
    """CUDA graphs, where they are insisted on, need a GPU and addresses that stay."""
    if capture != "on":
        return
    if not hasattr(opened, "capture"):
        raise UserError(f"capture='on' cannot be combined with device={device!r}; leave capture out")
    if allocator == "pool":
        raise UserError("capture='on' needs addresses that stay, which allocator='pool' has not; leave one of them out")


def check_device(
    device: str | Device | None, opened: Device | None, process_memory: int | str | None, recipe: Recipe | None
) -> None:
    """What is only to be had on a GPU. ``device``: as it was asked for."""
    if process_memory is not None and not hasattr(opened, "free_bytes"):
        raise UserError(
            f"process_memory={process_memory!r} bounds what the driver of a GPU counts for the process; device={device!r} "
            "has nothing outside its slab to be measured: use memory=, or device='cuda:0'"
        )
    if recipe is not None and recipe.backend == "cuda" and isinstance(opened, EmulatedDevice):
        raise UserError(
            "the recipe names cuDNN's engines, which the emulated device has not; use device='cuda:0', device=None to plan, "
            "or leave recipe out"
        )
