"""Who takes part: the environments of the launchers, shares of a batch, what must agree, and who is lost."""

from itertools import pairwise

import numpy as np
import pytest

from minidnn import UserError
from minidnn.data import Augment, Batches
from minidnn.data.dataset import Dataset
from minidnn.parallel.agree import disagreement
from minidnn.parallel.communicator import PeerLost, Signs
from minidnn.parallel.launch import Place, place
from minidnn.parallel.team import gather
from minidnn.parallel.watchdog import Monitor, Verdict, Watchdog
from minidnn.schedule.flats import cuts, sources, target
from minidnn.schedule.ranks import Ranks, Strategy, share

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
SBATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "2(x2)"}
SLURM = SBATCH | {"SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Place()),
        (TORCHRUN, Place(5, 8, 1, 4, "torchrun", ("node0", 29500))),
        (OPEN_MPI, Place(1, 2, 1, 2, "Open MPI")),
        (MPICH, Place(2, 3, 2, 3, "MPICH")),
        (SLURM, Place(0, 4, 0, 2, "Slurm")),
        (SBATCH, Place()),  # the script itself, in which srun was not said
        (SLURM | OPEN_MPI, Place(1, 2, 1, 2, "Open MPI")),  # mpiexec inside an allocation
        (OPEN_MPI | {"PMI_RANK": "1", "PMI_SIZE": "2"}, Place(1, 2, 1, 2, "Open MPI")),
    ],
)
def test_each_launcher_is_read(environ, expected):
    assert place(environ) == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, "RANK=0 but no WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 but no RANK"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK=2 and OMPI_COMM_WORLD_SIZE=2"),
        ({**MPICH, "PMI_SIZE": "many"}, "PMI_SIZE='many' in the environment is no number"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"}, "no MASTER_ADDR and MASTER_PORT"),
        (TORCHRUN | OPEN_MPI, "torchrun says rank 5 of 8, Open MPI says rank 1 of 2: start with one launcher"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(environ, words):
    with pytest.raises(UserError, match=words):
        place(environ)


@pytest.mark.parametrize(
    ("environ", "strategy", "device", "words"),
    [
        (OPEN_MPI, None, "auto", "Open MPI started 2 processes, but there is no --strategy"),
        ({"RANK": "1"}, "ring", "auto", "RANK=1 but no WORLD_SIZE"),
    ],
)
def test_what_was_started_and_what_is_asked_for_must_go_together(environ, strategy, device, words):
    with pytest.raises(UserError, match=words):
        gather(environ, strategy, device)


def test_one_process_with_a_strategy_is_a_group_of_one():
    assert gather({}, None, "auto") is None
    team = gather({}, "ring", "auto")
    assert (team.rank, team.size, team.device, team.leave(130)) == (0, 1, "auto", 130)


@pytest.mark.parametrize("samples", (0, 1, 2, 7, 64))
@pytest.mark.parametrize("size", (1, 2, 3, 5))
def test_shares_cover_a_batch_once_and_differ_by_one(samples, size):
    parts = [share(samples, rank, size) for rank in range(size)]
    assert [i for part in parts for i in range(samples)[part]] == list(range(samples))
    counts = [part.stop - part.start for part in parts]
    assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


def test_a_rank_without_a_share_repeats_the_last_sample_with_weight_zero():
    ranks = Ranks(2, 3, Strategy("ring", "steps"), 6, 2)
    assert (ranks.taken(2), ranks.weight(2), ranks.local(2)) == (slice(1, 2), 0.0, 1)
    assert (ranks.taken(6), ranks.weight(6)) == (slice(4, 6), 1.0)


def test_the_shares_of_all_ranks_are_the_batches_of_one():
    pixels = np.random.default_rng(0).integers(0, 256, (21, 6, 6, 3), np.uint8)
    data = Dataset("made up", pixels, np.arange(21) % 4, 4, (0.5,) * 3, (0.2,) * 3)
    common = {"seed": 3, "augment": Augment(2, True)}
    whole = list(Batches(data, 4, **common).epoch(1))
    sharded = [Batches(data, 4, rank=rank, ranks=3, **common) for rank in range(3)]
    for number, parts in enumerate(zip(*(each.epoch(1) for each in sharded), strict=True)):
        counted = [each.counted(number) for each in sharded]
        assert sum(counted) == sharded[0].samples(number) == len(whole[number][1])
        for k, joined in enumerate(whole[number]):
            assert np.array_equal(np.concatenate([p[k][:n] for p, n in zip(parts, counted, strict=True)]), joined)
    assert number == 5 and counted == [1, 0, 0]


def test_cuts_cover_a_range_at_multiples_of_the_alignment():
    for units, parts in ((1, 3), (7, 3), (8, 4), (5, 5)):
        found = cuts(128, 128 + 64 * units, parts)
        assert found[0][0] == 128 and found[-1][1] == 128 + 64 * units
        assert all(a[1] == b[0] for a, b in pairwise(found))
        assert all(edge % 64 == 0 for part in found for edge in part)


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("name", ("tree", "master_slave"))
def test_every_gradient_reaches_the_root_once(name, size):
    ranks = [Ranks(r, size, Strategy(name, "steps"), 16) for r in range(size)]
    parents = {r: target(each) for r, each in enumerate(ranks)}
    children = {r: sources(each) for r, each in enumerate(ranks)}
    assert parents[0] is None
    assert sorted(c for found in children.values() for c in found) == list(range(1, size))
    assert all(parents[c] == r for r, found in children.items() for c in found)


def test_the_first_difference_is_named_with_both_values():
    facts = [{"seed": 1, "plan": "a"}, {"seed": 1, "plan": "b"}, {"seed": 1, "plan": "c"}]
    text = disagreement(facts)
    assert text.startswith("the ranks do not agree on the plan: rank 0 has a, rank 1 has b (and 1 more);")
    assert disagreement(facts[:1] * 3) is None


class Board:
    """Channels of some ranks, in memory."""

    def __init__(self, size):
        self.boxes = [[] for _ in range(size)]

    def channel(self, rank):
        board = self

        class Channel:
            def send(self, message, peer):
                board.boxes[peer].append((rank, message))

            def poll(self):
                found, board.boxes[rank] = board.boxes[rank], []
                return found

        return Channel()


def rounds(size, silent, failing, until=10.0, far=None):
    """Let monitors beat every half second; returns each rank's ending and when it came. ``far``: marks and step at a time."""
    board = Board(size)
    monitors = [Monitor(rank, size, limit=3.0, now=0.0, stall=6.0) for rank in range(size)]
    ends, now = {}, 0.0
    while now < until:
        for rank, monitor in enumerate(monitors):
            gone = rank in silent and now >= silent[rank]
            if rank not in ends and not gone:
                failure = failing.get(rank) if now >= 1 else None
                ending = monitor.step(board.channel(rank), now, failure, far=far(rank, now) if far else (0, 0))
                if ending is not None:
                    ends[rank] = (*ending, now)
        now += 0.5
    return ends


def test_a_rank_that_falls_silent_is_named_by_rank_0_and_all_others_end():
    ends = rounds(4, silent={2: 1.0}, failing={})
    assert sorted(ends) == [0, 1, 3]
    assert {end[0] for end in ends.values()} == {Verdict(5, "rank 2 was lost: no sign of life for 3 s")}
    assert [rank for rank, end in ends.items() if end[1]] == [0] and max(end[2] for end in ends.values()) <= 5


def test_the_first_failure_and_its_reason_reach_every_rank():
    ends = rounds(3, silent={}, failing={1: Verdict(2, "no such file"), 2: Verdict(5, "later")})
    assert {end[0] for end in ends.values()} == {Verdict(2, "no such file")} and sorted(ends) == [0, 1, 2]
    assert {end[0] for end in rounds(3, {}, {0: Verdict(130, "stop")}).values()} == {Verdict(130, "stop")}


def test_the_silence_of_rank_0_ends_the_others():
    ends = rounds(3, silent={0: 1.0}, failing={})
    assert sorted(ends) == [1, 2] and all(end[0].text.startswith("rank 0 was lost") for end in ends.values())


def test_ranks_that_wait_for_each_other_end_and_the_last_step_of_each_is_named():
    ends = rounds(3, silent={}, failing={}, until=20.0, far=lambda rank, now: (min(int(now), 4), 7 + (rank == 1)))
    text = "the ranks wait for each other: none got on for 6 s; rank 0 in step 7, rank 1 in step 8, rank 2 in step 7"
    assert {end[:2] for end in ends.values()} == {(Verdict(5, text), True), (Verdict(5, text), False)}
    assert all(10 < end[2] <= 11.5 for end in ends.values())


def test_nobody_ends_while_one_gets_on_or_before_the_first_step():
    assert rounds(3, {}, {}, until=30.0, far=lambda rank, now: (int(now) if rank == 2 else 1, 5)) == {}
    assert rounds(3, {}, {}, until=30.0, far=lambda rank, now: (3, 0)) == {}


def test_nobody_ends_while_all_are_alive_or_leave_in_order():
    assert rounds(3, silent={}, failing={}) == {}


def test_a_watchdog_ends_its_process_where_a_library_has_noticed_a_failure(capsys):
    def broken():
        raise PeerLost("NCCL reports on rank 0: a remote error")

    codes, signs = [], Signs()
    dog = Watchdog(Board(1).channel(0), 0, 1, timeout=1.0, end=codes.append, signs=signs)
    signs.checks.append(broken)
    dog._thread.join(5.0)
    assert codes == [5] and "error: NCCL reports on rank 0: a remote error\n" in capsys.readouterr().err


def test_a_watchdog_ends_its_process_with_the_verdict(capsys):
    codes = []
    dog = Watchdog(Board(1).channel(0), 0, 1, timeout=1.0, end=codes.append)
    dog.fail(2, "the disk is full")
    assert codes[0] == 2 and "error: the disk is full\n" in capsys.readouterr().err
    quiet = Watchdog(Board(1).channel(0), 0, 1, timeout=1.0, end=codes.append)
    quiet.stop()
    assert not quiet._thread.is_alive()
