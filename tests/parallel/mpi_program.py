"""Run by test_mpi under a launcher: sums of any size (G5), then every strategy; rank 0 prints what it found as JSON."""

import json
import os
import signal
import sys

import numpy as np

import minidnn
from minidnn.parallel.agree import checksum
from minidnn.parallel.team import gather
from minidnn.schedule.ranks import STRATEGIES
from tests.parallel.test_collectives import SIZES, ring_all_reduce
from tests.step import nets


def trained(communicator, strategy):
    """Checksums of every rank's state after some steps, and rank 0's weights."""
    graph = nets.chain(7)
    step = minidnn.compile(graph, strategy=strategy, communicator=communicator, optimizer=nets.MOMENTUM, tail=2)
    for number in range(3):
        step.run(*nets.batch(graph, number))
    step.run(*nets.batch(graph, 99, 2))
    state = nets.state(step)
    return step.exchange(checksum(state)), state


def any_size(communicator):
    """Whether small integers of any size add up exactly round the ring and by the library, and a checksum of rounded ones."""
    exact, rounded = True, {}
    for size in SIZES:
        scratch = np.empty(-(-size // communicator.size), np.float32)
        expected = communicator.size * np.arange(size) + sum(range(communicator.size))
        for way in (
            lambda array, scratch=scratch: ring_all_reduce(communicator, array, scratch),
            communicator.all_reduce,
        ):
            whole = np.arange(size, dtype=np.float32) + communicator.rank
            way(whole)
            exact = exact and np.array_equal(whole, expected)
            other = np.random.default_rng(communicator.rank).standard_normal(size).astype(np.float32)
            way(other)
            rounded[f"{size} {len(rounded)}"] = other
    return exact, checksum(rounded)


def main():
    team = gather(os.environ, "ring", "emulated", timeout=20.0)
    with team:
        found = {}
        told = team.communicator.exchange(any_size(team.communicator))
        assert all(exact for exact, _ in told) and len(set(told)) == 1, told
        for strategy in (*STRATEGIES, "ring:nccl", "all_reduce:nccl", "ring_delayed:nccl"):
            sums, state = trained(team.communicator, strategy)
            found[strategy] = [sums, float(abs(state["conv.weight"]).sum())]
        if team.rank == 0:
            print("RESULT" + json.dumps(found), flush=True)
        if sys.argv[1:] == ["stop"] and team.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if sys.argv[1:]:
            trained(team.communicator, "ring")


if __name__ == "__main__":
    main()
