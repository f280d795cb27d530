"""The communicator's promises, on threads: any size, the same bits everywhere, and no rank waits for ever."""

import threading
import time

import numpy as np
import pytest

from minidnn.parallel.communicator import PeerLost, share
from minidnn.parallel.inprocess import InProcess, run_ranks

SIZES = (0, 1, 2, 3, 5, 7, 1023, 1024, 1025)


def ring_all_reduce(communicator, array, incoming):
    """Sum an array of any size over all ranks by 2 (ranks - 1) ring steps. Bit-identical on all ranks: the order is fixed.

    ``incoming`` is scratch for the largest part, at least ``ceil(size / ranks)`` elements. Sizes are not compared here.
    """
    rank, size = communicator.rank, communicator.size
    flat = array.reshape(-1)
    parts = [flat[share(flat.size, k, size)] for k in range(size)]
    for step in range(size - 1):
        communicator.post(parts[(rank - step - 1) % size], (rank + 1) % size)
        total = parts[(rank - step - 2) % size]
        communicator.recv(incoming[: total.size], (rank - 1) % size)
        total += incoming[: total.size]
    for step in range(size - 1):
        communicator.post(parts[(rank - step) % size], (rank + 1) % size)
        communicator.recv(parts[(rank - step - 1) % size], (rank - 1) % size)


@pytest.mark.parametrize("ranks", (1, 2, 3, 4, 5))
def test_the_ring_sums_any_size_exactly_and_alike(ranks):
    def work(communicator):
        results = []
        for size in SIZES:
            whole = np.arange(size, dtype=np.float32) + communicator.rank
            ring_all_reduce(communicator, whole, np.empty(-(-size // ranks), np.float32))
            rounded = np.random.default_rng(communicator.rank).standard_normal(size).astype(np.float32)
            ring_all_reduce(communicator, rounded, np.empty(-(-size // ranks), np.float32))
            collective = np.arange(size, dtype=np.float32) + communicator.rank
            communicator.all_reduce(collective)
            results.append((whole, rounded, collective))
        return results

    ranks_results = run_ranks(ranks, work)
    for number, size in enumerate(SIZES):
        expected = ranks * np.arange(size, dtype=np.float32) + sum(range(ranks))
        for results in ranks_results:
            whole, rounded, collective = results[number]
            assert np.array_equal(whole, expected) and np.array_equal(collective, expected)
            assert rounded.tobytes() == ranks_results[0][number][1].tobytes()


@pytest.mark.parametrize("ranks", (1, 2, 3))
def test_scatter_gather_broadcast_and_exchange(ranks):
    def work(communicator):
        rank, line = communicator.rank, np.arange(2 * ranks, dtype=np.float64) * (communicator.rank + 1)
        communicator.reduce_scatter(line)
        own = line[2 * rank : 2 * rank + 2].copy()
        communicator.all_gather(line)
        root = np.full(3, rank)
        communicator.broadcast(root, ranks - 1)
        return own, line, root, communicator.exchange({"rank": rank})

    factor = sum(range(1, ranks + 1))
    for rank, (own, line, root, everybody) in enumerate(run_ranks(ranks, work)):
        assert np.array_equal(own, factor * np.arange(2 * rank, 2 * rank + 2))
        assert np.array_equal(line, factor * np.arange(2 * ranks)) and np.array_equal(root, np.full(3, ranks - 1))
        assert everybody == [{"rank": r} for r in range(ranks)]


def failures(ranks, work, timeout=10.0):
    """What each rank raised."""
    raised = {}

    def target(communicator):
        try:
            work(communicator)
        except Exception as error:
            raised[communicator.rank] = error
            communicator.abort(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=target, args=(c,)) for c in InProcess.group(ranks, timeout)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.parametrize("collective", (True, False))
def test_arrays_of_different_sizes_are_an_error_on_every_rank(collective):
    def work(communicator):
        array = np.zeros(4 + 3 * (communicator.rank == 1), np.float32)
        if collective:
            communicator.all_reduce(array)
        else:
            ring_all_reduce(communicator, array, np.empty_like(array))

    raised = failures(3, work)
    assert sorted(raised) == [0, 1, 2] and all(isinstance(error, PeerLost) for error in raised.values())
    assert len({str(error) for error in raised.values()}) == 1


def test_the_others_learn_which_rank_failed_and_why():
    def work(communicator):
        if communicator.rank == 2:
            raise MemoryError("no bytes left")
        communicator.recv(np.zeros(1), 2)

    started = time.monotonic()
    raised = failures(4, work)
    assert time.monotonic() - started < 5
    assert [str(raised[r]) for r in (0, 1, 3)] == ["rank 2 failed: MemoryError: no bytes left"] * 3


def test_waiting_for_a_silent_rank_ends_and_names_it():
    raised = failures(2, lambda c: c.recv(np.zeros(1), 1) if c.rank == 0 else None, timeout=0.2)
    assert str(raised[0]) == "rank 1 sent nothing to rank 0 for 0.2 s"
