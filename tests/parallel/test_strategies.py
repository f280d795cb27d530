"""What every strategy promises: the update of one rank on the joined batch, the same bits everywhere, in predicted memory."""

from dataclasses import replace

import numpy as np
import pytest

import layup
import minidnn
from minidnn.device.emulated import EmulatedDevice
from minidnn.parallel.inprocess import InProcess, run_ranks
from minidnn.precision import PRECISIONS, Precision
from minidnn.schedule.instruction import COMM, COMPUTE, Op
from minidnn.schedule.plan import Decision, Plan, Reuse
from minidnn.schedule.ranks import STRATEGIES, Strategy
from minidnn.schedule.verify import verify
from tests.parallel.simulator import Simulator
from tests.step import nets

SYNCHRONOUS = ("ring", "ring:nccl", "all_reduce", "all_reduce:nccl", "master_slave", "tree")
EVERY = (*SYNCHRONOUS, "ring_delayed", "ring_delayed:nccl")
NESTEROV = minidnn.SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
BUCKETS = Strategy("all_reduce", "steps", bucket_bytes=512)


def trained(graph, strategy, ranks, steps=4, tail=2, optimizer=nets.MOMENTUM, **options):
    """State of every rank after some steps, the last a smaller batch."""

    def work(communicator):
        device = EmulatedDevice(seed=communicator.rank)
        step = minidnn.compile(
            graph,
            strategy=strategy,
            communicator=communicator,
            optimizer=optimizer,
            tail=tail,
            device=device,
            **options,
        )
        for number in range(steps):
            step.run(*nets.batch(graph, number), lr=0.05 / (1 + number))
        if tail:
            step.run(*nets.batch(graph, 99, tail))
        return nets.state(step)

    return run_ranks(ranks, work)


def alone(graph, steps=4, tail=2, optimizer=nets.MOMENTUM, **options):
    step = minidnn.compile(graph, optimizer=optimizer, tail=tail, **options)
    for number in range(steps):
        step.run(*nets.batch(graph, number), lr=0.05 / (1 + number))
    if tail:
        step.run(*nets.batch(graph, 99, tail))
    return nets.state(step)


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_one_rank_without_delay_is_a_single_process_bit_for_bit(strategy):
    for net in (nets.residual, nets.dropout):
        graph = net(5)
        (ours,) = trained(graph, strategy, 1)
        assert nets.differing(ours, alone(graph)) == []


@pytest.mark.parametrize("strategy", SYNCHRONOUS)
@pytest.mark.parametrize("ranks", (2, 3))
def test_ranks_without_delay_are_one_rank_on_the_joined_batch_with_uneven_shares(strategy, ranks):
    graph = nets.chain(7)  # shares 4+3, 3+2+2; the tail of 2 leaves one of three ranks without a share
    states = trained(graph, strategy, ranks)
    expected = alone(graph)
    for name, value in expected.items():
        np.testing.assert_allclose(states[0][name], value, rtol=1e-6, atol=1e-6, err_msg=name)
    for other in states[1:]:
        assert nets.differing(states[0], other) == []


def test_small_buckets_change_nothing_on_one_rank_and_no_rank_differs():
    graph = nets.residual(6)
    assert nets.differing(trained(graph, BUCKETS, 1)[0], alone(graph)) == []
    first, *others = trained(nets.chain(7), BUCKETS, 3)
    assert all(nets.differing(first, other) == [] for other in others)
    np.testing.assert_allclose(first["conv.weight"], alone(nets.chain(7))["conv.weight"], rtol=1e-6, atol=1e-6)


def test_buckets_wait_for_the_batch_norm_that_reads_the_sums_in_them():
    """Its data gradient takes the sums that are its parameters' gradients: those of this rank, not of all."""
    graph = nets.residual(6)
    buckets, whole = (trained(graph, strategy, 2, tail=None) for strategy in (BUCKETS, "ring"))
    for name, value in whole[0].items():
        np.testing.assert_allclose(buckets[0][name], value, rtol=1e-6, atol=1e-6, err_msg=name)


