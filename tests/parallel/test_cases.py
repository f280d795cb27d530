"""Bug reports of the neighbours that need several ranks but no GPU: A11, C11, E6, G7. B11 is in test_own_gpu."""

import tracemalloc
from argparse import Namespace

import numpy as np
import pytest

import minidnn
from job import assemble
from minidnn.checkpoint import Checkpoint, Metadata, save
from minidnn.commandline import Parser, add_memory, add_model, add_training, complete
from minidnn.data import Augment, Batches
from minidnn.data.dataset import Dataset
from minidnn.errors import DoesNotFit, UserError
from minidnn.layers import Graph
from minidnn.parallel.agree import checksum
from minidnn.parallel.communicator import PeerLost
from minidnn.parallel.inprocess import run_ranks
from minidnn.precision import precision
from minidnn.recipes import numpy_recipe
from minidnn.schedule.plan import Decision, Plan
from minidnn.schedule.ranks import Strategy
from tests.parallel.test_collectives import failures
from tests.parallel.test_strategies import EVERY
from tests.step import nets

COLLECTIVES = ("post", "send", "recv", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "exchange")


def messages(communicator):
    """What a rank sends and takes from now on: the call, its bytes and its peer; not what a call is made of."""
    found, inside = [], []

    def noted(name, call):
        def made(value, *rest):
            if not inside:
                found.append((name, getattr(value, "nbytes", None), *rest))
            inside.append(name)
            try:
                return call(value, *rest)
            finally:
                inside.pop()

        return made

    for name in COLLECTIVES:
        setattr(communicator, name, noted(name, getattr(communicator, name)))
    return found


@pytest.mark.parametrize("strategy", EVERY)
def test_recomputing_every_normalisation_sends_nothing_more_and_advances_its_statistics_once(strategy):
    graph = nets.residual(6)
    layers = [node.name for node in graph.nodes if "bn" in node.name or "relu" in node.name]
    again = Plan(dict.fromkeys(layers, Decision.RECOMPUTE))

    def work(plan):
        def trained(communicator):
            found = messages(communicator)
            step = minidnn.compile(graph, plan, strategy=strategy, communicator=communicator, optimizer=nets.MOMENTUM)
            del found[:]
            for number in range(3):
                step.run(*nets.batch(graph, number))
            step.executor.device.synchronize()
            sent = list(found)
            return sent, nets.state(step)

        return trained

    kept, recomputed = (run_ranks(2, work(plan)) for plan in (None, again))
    for (sent, state), (sent_again, state_again) in zip(kept, recomputed, strict=True):
        assert sent == sent_again and sent
        assert not any(name == "exchange" for name, *_ in sent), "plain objects never travel inside a step"
        assert nets.differing(state, state_again) == []
        assert int(state["stem.bn.num_batches_tracked"]) == 3


# -- C11: one plan, one recipe ----------------------------------------------------------------------------------------
def options(*argv: str) -> Namespace:
    parser = Parser("")
    for add in (add_model, add_training, add_memory):
        add(parser)
    return complete(parser.parse_args(argv), None)


def planned(communicator, memory):
    """The job of a rank that may take ``memory`` bytes, however it came to know of them."""
    args = options("--data", "synthetic:32,32,32,3,4", "-a", "cifar_quick", "-b", "8", "--memory", str(memory))
    strategy = Strategy.parse("ring")
    return assemble(args, device="emulated", communicator=communicator, strategy=strategy).step


def test_ranks_with_different_free_memory_carry_out_the_plan_of_rank_0():
    amounts = (4_200_000, 10_000_000)  # by itself, rank 1 would keep what rank 0 moves or computes again

    def work(communicator):
        step = planned(communicator, amounts[communicator.rank])
        return step.plan, step.recipe.hash, step.profile.reserved_bytes

    tight, loose = (run_ranks(2, lambda c, a=amount: planned(c, a).plan)[0] for amount in amounts)
    first, second = run_ranks(2, work)
    assert first == second and first[0] == tight != loose


def test_a_rank_with_too_little_memory_for_the_common_plan_ends_all():
    amounts = (10_000_000, 4_200_000)
    raised = failures(2, lambda c: planned(c, amounts[c.rank]))
    assert isinstance(raised[1], DoesNotFit)
    assert isinstance(raised[0], PeerLost) and str(raised[0]).startswith("rank 1 failed: DoesNotFit: ")


