"""A job has the same bits in every world, whoever dies or joins: the whole loop against a world of threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from elastic.errors import Disagree, LeaderOnly, LeftAlone
from tests.unit.jobs import Recorded, Setup, dataset, ledger, make_job, set_up, train
from tests.unit.worlds import FakeMember, Killed, World


def evaluated(setup: Setup) -> None:
    """After each epoch: something collective that depends on the weights, and a decision that follows from it."""
    result = setup.job.evaluate(
        lambda x, y: {"accuracy": (setup.model(x).argmax(1) == y).float().mean()}, dataset(), batch_size=8
    )
    setup.job.state.accuracy = result["accuracy"]
    setup.job.state.named = setup.job.once(lambda: ["leader"])


def script(session: FakeMember | Recorded) -> str:
    return train(set_up(make_job(session)), epochs=3, body=evaluated)


def quiet() -> tuple[str, Recorded]:
    session = Recorded()
    return script(session), session


def the_error(world: World, kind: type[BaseException]) -> BaseException:
    """All members raise the same one."""
    assert {type(error) for error in world.errors.values()} == {kind}
    return world.errors["w0"]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6])
def test_every_world_size_ends_in_the_same_digest_and_ledger(workers: int) -> None:
    digest, alone = quiet()
    world = World(workers)
    world.run(script)
    assert world.errors == {}
    assert set(world.digests.values()) == {digest}
    for session in world.sessions.values():
        assert ledger(session) == ledger(alone)


@pytest.mark.parametrize("op", [1, 2, 4, 5, 9])
def test_a_worker_that_dies_in_any_operation_changes_no_bit(op: int) -> None:
    """Operation 4 is an evaluation, 5 a once block, the others are passes."""
    digest, alone = quiet()
    world = World(3, kills={"w1": (op, 0), "w0": (op + 1, 0)})
    world.run(script)
    assert {type(error) for error in world.errors.values()} == {Killed}
    assert world.digests == {"w2": digest}
    assert ledger(world.sessions["w2"]) == ledger(alone)


@pytest.mark.parametrize(("asked_at", "admit_at"), [(0, 0), (0, 2), (4, 4), (3, 5), (8, 8)])
def test_a_newcomer_enters_in_the_middle_and_ends_with_the_same_state(asked_at: int, admit_at: int) -> None:
    """Also when the ring went on to a later step of the epoch while it rehearsed and copied."""
    digest, alone = quiet()
    world = World(2)
    world.run(script, newcomers=1, asked_at=asked_at, admit_at=admit_at)
    assert world.errors == {}
    assert world.digests == dict.fromkeys(("w0", "w1", "n0"), digest)
    assert ledger(world.sessions["n0"]) == ledger(alone)[admit_at:]


def test_a_job_whose_first_workers_all_died_is_finished_by_a_newcomer() -> None:
    digest, _ = quiet()
    world = World(2, kills={"w0": (8, 1), "w1": (9, 0)})
    world.run(script, newcomers=1, asked_at=2, admit_at=2)
    assert world.digests == {"n0": digest}


def test_a_newcomer_takes_over_what_was_evaluated_before_the_steps_of_its_epoch() -> None:
    """And a second newcomer of the same epoch could take it over from the first one."""

    def evaluating_first(session: FakeMember | Recorded) -> str:
        setup = set_up(make_job(session))
        job = setup.job
        data = job.loader(dataset(), 16, shards=4)
        job.state.setdefault(found=[])
        for epoch in job.epochs(3):
            result = job.evaluate(lambda x, y: {"mean": setup.model(x).mean()}, dataset(), batch_size=8)
            named = job.once(lambda number: f"epoch {number}", epoch)
            for step in job.steps(data):
                for x, _ in step:
                    setup.model(x).square().mean().backward()
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            job.state.found = [*job.state.found, result["mean"], named]
        digest = job.digest()
        job.close()
        return digest

    alone = evaluating_first(Recorded())
    world = World(2)
    world.run(evaluating_first, newcomers=1, asked_at=4, admit_at=5)
    assert world.errors == {}
    assert world.digests == dict.fromkeys(("w0", "w1", "n0"), alone)


def test_a_newcomer_gets_what_once_gave_whatever_the_others_have_done_with_it_since() -> None:
    """What came before the steps of its epoch, and what it takes over while it catches up."""

    def changing(session: FakeMember | Recorded) -> str:
        setup = set_up(make_job(session))
        job = setup.job
        run = job.shared("run", lambda: ["run"])
        assert run == ["run"]
        run.append("mine")
        assert job.shared("run", lambda: ["other"]) == ["run"]
        for epoch in job.epochs(1):
            before = job.once(lambda number: [number], epoch)
            assert before == [epoch]
            for step in job.steps(shards=4, total=6):
                for _ in step:
                    setup.model(torch.randn(4, 6)).square().mean().backward()
                setup.optimizer.step()
                setup.optimizer.zero_grad()
                between = job.once(lambda index: {"found": [index]}, step.index)
                assert between == {"found": [step.index]}
                between["found"].append(before)
                before.append(step.index)
        digest = job.digest()
        job.close()
        return digest

    alone = changing(Recorded())
    world = World(2)
    world.run(changing, newcomers=1, asked_at=2, copy_at=2, admit_at=4)
    assert world.errors == {}
    assert world.digests == dict.fromkeys(("w0", "w1", "n0"), alone)


def test_a_newcomer_is_told_of_no_resize_before_it_is_a_member() -> None:
    told: dict[str, list[tuple[int, int]]] = {}

    def script_of(session: FakeMember) -> str:
        setup = set_up(make_job(session))
        setup.job.on_resize(lambda old, new, because: told.setdefault(session.worker_id, []).append((old, new)))
        return train(setup)

    world = World(2)
    world.run(script_of, newcomers=1, asked_at=1, copy_at=1, admit_at=4)
    assert world.errors == {}
    assert set(told) == {"w0", "w1"} and told["w0"][0] == (2, 3)


def test_a_newcomer_enters_a_bare_loop_in_a_later_pass_over_the_data() -> None:
    def bare(session: FakeMember | Recorded) -> str:
        setup = set_up(make_job(session))
        data = setup.job.loader(dataset(), 16, shards=4, shuffle=True)
        for step in setup.job.steps(data, total=8):
            for x, _ in step:
                setup.model(x).square().mean().backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        digest = setup.job.digest()
        setup.job.close()
        return digest

    session = Recorded()
    alone = bare(session)
    world = World(1)
    world.run(bare, newcomers=2, asked_at=2, admit_at=4)
    assert world.errors == {}
    assert set(world.digests.values()) == {alone}
    assert ledger(world.sessions["n1"]) == ledger(session)[4:]


def test_two_passes_a_step_have_the_same_bits_in_every_world() -> None:
    """A GAN: the discriminator's pass, its step, then the generator's pass through the new discriminator."""

    def gan(session: FakeMember | Recorded) -> str:
        job = make_job(session)
        generator, discriminator = torch.nn.Linear(3, 6), torch.nn.Linear(6, 1)
        of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
        of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=0.01)
        job.register(g=generator, d=discriminator, og=of_generator, od=of_discriminator)
        data = job.loader(dataset(), 16, shards=4, shuffle=True)
        for step in job.steps(data, epochs=2):
            of_discriminator.zero_grad()
            for x, _ in step:
                fake = generator(torch.randn(len(x), 3)).detach()
                loss: Any = F.softplus(-discriminator(x)).mean() + F.softplus(discriminator(fake)).mean()
                loss.backward()
                step.log(discriminator=loss)
            of_discriminator.step()
            of_generator.zero_grad()
            for x, _ in step:
                loss = F.softplus(-discriminator(generator(torch.randn(len(x), 3)))).mean()
                loss.backward()
                step.log(generator=loss)
            of_generator.step()
        digest = job.digest()
        job.close()
        return digest

    alone = Recorded()
    digest = gan(alone)
    assert set(alone.records[0].scalars) == {"discriminator", "generator"}
    world = World(3, kills={"w1": (4, 1)})
    world.run(gan, newcomers=1, asked_at=3, admit_at=3)
    assert {type(error) for error in world.errors.values()} == {Killed}
    assert world.digests == dict.fromkeys(("w0", "w2", "n0"), digest)


def test_a_worker_that_breaks_out_of_the_loop_is_named() -> None:
    def leaving(session: FakeMember) -> str:
        setup = set_up(make_job(session))
        data = setup.job.loader(dataset(), 16, shards=4)
        for step in setup.job.steps(data, epochs=1):
            for x, _ in step:
                setup.model(x).sum().backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
            if setup.job.rank == 1:
                break
        setup.job.close()
        return ""

    world = World(2)
    world.run(leaving)
    error = the_error(world, LeftAlone)
    assert "w1 left the loop" in str(error)
    assert "job.stop(" in str(error)


def test_a_weight_changed_on_one_worker_only_is_named_with_both_values() -> None:
    def drifting(setup: Setup) -> None:
        if setup.job.rank == 1:
            for group in setup.optimizer.param_groups:
                group["lr"] = 0.5

    world = World(2)
    world.run(lambda session: train(set_up(make_job(session)), body=drifting))
    error = the_error(world, Disagree)
    assert "learning rates" in str(error)
    assert "w1=0.5" in str(error)


def test_evaluate_under_is_leader_is_told_apart_from_other_disagreements() -> None:
    def leader_only(setup: Setup) -> None:
        if setup.job.is_leader:
            evaluated(setup)

    world = World(2)
    world.run(lambda session: train(set_up(make_job(session)), body=leader_only))
    error = the_error(world, LeaderOnly)
    assert "if job.is_leader" in str(error)


def test_a_stop_on_one_worker_takes_all_out_after_the_same_step() -> None:
    def stopping(session: FakeMember) -> str:
        setup = set_up(make_job(session))
        data = setup.job.loader(dataset(), 16, shards=4)
        for step in setup.job.steps(data, total=20):
            for x, _ in step:
                setup.model(x).sum().backward()
                if session.worker_id == "w1" and step.index == 3:
                    setup.job.stop("enough")
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        digest = setup.job.digest()
        setup.job.close()
        return digest

    world = World(3)
    world.run(stopping)
    assert world.errors == {}
    assert len(set(world.digests.values())) == 1
    assert {len(session.records) for session in world.sessions.values()} == {4}


def test_a_newcomer_carries_a_stop_that_the_member_it_copied_from_could_not_send() -> None:
    """As where all who have called stop() die before the reduction that would have carried it."""

    def stopping(session: FakeMember) -> str:
        setup = set_up(make_job(session))
        if session.worker_id == "w0":
            setup.job._training.riders.travel = lambda scalars: scalars  # type: ignore[method-assign]
        for step in setup.job.steps(setup.job.loader(dataset(), 16, shards=4), total=9):
            if session.worker_id == "w0" and step.index == 3:
                setup.job.stop("enough")
            for x, _ in step:
                setup.model(x).sum().backward()
            setup.optimizer.zero_grad()
        digest = setup.job.digest()
        setup.job.close()
        return digest

    world = World(1)
    world.run(stopping, newcomers=1, asked_at=1, admit_at=3)
    assert world.errors == {} and world.joined_at == {"n0": 3}
    assert {session.records[-1].step for session in world.sessions.values()} == {4}