def test_the_verifier_tells_a_ranks_own_gradient_from_the_sum_over_all():
    program = minidnn.compile(
        nets.residual(6, 2), strategy=BUCKETS, communicator=InProcess.group(2)[0], device=None
    ).program
    rows, offsets = list(program["train"].rows), program["train"].offsets
    assert verify(rows, offsets, previous=rows) == []
    early = next(i for i, row in enumerate(rows) if row.kernel == "batch_norm_backward_data")
    sums = {(v.buffer, v.offset) for row in rows if row.stream == COMM for v in row.writes}
    assert {(v.buffer, v.offset) for v in rows[early].reads} & sums, "a bucket begins with what it reads"
    late = max(i for i, row in enumerate(rows) if row.stream == COMM)
    moved = [*rows[:early], *rows[early + 1 : late + 1], rows[early], *rows[late + 1 :]]
    said = "\n".join(verify(moved, offsets, previous=moved))
    assert "reads gradients.float32" in said and "put something else there" in said


@pytest.mark.parametrize("strategy", EVERY)
def test_two_element_types_are_exchanged_as_one_is(strategy, monkeypatch):
    """As in 16 bit, where batch norm's parameters are wider than the others; with types that NumPy computes in."""
    graph = nets.residual(6)
    expected = trained(graph, strategy, 2, tail=None, optimizer=NESTEROV)
    monkeypatch.setitem(PRECISIONS, "bf16", Precision("bf16", "float32", "float64", master=True))
    states = trained(graph, strategy, 2, tail=None, optimizer=NESTEROV, precision="bf16")
    for name, value in expected[0].items():
        np.testing.assert_allclose(states[0][name], value, rtol=2e-5, atol=2e-6, err_msg=name)
    weights = [name for name in expected[0] if "running" not in name and "count" not in name]
    assert nets.differing({n: states[0][n] for n in weights}, {n: states[1][n] for n in weights}) == []


def test_a_bucket_is_exchanged_while_backward_goes_on():
    step = minidnn.compile(nets.residual(6, 2), strategy=BUCKETS, communicator=InProcess.group(2)[0], device=None)
    rows = step.program["train"].rows
    first = next(i for i, row in enumerate(rows) if row.stream == COMM)
    assert any(row.op is Op.BACKWARD_WEIGHT for row in rows[first:])


@pytest.mark.parametrize(
    ("net", "ranks"), [("dropout", 1), ("dropout", 2), ("dropout", 3), ("dropout", 4), ("chain", 3)]
)
def test_ring_delayed_by_steps_is_the_recurrence_bit_for_bit(ranks, net):
    graph = nets.NETS[net](7)
    simulator = Simulator(graph, ranks, NESTEROV)
    batches = [nets.batch(graph, number, 2 if number == 5 else None) for number in range(8)]
    expected = []
    for number, (x, y) in enumerate(batches):
        simulator.run(x, y, 0.05 / (1 + number))
        if number in (4, 7):
            simulator.flush()
            expected.append({k: v.copy() for k, v in simulator.parameters().items()})

    def work(communicator):
        device = EmulatedDevice(seed=communicator.rank)
        step = minidnn.compile(
            graph, strategy="ring_delayed", communicator=communicator, optimizer=NESTEROV, tail=2, device=device
        )
        seen = []
        for number, (x, y) in enumerate(batches):
            step.run(x, y, lr=0.05 / (1 + number))
            if number in (4, 7):  # from both phases: one flush after an odd, one after an even number of updates
                step.flush()
                seen.append(simulator.read(step))
        return seen, step.updates

    for seen, updates in run_ranks(ranks, work):
        assert updates == 8
        for ours, theirs in zip(seen, expected, strict=True):
            assert [n for n in theirs if ours[n].tobytes() != theirs[n].tobytes()] == []


