"""Lesson 10: the ring. Every rank sends to the next, and after a while all have the sum.

Each rank has a gradient of its own, cut into as many chunks as there are ranks. In a ring step every rank sends one
chunk to the next rank and adds what comes in: after all but one such steps each rank has the whole sum of one chunk.
It updates the weights of that chunk alone, and in as many steps again the new weights travel on to all ranks.
Nobody is the master, nobody waits for one, and what a rank sends hardly grows with their number.
In the map the letter of a row says who touches a buffer: the strips of parameters and gradients live all the time.
"""

import sys
from collections.abc import Sequence

import numpy as np
from lesson import ask, chain, options, require, run, show

import minidnn
from minidnn.parallel.communicator import share
from minidnn.parallel.inprocess import InProcess, run_ranks


def sent_bytes(ranks: int) -> tuple[int, int]:
    """Bytes that each rank sends in one step of a net, and bytes of its parameters, padded to equal shards."""

    def work(communicator: InProcess) -> tuple[int, int]:
        step = minidnn.compile(chain(3), strategy="ring", communicator=communicator)
        step.run(np.ones((8, 16, 16, 16), np.float32), np.zeros(8, np.int64))
        step.executor.device.synchronize()
        return communicator.sent_bytes, step.program.persistent.lines[0].weights.buffer.nbytes

    return run_ranks(ranks, work)[0]


def reduce_scatter(communicator: InProcess) -> list[str]:
    """The chunks of one rank after each ring step: rank r begins with 10^r in every chunk."""
    rank, ranks = communicator.rank, communicator.size
    chunks, incoming, seen = np.full(ranks, 10**rank), np.zeros(1, np.int64), [str(np.full(ranks, 10**rank))]
    for step in range(ranks - 1):
        communicator.post(chunks[share(ranks, (rank - step - 1) % ranks, ranks)], (rank + 1) % ranks)
        communicator.recv(incoming, (rank - 1) % ranks)
        chunks[(rank - step - 2) % ranks] += incoming[0]
        seen.append(str(chunks))
    return seen


def main(argv: Sequence[str] | None = None) -> int:
    """Show the chunks of all ranks step by step, a step of a net, and the bytes sent."""
    args = options(argv, __doc__, ranks=4)
    require(2 <= args.ranks <= 8, f"--ranks {args.ranks}: choose 2 to 8")
    for step, lines in enumerate(zip(*run_ranks(args.ranks, reduce_scatter), strict=True)):
        print(f"after {step} ring steps", *(f"   rank {rank}: {line}" for rank, line in enumerate(lines)), sep="\n")
    show(minidnn.compile(chain(3), strategy="ring", communicator=InProcess.group(2)[0], device=None).program["train"])
    sent, parameters = sent_bytes(args.ranks)
    print(f"\n{args.ranks} ranks: each sends {sent} bytes a step; its parameters take {parameters} bytes, padded")
    return ask(args.answer, "with --ranks 8, how many times the bytes of its padded parameters does a rank send in a step?",
        right=2 * (8 - 1) / 8, why="2 (N - 1) chunks of an Nth each: always less than twice, however many ranks.",
        hint="Divide the two numbers of the last line, with --ranks 8.")  # fmt: skip


if __name__ == "__main__":
    sys.exit(run(main))
