"""Two and four processes under mpiexec and torchrun do what threads do; and none is left when one of them fails."""

import json

import pytest

from minidnn.parallel.agree import checksum
from minidnn.parallel.inprocess import run_ranks
from tests.parallel.launching import MISSING, NO_TORCH, REASON, ROOT, mpiexec, torchrun
from tests.parallel.mpi_program import trained

needs_mpi = pytest.mark.skipif(MISSING, reason=REASON)
needs_torch = pytest.mark.skipif(NO_TORCH, reason="needs PyTorch, which brings torchrun")
PROGRAM = ROOT / "tests" / "parallel" / "mpi_program.py"


def result(out):
    return json.loads(next(line for line in out.splitlines() if line.startswith("RESULT")).removeprefix("RESULT"))


@pytest.mark.parametrize(
    ("ranks", "launch"),
    [
        pytest.param(2, mpiexec, marks=needs_mpi),
        pytest.param(4, mpiexec, marks=needs_mpi),
        pytest.param(2, torchrun, marks=needs_torch),
    ],
)
def test_processes_end_with_the_same_bits_as_each_other_and_as_threads(ranks, launch):
    ended = launch(ranks, PROGRAM)
    assert ended.code == 0, ended.err
    for strategy, (sums, total) in result(ended.out).items():
        assert len(sums) == ranks and len(set(sums)) == 1, strategy
        expected = run_ranks(ranks, lambda c, s=strategy: trained(c, s))[0][1]
        if strategy.endswith(":nccl"):  # the order of a sum is the library's
            assert total == pytest.approx(float(abs(expected["conv.weight"]).sum()), rel=1e-6)
        else:
            assert sums[0] == checksum(expected), strategy


@needs_mpi
def test_a_silent_rank_ends_all_and_is_named_once():
    ended = mpiexec(3, PROGRAM, "stop")
    assert ended.code == 5
    assert ended.err.count("error: rank 1 was lost") == ended.err.count("error: ") == 1 and ended.seconds < 60