def test_the_delay_is_exactly_one_and_warm_up_has_none():
    graph = nets.chain(6)
    delayed = trained(graph, "ring_delayed", 2, steps=2, tail=None, optimizer=NESTEROV)[0]
    direct = trained(graph, "ring", 2, steps=2, tail=None, optimizer=NESTEROV)[0]
    warm = Strategy("ring_delayed", "steps", warmup=2)
    warmed = trained(graph, warm, 2, steps=2, tail=None, optimizer=NESTEROV)[0]
    assert "conv.weight" in nets.differing(delayed, direct)
    assert nets.differing(warmed, direct) == []
    # two warm updates, then one delayed gradient, flushed: what three updates without delay would be
    three = trained(graph, "ring", 2, steps=3, tail=None, optimizer=NESTEROV)[0]
    assert nets.differing(trained(graph, warm, 2, steps=3, tail=None, optimizer=NESTEROV)[0], three) == []


@pytest.mark.parametrize("name", ("ring", "all_reduce", "ring_delayed"))
def test_collectives_are_within_rounding_of_steps(name):
    graph = nets.chain(7)
    steps, collective = (trained(graph, f"{name}:{how}", 3)[0] for how in ("steps", "nccl"))
    for key, value in steps.items():
        np.testing.assert_allclose(collective[key], value, rtol=1e-6, atol=1e-6, err_msg=key)


def test_the_default_optimizer_of_ring_delayed_is_nesterov():
    step = minidnn.compile(nets.chain(4), strategy="ring_delayed", device=None)
    assert (
        step.optimizer.nesterov and not minidnn.compile(nets.chain(4), strategy="ring", device=None).optimizer.nesterov
    )


@pytest.mark.parametrize("ranks", (2, 3, 4))
@pytest.mark.parametrize("name", ("ring", "ring_delayed"))
def test_a_ring_takes_2_n_minus_1_steps_and_moves_2_n_minus_1_nths_of_the_padded_parameters(name, ranks):
    graph = nets.chain(8)

    def work(communicator):
        step = minidnn.compile(graph, strategy=name, communicator=communicator)
        padded = step.program.persistent.lines[0].size * 4
        step.run(*nets.batch(graph))  # of ring_delayed: no exchange yet
        step.executor.device.synchronize()
        before = communicator.ring_steps, communicator.sent_bytes
        step.run(*nets.batch(graph))
        step.executor.device.synchronize()
        return communicator.ring_steps - before[0], communicator.sent_bytes - before[1], padded

    for steps, sent, padded in run_ranks(ranks, work):
        assert steps == 2 * (ranks - 1)
        assert sent * ranks == 2 * (ranks - 1) * padded


@pytest.mark.parametrize("strategy", (*EVERY, BUCKETS))
@pytest.mark.parametrize("ranks", (1, 3))
def test_every_schedule_is_clean_and_fits_what_is_reserved(strategy, ranks):
    graph, plan = nets.residual(6), Plan({"stem": Decision.OFFLOAD, "stem.relu": Decision.RECOMPUTE})
    for communicator in InProcess.group(ranks):
        program = minidnn.compile(
            graph, plan, strategy=strategy, communicator=communicator, device=None, tail=4, memory=None
        ).program
        for schedule in program.schedules.values():
            previous = program[schedule.previous].rows
            extents = {"extent": program.reserved_bytes, "host_extent": program.host_bytes}
            assert verify(schedule.rows, schedule.offsets, previous=previous, **extents) == [], schedule.name


def test_no_wait_of_the_two_phases_can_be_left_out():
    group = InProcess.group(2)
    program = minidnn.compile(nets.chain(6), strategy="ring_delayed", communicator=group[0], device=None).program
    assert (program["train"].previous, program["train_other"].previous) == ("train_other", "train")
    for name in ("train", "train_other"):
        schedule = program[name]
        previous = program[schedule.previous].rows
        for at, row in enumerate(schedule.rows):
            for wait in row.waits:
                changed = list(schedule.rows)
                changed[at] = row._replace(waits=tuple(w for w in row.waits if w != wait))
                assert verify(changed, schedule.offsets, previous=previous) != [], (name, at, wait)


