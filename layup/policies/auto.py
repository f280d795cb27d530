"""auto: the fastest plan under a byte budget, of a chain of candidates from ``keep`` down to the fewest bytes.

What others do: solvers for chains (Rotor, POFO) are optimal where the net is a chain; SuperNeurons, Capuchin and PoocH rank
tensors by cost. What we do: candidates are ranked by recompute-seconds per byte against the free link window: what is dearest
to recompute goes to the host as long as the copies hide, the rest is recomputed, the cheapest bytes first, and what is
nearest to the end of forward is kept longest; checkpoints cut long recomputations where the fewest bytes cross. Single
decisions are then changed as long as that pays. The chain looks at no budget. The plans of the other policies are candidates,
too, so that none of them is ever faster or smaller.

Left out: changing the order of layers, splitting layers, per-byte optimality: it is a search, compared with brute force in
small nets.

Source: Beaumont et al. 2021 (NeurIPS), "Efficient combination of rematerialization and offloading for training DNNs" for the
combination; ``layup.chain`` for the search.
"""

from __future__ import annotations

from layup.chain import chain
from layup.context import Context
from minidnn.schedule.plan import Plan

KNOB = True


def plans(context: Context) -> list[Plan]:
    """The plans of the chain, without those of other policies."""
    return [link.plan() for link in chain(context)]
