"""The cost model of data parallelism: its numbers are those of the formulas, and of all ranks simulated together."""

from dataclasses import replace
from functools import cache

import pytest

import minidnn
import models
from minidnn import profiles
from minidnn.errors import UserError
from minidnn.parallel.cost import FREE, Links, counts, estimate, rendezvous, rooted_rows
from minidnn.parallel.inprocess import InProcess
from minidnn.schedule.instruction import Op, Wait
from minidnn.schedule.timing import step_time

OLD = Links(20e-6, 10e9)
"""A link of 2016."""
STRATEGIES = ("ring_delayed", "ring", "all_reduce", "master_slave", "tree")


@cache
def step(strategy, ranks, net="lenet", rank=0, batch=24):
    size, channels = (28, 1) if net == "lenet" else (224, 3)
    graph = models.build(net, batch=batch, image_size=size, in_channels=channels)
    # Copies to and from the host cost nothing: in one simulation of all ranks they would share one link.
    quick = {f"{way}_bandwidth{both}": 1e18 for way in ("h2d", "d2h") for both in ("", "_both")}
    profile = replace(profiles.load("h200"), copy_latency_seconds=0.0, **quick)
    communicator = InProcess.group(ranks)[rank]
    return minidnn.compile(graph, strategy=strategy, communicator=communicator, device=None, profile=profile)


def padded_bytes(compiled):
    return compiled.program.persistent.lines[0].weights.buffer.nbytes


@pytest.mark.parametrize(("strategy", "milliseconds"), [("ring", 83), ("tree", 221), ("master_slave", 332)])
def test_vgg16_on_four_ranks_of_2016_takes_what_the_formulas_say(strategy, milliseconds):
    found = estimate(step(strategy, 4, "vgg16", batch=4), OLD)
    adding = 2e-3 if strategy in ("tree", "master_slave") else 0  # at the root, of gradients at 3.8 TB/s
    assert found.communication_seconds == pytest.approx(milliseconds * 1e-3, rel=0.006, abs=adding)
    assert found.exposed_seconds == pytest.approx(found.communication_seconds)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_bytes_of_the_busiest_rank(ranks):
    whole = {s: padded_bytes(step(s, ranks)) for s in STRATEGIES}
    sent = {s: estimate(step(s, ranks), OLD).sent_bytes for s in (*STRATEGIES, "ring:nccl", "all_reduce:nccl")}
    assert sent["ring"] == sent["ring_delayed"] == pytest.approx(2 * (ranks - 1) / ranks * whole["ring"])
    assert sent["ring:nccl"] == pytest.approx(sent["ring"])
    assert sent["all_reduce"] == pytest.approx(2 * (ranks - 1) / ranks * whole["all_reduce"], rel=0.05)
    assert sent["all_reduce:nccl"] == pytest.approx(sent["all_reduce"], rel=0.05)
    assert sent["master_slave"] == (ranks - 1) * whole["master_slave"]
    children = max(
        len(range(ranks)) and sum(1 for k in range(8) if 1 << k < ranks), 1
    )  # of the root of a binomial tree
    assert sent["tree"] == children * whole["tree"]


def together(strategy, ranks, links):
    """Seconds from step to step with all ranks in one simulation: a message waits until it has been sent."""
    merged, base, sent = [], [], {}
    compiled = [step(strategy, ranks, rank=rank) for rank in range(ranks)]
    for rank, one in enumerate(compiled):
        base.append(len(merged))
        number = {}
        for index, row in enumerate(one.program["train"].rows):
            merged.append(row._replace(
                stream=f"{row.stream} of {rank}", waits=tuple(Wait(w.row + base[rank], w.lag) for w in row.waits)
            ))  # fmt: skip
            if row.op is Op.SEND:
                peer = row.attrs["peer"]
                number[peer] = number.get(peer, 0) + 1
                sent[rank, peer, number[peer]] = base[rank] + index
    number = {}
    for rank, one in enumerate(compiled):
        for index, row in enumerate(one.program["train"].rows):
            if row.op is Op.RECV and row.kernel == "recv":
                peer = row.attrs["peer"]
                number[peer, rank] = number.get((peer, rank), 0) + 1
                at = base[rank] + index
                wait = Wait(sent[peer, rank, number[peer, rank]])
                merged[at] = merged[at]._replace(waits=(*merged[at].waits, wait))
    gpu = replace(
        compiled[0].gpu, interconnect_latency_seconds=links.latency_seconds, interconnect_bandwidth=links.bandwidth
    )
    return step_time(merged, gpu, "fp32")[0]