def test_nothing_in_a_delayed_step_lets_computation_wait_for_this_steps_transfers():
    """The overlap of the thesis: compute rows wait for the run before, and transfers for nothing but the batch."""
    group = InProcess.group(2)
    program = minidnn.compile(nets.residual(6), strategy="ring_delayed", communicator=group[0], device=None).program
    for name in ("train", "train_other"):
        rows = program[name].rows
        for row in rows:
            here = [rows[w.row] for w in row.waits if not w.lag]
            if row.stream == COMPUTE:
                assert all(other.stream != COMM for other in here), row
            if row.stream == COMM:
                assert all(other.op is Op.INPUT for other in here), row


@pytest.mark.parametrize("strategy", (*EVERY, BUCKETS))
def test_measured_memory_equals_predicted_memory_on_every_rank(strategy):
    graph = nets.residual(6)

    def work(communicator):
        step = minidnn.compile(graph, strategy=strategy, communicator=communicator, tail=3)
        before = nets.state(step)
        step.run(*nets.batch(graph))
        step.verify(*nets.batch(graph, 1))
        assert nets.differing(before, nets.state(step))
        return step.measured.peak_bytes == step.profile.peak_bytes

    assert all(run_ranks(2, work))


def test_ranks_verify_together_whose_last_batch_is_as_large_as_any():
    def work(communicator):
        step = minidnn.compile(nets.chain(4), strategy="ring_delayed", communicator=communicator, tail=1)
        step.verify(*nets.batch(step.graph))
        return sorted(step.program.schedules)

    first, *others = run_ranks(3, work)
    assert all(other == first for other in others)


def test_the_ring_keeps_an_nth_of_the_momentum_and_the_delayed_ring_two_of_weights_and_gradients():
    def flats(strategy, rank=1, ranks=4):
        program = minidnn.compile(
            nets.chain(8), strategy=strategy, communicator=InProcess.group(ranks)[rank], device=None,
            optimizer=nets.MOMENTUM,
        ).program  # fmt: skip
        return {b.name.removesuffix(".float32"): b.nbytes for b in program.persistent.buffers}

    ring, delayed, reduced, slave = (flats(name) for name in ("ring", "ring_delayed", "all_reduce", "master_slave"))
    whole = ring["parameters"]
    assert whole % (4 * 64 * 4) == 0
    assert ring["gradients"] == whole and ring["momentum"] == ring["incoming"] == whole // 4
    assert delayed["other parameters"] == delayed["other gradients"] == whole and delayed["momentum"] == whole // 4
    assert reduced["momentum"] == whole and "momentum" not in slave and flats("tree", rank=0)["momentum"] == whole
    assert "incoming" not in flats("ring:nccl")


@pytest.mark.parametrize("strategy", ("ring", "ring_delayed", "tree"))
def test_offload_and_recompute_change_no_bit_and_no_collective(strategy):
    graph = nets.residual(6)
    plans = [None, Plan({"stem": Decision.OFFLOAD, "unit0.relu1": Decision.RECOMPUTE})]
    (first, *_), (other, *_) = (trained(graph, strategy, 2, plan=plan) for plan in plans)
    assert nets.differing(first, other) == []
    counts = []
    for plan in plans:
        step = minidnn.compile(graph, plan, strategy=strategy, communicator=InProcess.group(2)[0], device=None)
        counts.append(sum(row.stream == COMM for row in step.program["train"].rows))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("strategy", ("ring", "all_reduce", "master_slave"))
