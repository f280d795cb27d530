"""train.py with the small net of the tests of the command line. ``--harm RANK,STEP,SIGNAL`` first: what befalls a rank."""

import os
import sys

import models
import train
from minidnn.commandline import run
from minidnn.parallel.state import ParallelState
from minidnn.parallel.step import ParallelStep
from tests.cli.running import tiny


def befall(signal):
    """What happens to this rank."""
    if not signal:
        raise MemoryError("no bytes left")
    os.kill(os.getpid(), signal)


def harm(rank, number, signal):
    """Let a signal come to a rank when it begins a step, -1: its set-up; signal 0: an error in it."""
    if number < 0:
        begun = ParallelState.initialise

        def broken(state, seed):
            befall(signal) if state._communicator.rank == rank else begun(state, seed)

        ParallelState.initialise = broken
    whole = ParallelStep.run

    def harmed(step, *args, **options):
        if (step.rank, step.steps) == (rank, number):
            befall(signal)
        return whole(step, *args, **options)

    ParallelStep.run = harmed


if __name__ == "__main__":
    argv = sys.argv[1:]
    if argv[0] == "--harm":
        harm(*map(int, argv[1].split(",")))
        argv = argv[2:]
    models.MODELS["tiny"] = models.Model(tiny, 8)
    sys.exit(run(train.main, argv))