def test_ranks_with_different_recipes_are_refused_with_one_sentence():
    graph = nets.chain(4)

    def work(communicator):
        recipe = numpy_recipe(graph.with_batch(2), precision("fp32"), 10_000 * communicator.rank or None, True)
        with pytest.raises(UserError) as refused:
            minidnn.compile(graph, strategy="ring", communicator=communicator, recipe=recipe)
        return str(refused.value)

    first, second = run_ranks(2, work)
    assert first == second and first.startswith("the ranks do not agree on the recipe: rank 0 has ")


# -- E6: a checkpoint never is in host memory as a whole --------------------------------------------------------------
WIDE = 1024
TENSOR = 4 * WIDE * WIDE


def wide() -> Graph:
    """Six weights of 4 MiB each."""
    g = Graph()
    x, y = g.input((4, 1, 1, WIDE)), g.label((4,))
    x = g.flatten(x, name="flatten")
    for number in range(6):
        x = g.relu(g.linear(x, WIDE, name=f"fc{number}"), name=f"relu{number}")
    g.softmax_cross_entropy(g.linear(x, 4, name="last"), y)
    return g


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("strategy", ("ring", "all_reduce"))
def test_loading_a_checkpoint_takes_the_host_memory_of_one_tensor_a_rank(tmp_path, ranks, strategy):
    path = tmp_path / "last.safetensors"
    graph = wide()
    made = minidnn.compile(graph, optimizer=nets.MOMENTUM)
    made.run(*nets.batch(graph))
    state = nets.state(made)
    made.close()
    save(path, state, Metadata())
    assert path.stat().st_size > 11 * TENSOR

    def work(communicator):
        step = minidnn.compile(graph, strategy=strategy, communicator=communicator, optimizer=nets.MOMENTUM)
        communicator.barrier()
        if communicator.rank == 0:
            tracemalloc.start()
        communicator.barrier()
        with Checkpoint(path) as checkpoint:
            step.load_state_dict(checkpoint.weights())
            step.load_optimizer_state_dict(checkpoint.optimizer())
        communicator.barrier()
        extra = tracemalloc.get_traced_memory()[1] if communicator.rank == 0 else 0
        communicator.barrier()
        if communicator.rank == 0:
            tracemalloc.stop()
        return extra, nets.state(step)

    found = run_ranks(ranks, work)
    for _, loaded in found:
        assert nets.differing(state, loaded) == []
    extra = found[0][0]  # of all ranks together
    assert TENSOR <= extra < 1.1 * ranks * TENSOR, extra / TENSOR


def test_ranks_that_load_different_checkpoints_are_refused_with_one_sentence():
    graph = nets.chain(4)

    def work(communicator):
        step = minidnn.compile(graph, strategy="ring", communicator=communicator, optimizer=nets.MOMENTUM)
        state, optimizer = step.state_dict(), step.optimizer_state_dict()
        told = []
        for load, loaded in ((step.load_state_dict, state), (step.load_optimizer_state_dict, optimizer)):
            name = next(name for name, array in loaded.items() if array.dtype == np.float32)
            with pytest.raises(UserError) as refused:
                load(loaded | {name: loaded[name] + communicator.rank})
            told.append(str(refused.value))
        return told

    first, second = run_ranks(2, work)
    assert first == second
    assert [text.partition(":")[0] for text in first] == [
        "the ranks do not agree on the loaded weights",
        "the ranks do not agree on the loaded optimizer state",
    ]


# -- G7: what differs between ranks -----------------------------------------------------------------------------------
def test_initial_weights_are_alike_and_crops_of_one_image_are_not():
    def work(communicator):
        step = minidnn.compile(nets.residual(8), strategy="ring", communicator=communicator, seed=3)
        return checksum(step.state_dict())

    assert len(set(run_ranks(4, work))) == 1
    image = np.random.default_rng(0).integers(0, 256, (1, 8, 8, 3), np.uint8)
    same = Dataset("one image", np.repeat(image, 16, 0), np.zeros(16, np.int64), 4, (0.5,) * 3, (0.2,) * 3)

    def share(rank, seed):
        return next(Batches(same, 16, seed=seed, augment=Augment(3, True), rank=rank, ranks=2).epoch(0))[0]

    first, second = share(0, 3), share(1, 3)
    assert first.shape == second.shape == (8, 8, 8, 3)
    assert len({crop.tobytes() for crop in (*first, *second)}) > 8  # not the same eight twice
    assert first.tobytes() != second.tobytes()
    assert share(1, 3).tobytes() == second.tobytes() and share(1, 4).tobytes() != second.tobytes()
