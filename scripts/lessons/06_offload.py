"""Lesson 6: offload, and a race. Send away what waits, and get it back in time.

A tensor that waits long can spend that time in host memory: its line breaks off after a v and goes on after a ^, and
the second map shows where it went. Copies run on streams of their own, beside the computation.
So a FREE row promises nothing: the copy may still read the bytes that a new owner writes. Safe are the *waits*:
the new owner waits for the copy. They are derived from who touches which bytes, and when.
Take one away with --wait N: verify names the race, and the emulated device tries orders the other waits allow.
"""

import sys
from collections.abc import Sequence

import numpy as np
from lesson import State, ask, batch, chain, differing, options, require, run, show, tampered, without

import minidnn
from minidnn import Decision, Plan
from minidnn.device.emulated import EmulatedDevice
from minidnn.schedule.instruction import Wait
from minidnn.schedule.verify import verify
from minidnn.schedule.verify_order import name_of

PLAN = Plan({"conv1": Decision.OFFLOAD, "conv2": Decision.OFFLOAD})


def two_steps(seed: int, at: int = 0, lost: Wait | None = None) -> State:
    """Weights and losses after two steps, in the order that belongs to a seed; row ``at`` may have lost a wait."""
    step = minidnn.compile(chain(4), PLAN, device=EmulatedDevice(seed=seed))
    if lost is not None:
        tampered(step, without(step.program["train"].rows, at, lost))
    with np.errstate(all="ignore"):  # fresh memory is NaN
        results = [step.run(*batch(step.graph)) for _ in range(2)]
        return {**step.state_dict(), "loss": np.array([r.loss for r in results])}


def main(argv: Sequence[str] | None = None) -> int:
    """Show both maps and the waits; run without one of them until the bits differ."""
    args = options(argv, __doc__, wait=3)
    schedule = minidnn.compile(chain(4), PLAN, device=None).program["train"]
    show(schedule, host=True)
    rows = schedule.rows
    waits = [(at, wait) for at, row in enumerate(rows) for wait in row.waits]
    for n, (at, wait) in enumerate(waits):
        print(f"wait {n}: {name_of(rows, at)} waits for {name_of(rows, wait.row)}{' of the last step' * wait.lag}")
    require(0 <= args.wait < len(waits), f"--wait {args.wait} is none of the waits; choose 0 to {len(waits) - 1}")
    protests = [verify(without(rows, *each), schedule.offsets, previous=without(rows, *each)) for each in waits]
    print(f"\nwithout wait {args.wait} of {len(waits)}: {'; '.join(protests[args.wait][:1])}")
    spoilt = ((seed, differing(two_steps(0), two_steps(seed, *waits[args.wait]))) for seed in range(20))
    print(next((f"order {seed} spoils {names}" for seed, names in spoilt if names), "20 orders went well, by luck"))
    return ask(
        args.answer,
        "try other numbers with --wait. How many of the waits can be left out without verify's naming a race?",
        right=protests.count([]),
        why="Every wait orders two rows that touch the same bytes, and no other wait orders them.",
        hint="For each number, see whether verify has something to say.",
    )


if __name__ == "__main__":
    sys.exit(run(main))
