"""Run by test_mpi under mpiexec and torchrun: every strategy on this many ranks; rank 0 prints what it found as JSON."""

import json
import os
import signal
import sys

import minidnn
from minidnn.parallel.agree import checksum
from minidnn.parallel.team import gather
from minidnn.schedule.ranks import STRATEGIES
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


def main():
    team = gather(os.environ, "ring", "emulated", timeout=20.0)
    with team:
        found = {}
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