@pytest.mark.parametrize("strategy", ["ring_delayed", "ring", "all_reduce"])
@pytest.mark.parametrize("links", [Links(1e-6, 400e9), Links(5e-6, 50e9), OLD], ids=str)
def test_one_rank_stands_for_all_of_a_ring(strategy, links):
    for ranks in (2, 4):
        found, exact = estimate(step(strategy, ranks), links), together(strategy, ranks, links)
        early = 0.3 * found.compute_seconds if strategy == "ring" else 0.0  # on some ranks the next step has begun
        assert exact - 1e-9 <= found.step_seconds <= exact + early + 1e-9, (ranks, found, exact)


def test_a_delayed_exchange_hides_until_it_takes_longer_than_the_step():
    compiled = step("ring_delayed", 4)
    fast, slow = (estimate(compiled, Links(0.0, rate)) for rate in (400e9, 1e9))
    assert fast.communication_seconds < fast.compute_seconds and fast.exposed_seconds == 0
    assert slow.communication_seconds > slow.compute_seconds
    assert slow.step_seconds == pytest.approx(slow.communication_seconds, rel=0.1)
    for strategy in STRATEGIES:
        assert estimate(step(strategy, 4), FREE).exposed_seconds == pytest.approx(0, abs=4e-6), strategy


def test_links_between_nodes_slow_a_whole_ring_but_only_their_messages_of_a_tree():
    nodes = Links(1e-6, 100e9, 2, 50e-6, 5e9)
    assert nodes.ring(2) == Links(1e-6, 100e9) and nodes.ring(4) == Links(50e-6, 5e9)
    assert estimate(step("ring", 4), nodes) == estimate(step("ring", 4), Links(50e-6, 5e9))
    tree = step("tree", 4)
    whole = padded_bytes(tree)
    # up and down: 1 to 0 inside node 0 while 3 goes to 2 inside node 1; then 2 to 0 between the nodes
    expected = 2 * (nodes.seconds(whole, 0, 1) + nodes.seconds(whole, 0, 2))
    rows = [rooted_rows(tree, rank) for rank in range(4)]
    assert rendezvous(rows, nodes, lambda row: 0.0) == pytest.approx(expected)
    assert nodes.seconds(5e9, 1, 2) == pytest.approx(1.00005) and nodes.seconds(100e9, 2, 3) == pytest.approx(1.000001)


def test_speed_up_is_images_a_second_over_those_of_one_rank():
    one = minidnn.compile(models.build("lenet", batch=8, image_size=28, in_channels=1), device=None)
    alone, found = estimate(one, OLD), estimate(step("ring", 3), OLD)
    assert (alone.ranks, alone.batch, alone.exposed_seconds) == (1, 8, 0.0)
    assert found.speed_up(alone) == pytest.approx(24 / found.step_seconds / (8 / alone.step_seconds))
    assert alone.step_seconds == one.program["train"].profile.step_seconds


def test_a_profile_without_interconnect_goes_through_host_memory():
    profile = profiles.load("v100")
    profile = replace(profile, interconnect_bandwidth=0.0)
    assert Links.of(profile).seconds(1e8, 0, 1) == pytest.approx(profile.exchange_seconds(1e8))
    assert Links.of(profiles.load("h200")) == Links(1e-5, 354e9)


def test_a_table_has_few_rows_however_many_ranks():
    assert counts(1) == [1] and counts(5) == [1, 2, 3, 4, 5]
    assert counts(100) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 100]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((-1e-6, 1e9), "a latency of -1e-06 s"),
        ((float("nan"), 1e9), "a latency of nan s"),
        ((0.0, 0.0), "a bandwidth of 0 bytes"),
        ((0.0, 1e9, 0), "0 ranks per node"),
        ((0.0, 1e9, 2, float("inf")), "a node latency of inf"),
        ((0.0, 1e9, 2, 0.0, -5.0), "a node bandwidth of -5"),
    ],
)
def test_no_link_has_such_numbers(numbers, words):
    with pytest.raises(UserError, match=words):
        Links(*numbers)