def test_accumulated_micro_batches_are_exchanged_once(strategy):
    graph = nets.chain(6)

    def work(communicator):
        step = minidnn.compile(
            graph, strategy=strategy, communicator=communicator, optimizer=nets.MOMENTUM, accumulate=2, tail=3
        )
        for number in range(4):
            step.run(*nets.batch(graph, number))
        step.run(*nets.batch(graph, 9, 3))
        return nets.state(step)

    first, second = run_ranks(2, work)
    one = run_ranks(1, work)[0]
    assert nets.differing(first, second) == []
    for name, value in one.items():
        np.testing.assert_allclose(first[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("strategy", ("ring", "ring_delayed", "master_slave"))
def test_a_saved_state_goes_on_with_any_number_of_ranks(strategy):
    graph = nets.dense(8)  # batch norm, two dtypes of state
    saved = trained(graph, strategy, 3, tail=None)[0]
    parameters = {k: v for k, v in saved.items() if not k.startswith("optimizer.")}
    optimizer = {k: v for k, v in saved.items() if k.startswith("optimizer.")}

    def work(communicator):
        step = minidnn.compile(graph, strategy=strategy, communicator=communicator, optimizer=nets.MOMENTUM)
        step.load_state_dict(parameters)
        step.load_optimizer_state_dict(optimizer)
        return nets.state(step)

    for ranks in (1, 2):
        assert all(nets.differing(state, saved) == [] for state in run_ranks(ranks, work))
    step = minidnn.compile(graph, optimizer=nets.MOMENTUM)
    step.load_state_dict(parameters)
    step.load_optimizer_state_dict(optimizer)
    assert nets.differing(nets.state(step), saved) == []


def test_running_statistics_are_averaged_before_evaluating_and_saving():
    graph = nets.residual(6)
    x, _ = nets.batch(graph, 5, 9)

    def work(communicator):
        step = minidnn.compile(graph, strategy="ring", communicator=communicator, optimizer=nets.MOMENTUM)
        step.run(*nets.batch(graph))
        step.executor.device.synchronize()
        own = step.executor_state._read(step.program.persistent.parameters["stem.bn.running_mean"])
        logits = step.evaluate(x)
        return own, logits, step.state_dict()

    (own0, logits0, state0), (own1, logits1, state1) = run_ranks(2, work)
    assert not np.array_equal(own0, own1) and np.array_equal(logits0, logits1)
    assert np.array_equal(state0["stem.bn.running_mean"], ((own0.astype(np.float64) + own1) / 2).astype(np.float32))
    step = minidnn.compile(graph)
    step.load_state_dict(state0)
    assert state0["stem.bn.running_var"].tobytes() == state1["stem.bn.running_var"].tobytes()
    np.testing.assert_allclose(step.evaluate(x), logits0, rtol=1e-6, atol=1e-6)


def test_gradients_are_the_mean_over_all_ranks():
    graph = nets.chain(7)
    x, y = nets.batch(graph)
    expected = minidnn.compile(graph).gradients(x, y)

    def work(communicator):
        return minidnn.compile(graph, strategy="ring", communicator=communicator).gradients(x, y)

    for ours in run_ranks(3, work):
        for name, value in expected.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-6)


def test_a_rank_takes_its_share_alone_or_out_of_the_whole_batch():
    graph = nets.chain(7)

    def work(communicator, shares):
        step = minidnn.compile(graph, strategy="ring", communicator=communicator, tail=2)
        for number, size in enumerate((7, 7, 2)):
            x, y = nets.batch(graph, number, size)
            taken = step.ranks.taken(size)
            if shares:
                step.run(x[taken], y[taken], of=size)
            else:
                step.run(x, y)
        return nets.state(step)

    whole, shares = (run_ranks(3, lambda c, s=s: work(c, s)) for s in (False, True))
    assert nets.differing(whole[0], shares[0]) == []


def test_dropout_differs_between_ranks_and_initial_weights_do_not():
    graph = nets.dropout(4)

    def work(communicator):
        step = minidnn.compile(graph, strategy="ring", communicator=communicator)
        weights = step.state_dict()
        x, y = nets.batch(graph)
        step._submit("gradients", x[:2], y[:2], 0.0, 0.25, 1.0, 1)  # the same samples on both ranks
        step.executor.device.synchronize()
        return weights, {k: v.copy() for k, v in step.executor.bound("gradients").results.items()}

    (weights0, g0), (weights1, g1) = run_ranks(2, work)
    assert nets.differing(weights0, weights1) == []
    assert not np.array_equal(g0["fc2.weight"], g1["fc2.weight"])


def refusals(work, ranks=2):
    """What every rank was told."""

    def told(communicator):
        try:
            work(communicator)
        except ValueError as error:
            return str(error)
        return None

    return run_ranks(ranks, told)


def test_ranks_that_would_not_train_one_net_are_refused_with_one_sentence():
    def seeds(c):
        minidnn.compile(nets.chain(4), strategy="ring", communicator=c, seed=c.rank)

    def plans(c):
        minidnn.compile(nets.chain(4), Plan(distance=4 + c.rank), strategy="ring", communicator=c)

    def models(c):
        minidnn.compile((nets.chain, nets.residual)[c.rank](4), strategy="ring", communicator=c)

    for work, what in ((seeds, "seed"), (plans, "plan"), (models, "model")):
        first, second = refusals(work)
        assert first == second and first.startswith(f"the ranks do not agree on the {what}: rank 0 has ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "rong"}, r"strategy='rong' is unknown; did you mean ring"),
        ({"strategy": "ring:fast"}, "implementation 'fast' of strategy ring is unknown; choose steps or nccl"),
        ({"strategy": "tree:nccl"}, "strategy tree has no collective form"),
        ({"communicator": InProcess.group(1)[0]}, "a communicator without a strategy: name one"),
        ({"strategy": "ring_delayed", "accumulate": 2}, "accumulate=2 cannot be combined with ring_delayed"),
        ({"strategy": "ring", "allocator": "pool"}, "allocator='pool' .* the strategy ring needs two"),
        ({"strategy": "ring", "plan": Plan(reuse=Reuse(layerwise_update=True))}, "layerwise_update cannot be combined"),
        ({"strategy": "tree", "plan": Plan(streamed=("*",))}, "streamed parameters cannot be combined with .* tree"),
        ({"strategy": "ring", "communicator": InProcess.group(5)[0]}, "global batch of 4 is smaller than the 5 ranks"),
    ],
)
def test_what_does_not_combine_is_refused_by_name(options, words):
    with pytest.raises(minidnn.UserError, match=words):
        minidnn.compile(nets.chain(4), **options)


def test_layerwise_update_is_automatic_off_and_the_budget_covers_the_strips():
    for strategy in STRATEGIES:
        step = minidnn.compile(nets.chain(4), strategy=strategy, communicator=InProcess.group(2)[0], device=None)
        with pytest.raises(minidnn.DoesNotFit):
            minidnn.compile(
                nets.chain(4), strategy=strategy, communicator=InProcess.group(2)[0], device=None,
                memory=step.profile.reserved_bytes - 1,
            )  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layup_plans_under_a_budget_beside_a_strategy(strategy):
    graph = nets.residual(32, 2)
    common = {"strategy": strategy, "communicator": InProcess.group(2)[0], "device": None}
    keep = minidnn.compile(graph, **common).profile.reserved_bytes
    least = layup.minimum_memory(graph, **common)
    step = layup.compile(graph, memory=(least + keep) // 2, **common)
    assert least < step.profile.reserved_bytes <= (least + keep) // 2 and step.plan.decisions


def test_sixteen_bit_weights_are_planned_with_an_nth_of_the_master_copy():
    step = minidnn.compile(
        nets.chain(8), strategy="ring", communicator=InProcess.group(2)[1], device=None, precision="bf16",
        optimizer=nets.MOMENTUM,
    )  # fmt: skip
    sizes = {b.name: b.nbytes for b in step.program.persistent.buffers}
    line = next(line for line in step.program.persistent.lines if line.dtype == "bfloat16")
    assert sizes["parameters.bfloat16"] == 2 * line.size and sizes["master.bfloat16"] == 4 * line.size // 2
    schedule = step.program["train"]
    assert verify(schedule.rows, schedule.offsets, previous=schedule.rows) == []


def test_a_later_run_of_adam_counts_its_own_updates():
    graph, adam = nets.chain(6), minidnn.Adam(lr=1e-3)
    warm = replace(Strategy("ring_delayed", "steps"), warmup=3)
    ours = trained(graph, warm, 2, steps=3, tail=None, optimizer=adam)[0]
    assert nets.differing(ours, trained(graph, "ring", 2, steps=3, tail=None, optimizer=adam)[0]) == []
    late = trained(graph, "ring_delayed", 2, steps=1, tail=None, optimizer=adam)[0]  # one gradient, flushed
    assert nets.differing(late, trained(graph, "ring", 2, steps=1, tail=None, optimizer=adam)[0]) == []
