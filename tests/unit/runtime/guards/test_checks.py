"""Each guard rail, with the mistake as a user makes it and the fix that the message names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import (
    BufferChanged,
    ConfigError,
    Disagree,
    GraphCaptured,
    JoinMissed,
    LeaderOnly,
    LeftAlone,
    LossDivided,
    NoGradient,
    NotCarried,
    NotUnderElastic,
    SecondLoop,
    StateChanged,
    StrayGradient,
    TooEarly,
    UsageError,
)
from runtime.guards import checks
from runtime.loop.job import Job
from runtime.loop.step import Step
from runtime.session import JoinMeta, Op, OpKind, ScriptLoop
from tests.unit.features import StatisticsInParameters
from tests.unit.jobs import SHARDS, Recorded, Setup, cross_entropy, dataset, make_job, set_up


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = set_up(make_job())
    yield setup
    setup.job._detach()


Body = Callable[[Step, torch.Tensor, torch.Tensor], Any]


def steps(setup: Setup, count: int = 3, **arguments: Any) -> Iterator[Step]:
    data = setup.job.loader(dataset(), 16, shards=SHARDS)
    return setup.job.steps(data, total=count, **arguments)


def loss_of(setup: Setup, x: torch.Tensor, y: torch.Tensor) -> Any:
    return cross_entropy(setup.model(x), y)


def run(setup: Setup, body: Body, *, count: int = 3, **arguments: Any) -> None:
    """A loop with the usual code around this inner body."""
    for step in steps(setup, count, **arguments):
        for x, y in step:
            body(step, x, y)
        setup.optimizer.step()
        setup.optimizer.zero_grad()


def good(setup: Setup, step: Step) -> None:
    for x, y in step:
        loss_of(setup, x, y).backward()


# NoGradient


def test_continue_before_backward_is_no_gradient(setup: Setup) -> None:
    def body(step: Step, x: torch.Tensor, y: torch.Tensor) -> None:
        if not x.isinf().any():
            return
        loss_of(setup, x, y).backward()

    with pytest.raises(NoGradient, match=r"shard 0 in pass 0 of step 0 .*step\.skip\(\)"):
        run(setup, body)


def test_zero_grad_after_backward_is_no_gradient(setup: Setup) -> None:
    def body(step: Step, x: torch.Tensor, y: torch.Tensor) -> None:
        loss_of(setup, x, y).backward()
        setup.optimizer.zero_grad()

    with pytest.raises(NoGradient, match="zero_grad"):
        run(setup, body)


def test_reading_the_batches_ahead_is_no_gradient(setup: Setup) -> None:
    with pytest.raises(NoGradient, match=r"list\(step\)"):
        for step in steps(setup):
            list(step)


@pytest.mark.parametrize("shards_before", [0, 2])
def test_a_cuda_graph_around_the_inner_loop_is_refused(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, shards_before: int
) -> None:
    """No GPU is here, so torch's answers are given for it."""
    handed_out = 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: handed_out == shards_before)
    with pytest.raises(GraphCaptured, match=r"around pass 0 of step 0.*torch\.cuda\.make_graphed_callables"):
        for step in steps(setup):
            for x, y in step:
                handed_out += 1
                loss_of(setup, x, y).backward()
    assert handed_out == shards_before


def test_break_out_of_the_inner_loop_is_noticed_at_the_next_step(setup: Setup) -> None:
    with pytest.raises(NoGradient, match=r"pass 0 of step 0 was left before .*break.*job\.stop"):
        for step in steps(setup):
            for x, y in step:
                loss_of(setup, x, y).backward()
                break


def test_break_out_of_both_loops_is_noticed_when_the_job_closes(setup: Setup) -> None:
    for step in steps(setup):
        for x, y in step:
            loss_of(setup, x, y).backward()
            break
        break
    with pytest.raises(NoGradient, match="break"):
        setup.job.close()


def test_a_second_pass_while_the_first_is_open_is_noticed(setup: Setup) -> None:
    with pytest.raises(NoGradient, match="was left before"):
        for step in steps(setup):
            next(iter(step))
            next(iter(step))


def test_a_step_without_an_inner_loop_is_no_gradient(setup: Setup) -> None:
    with pytest.raises(NoGradient, match="step 0 ended without a pass"):
        for _ in steps(setup):
            pass


def test_no_gradient_can_be_allowed(setup: Setup) -> None:
    run(setup, lambda step, x, y: None, allow={"NoGradient"})
    assert all(parameter.grad is None for parameter in setup.model.parameters())


# TooEarly


def test_optimizer_step_inside_the_inner_loop_is_too_early(setup: Setup) -> None:
    def body(step: Step, x: torch.Tensor, y: torch.Tensor) -> None:
        loss_of(setup, x, y).backward()
        setup.optimizer.step()

    with pytest.raises(TooEarly, match=r"optimizer\.step\(\) was called in pass 0 of step 0.*behind the inner"):
        run(setup, body)


def test_optimizer_step_after_break_is_too_early(setup: Setup) -> None:
    with pytest.raises(TooEarly, match="break"):
        for step in steps(setup):
            for x, y in step:
                loss_of(setup, x, y).backward()
                break
            setup.optimizer.step()


def test_a_grad_scaler_that_steps_inside_the_inner_loop_is_too_early(setup: Setup) -> None:
    scaler = torch.amp.GradScaler("cpu")

    def body(step: Step, x: torch.Tensor, y: torch.Tensor) -> None:
        scaler.scale(loss_of(setup, x, y)).backward()
        scaler.step(setup.optimizer)

    with pytest.raises(TooEarly):
        run(setup, body)


# StateChanged


def change_weight(setup: Setup) -> None:
    with torch.no_grad():
        setup.model.get_parameter("0.weight").mul_(1.01)


def change_data(setup: Setup) -> None:
    setup.model.get_parameter("0.weight").data.mul_(1.01)


def change_rate(setup: Setup) -> None:
    setup.optimizer.param_groups[0]["lr"] = 0.3


def change_state(setup: Setup) -> None:
    setup.job.state.count = 1


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_weight, "parameter model.0.weight"),
        (change_data, "parameter model.0.weight"),
        (change_rate, "learning rate of optimizer, group 0"),
        (lambda setup: setup.scheduler.step(), "scheduler scheduler"),
        (change_state, "job.state.count"),
    ],
)
def test_registered_state_that_changes_inside_the_inner_loop_is_named(
    setup: Setup, change: Callable[[Setup], None], named: str
) -> None:
    def body(step: Step, x: torch.Tensor, y: torch.Tensor) -> None:
        loss_of(setup, x, y).backward()
        change(setup)

    with pytest.raises(StateChanged, match=named) as caught:
        run(setup, body)
    assert "after the inner loop" in str(caught.value)


@pytest.mark.parametrize("change", [change_weight, change_rate, change_state])
def test_registered_state_may_change_before_the_inner_loop(setup: Setup, change: Callable[[Setup], None]) -> None:
    """Scripts set the learning rate of a step there; a newcomer copies the state of the pass, not of the hand-out."""
    for step in steps(setup):
        change(setup)
        good(setup, step)


def test_state_may_change_between_passes_and_between_steps(setup: Setup) -> None:
    for step in steps(setup):
        good(setup, step)
        change_weight(setup)
        change_data(setup)
        change_rate(setup)
        change_state(setup)
        good(setup, step)


def test_a_buffer_that_changes_in_a_pass_undeclared_is_named_with_the_declaration() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 2)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.get_buffer("seen").add_(1)
            return super().forward(x)

    named = pytest.raises(BufferChanged, match=r"buffer model\.seen .*job\.register\(buffers=")
    with named, make_job() as job:
        model = Counting()
        job.register(model=model)
        for step in job.steps(job.loader(dataset(), 16, shards=SHARDS), total=2):
            for x, y in step:
                cross_entropy(model(x), y).backward()


def test_statistics_in_a_parameter_that_is_not_trained_are_named_with_the_declaration() -> None:
    with make_job() as job:
        model = StatisticsInParameters()
        job.register(model=model)
        with pytest.raises(StateChanged, match=r'buffers=\{"model\.layer\.moving/mean": "mean"\}'):
            for step in job.steps(job.loader(dataset(), 16, shards=SHARDS), total=2):
                for x, y in step:
                    cross_entropy(model(x), y).backward()
        job._detach()


def test_an_embedding_that_renormalises_its_weights_in_forward_gets_advice_that_helps() -> None:
    def run(layer: nn.Embedding, renormalise: Callable[[], object]) -> None:
        with make_job() as job:
            model = nn.Sequential(layer, nn.Linear(2, 1))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            job.register(model=model, optimizer=optimizer)
            for step in job.steps(shards=2, total=2):
                for _ in step:
                    model(torch.arange(4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                renormalise()

    def no_grad(layer: nn.Embedding) -> None:
        with torch.no_grad():
            layer.weight.renorm_(2, 0, 0.5)

    with pytest.raises(StateChanged, match=r"layer\.weight\.renorm_\(2, 0, m\)"):
        run(nn.Embedding(4, 2, max_norm=0.5), lambda: None)
    plain = nn.Embedding(4, 2)
    run(plain, lambda: no_grad(plain))
    assert plain.weight.norm(dim=1).max() < 0.5001


# LossDivided


def divided(setup: Setup, by: object) -> Body:
    return lambda step, x, y: (loss_of(setup, x, y) / by).backward()


@pytest.mark.parametrize("by", [SHARDS, float(SHARDS)])
def test_a_loss_divided_by_the_number_of_shards_is_noticed(setup: Setup, by: object) -> None:
    with pytest.raises(LossDivided, match=r"divided by 4.*Remove the division.*allow="):
        run(setup, divided(setup, by))


def test_a_loss_divided_behind_a_grad_scaler_is_noticed(setup: Setup) -> None:
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(LossDivided):
        run(setup, lambda step, x, y: scaler.scale(loss_of(setup, x, y) / SHARDS).backward())


def test_a_loss_divided_before_the_function_form_of_backward_is_noticed(setup: Setup) -> None:
    with pytest.raises(LossDivided):
        run(setup, lambda step, x, y: torch.autograd.backward([loss_of(setup, x, y) / SHARDS]))


@pytest.mark.parametrize(
    "by",
    [
        *(SHARDS - 1, 2.0 * SHARDS),
        *(torch.tensor(SHARDS, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.int32, torch.int64)),
    ],
)
def test_other_divisions_are_left_alone(setup: Setup, by: object) -> None:
    """A tensor of that value is a count of the data, such as tokens."""
    run(setup, divided(setup, by))


def test_a_division_that_is_not_the_last_operation_is_left_alone(setup: Setup) -> None:
    run(setup, lambda step, x, y: (loss_of(setup, x, y) / SHARDS + 0.1).backward())


@pytest.mark.parametrize("last", [lambda loss: loss / torch.tensor(3), lambda loss: loss * torch.tensor(2.0)])
def test_what_hooks_of_the_script_have_saved_is_left_to_backward(
    setup: Setup, last: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    run(setup, fetching_once(setup, last))


def test_a_loss_divided_under_hooks_of_the_script_is_noticed(setup: Setup) -> None:
    with pytest.raises(LossDivided):
        run(setup, fetching_once(setup, lambda loss: loss / SHARDS))


def fetching_once(setup: Setup, last: Callable[[torch.Tensor], torch.Tensor]) -> Body:
    """As where activations are offloaded. last: the last operation of the loss."""
    saved: dict[int, torch.Tensor] = {}
    numbers = itertools.count()

    def save(tensor: torch.Tensor) -> int:
        saved[number := next(numbers)] = tensor
        return number

    def body(step: Step, x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.autograd.graph.saved_tensors_hooks(save, saved.pop):
            loss = last(loss_of(setup, x, y))
        loss.backward()

    return body


def test_loss_divided_can_be_allowed_by_name(setup: Setup) -> None:
    run(setup, divided(setup, SHARDS), allow={"LossDivided"})


def test_a_patch_of_backward_that_a_library_makes_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    called: list[object] = []
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # put back when the test is over
    loss = torch.ones((), requires_grad=True)
    with checks.backward_watched(seen.append):
        ours = torch.autograd.backward

        def patched(*arguments: Any, **named: Any) -> None:
            called.append(arguments)
            ours(*arguments, **named)

        torch.autograd.backward = patched
        loss.backward()
    loss.backward()
    assert torch.autograd.backward is patched and len(called) == 2
    assert len(seen) == 1, "it looks no more"
    assert loss.grad == 2


def test_backward_is_torchs_own_after_the_rehearsal(setup: Setup) -> None:
    original = torch.autograd.backward
    inside: list[object] = []

    def body(step: Step, x: torch.Tensor, y: torch.Tensor) -> None:
        inside.append(torch.autograd.backward)
        loss_of(setup, x, y).backward()

    run(setup, body, count=1)
    assert [backward is original for backward in inside] == [False, False, True, True, True, True]


# StrayGradient


def test_a_backward_outside_the_inner_loop_is_a_stray_gradient(setup: Setup) -> None:
    with pytest.raises(StrayGradient, match=r"model\.0\.weight has a gradient from before pass 0 of step 0"):
        for step in steps(setup):
            setup.model(torch.randn(4, 6)).sum().backward()
            good(setup, step)


def test_a_missing_zero_grad_is_a_stray_gradient(setup: Setup) -> None:
    with pytest.raises(StrayGradient, match=r"optimizer\.zero_grad\(\) after each optimizer\.step\(\)"):
        for step in steps(setup):
            good(setup, step)
            setup.optimizer.step()


def test_accumulating_over_steps_is_a_stray_gradient(setup: Setup) -> None:
    with pytest.raises(StrayGradient, match="raise the loader's batch_size"):
        for step in steps(setup):
            good(setup, step)
            if step.index % 2 == 1:
                setup.optimizer.step()
                setup.optimizer.zero_grad()


def test_so_is_accumulating_in_gradients_that_are_no_part_of_a_flat_tensor() -> None:
    with make_job() as job, pytest.raises(StrayGradient, match="raise the loader's batch_size"):
        model = nn.Linear(2, 1).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        job.register(model=model, optimizer=optimizer)
        for step in job.steps(shards=2, total=3):
            for _ in step:
                model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
            if step.index % 2 == 1:
                optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_before_the_inner_loop_is_as_good(setup: Setup, set_to_none: bool) -> None:
    for step in steps(setup):
        setup.optimizer.zero_grad(set_to_none=set_to_none)
        good(setup, step)
        setup.optimizer.step()


def test_gradients_left_in_the_discriminator_by_the_generators_pass_are_no_mistake() -> None:
    """The usual GAN calls each zero_grad() just before its own pass."""
    with make_job() as job:
        g, d = nn.Linear(2, 6), nn.Linear(6, 1)
        of_g, of_d = torch.optim.SGD(g.parameters(), 0.1), torch.optim.SGD(d.parameters(), 0.1)
        job.register(g=g, d=d, of_g=of_g, of_d=of_d)
        for step in job.steps(shards=2, total=3):
            of_d.zero_grad()
            for _ in step:
                d(g(torch.randn(4, 2)).detach()).mean().backward()
            of_d.step()
            of_g.zero_grad()
            for _ in step:
                d(g(torch.randn(4, 2))).mean().backward()
            of_g.step()


def test_stray_gradients_can_be_allowed(setup: Setup) -> None:
    for step in steps(setup, allow={"StrayGradient"}):
        setup.model(torch.randn(4, 6)).sum().backward()
        good(setup, step)
        setup.optimizer.step()


# SecondLoop


def test_two_bare_loops_are_a_second_loop(setup: Setup) -> None:
    run(setup, lambda step, x, y: loss_of(setup, x, y).backward(), count=1)
    with pytest.raises(SecondLoop, match=r"job\.epochs\(n\)"):
        run(setup, lambda step, x, y: loss_of(setup, x, y).backward(), count=1)


def test_a_pass_of_a_step_that_is_over_is_refused(setup: Setup) -> None:
    """Its record is written, and the others are in another step."""
    loop = steps(setup)
    first = next(loop)
    good(setup, first)
    next(loop)
    with pytest.raises(UsageError, match="a pass of an earlier step was begun, and the job is at step 1"):
        next(iter(first))


def test_a_loop_over_steps_is_not_gone_on_with_in_the_next_epoch(setup: Setup) -> None:
    old = None
    with pytest.raises(UsageError, match=r"earlier job\.steps\(\), and the script is in epoch 1 before the steps"):
        for _ in setup.job.epochs(2):
            if old is not None:
                next(old)
            old = setup.job.steps(shards=SHARDS, total=2)


def test_two_loops_over_epochs_are_a_second_loop(setup: Setup) -> None:
    list(setup.job.epochs(2))
    with pytest.raises(SecondLoop):
        list(setup.job.epochs(2))


def test_a_bare_loop_after_epochs_is_a_second_loop(setup: Setup) -> None:
    list(setup.job.epochs(1))
    with pytest.raises(SecondLoop):
        steps(setup)


def test_two_steps_loops_in_one_epoch_are_a_second_loop(setup: Setup) -> None:
    data = setup.job.loader(dataset(), 16, shards=SHARDS)
    with pytest.raises(SecondLoop, match="epoch 0"):
        for _ in setup.job.epochs(2):
            for _ in range(2):
                for step in setup.job.steps(data):
                    good(setup, step)
                    setup.optimizer.step()
                    setup.optimizer.zero_grad()


# NotCarried


def test_a_thread_count_that_changes_after_join_is_not_carried(setup: Setup) -> None:
    with pytest.raises(NotCarried, match=r"elastic\.join\(threads=2\)"):
        for step in steps(setup):
            torch.set_num_threads(2)
            good(setup, step)


def test_a_value_of_once_that_json_cannot_carry_is_not_carried(setup: Setup) -> None:
    for _ in setup.job.epochs(1):
        with pytest.raises(NotCarried, match=r"Tensor.*x\.tolist\(\) of a tensor.*job\.state"):
            setup.job.once(lambda: torch.zeros(2))
        break


def test_a_value_of_once_that_json_changes_is_not_carried(setup: Setup) -> None:
    for _ in setup.job.epochs(1):
        with pytest.raises(NotCarried, match="which JSON changes; return lists"):
            setup.job.once(lambda: (1, 2))
        break


# LeaderOnly, and collective calls at places a newcomer never comes by


def test_a_collective_call_inside_once_is_leader_only(setup: Setup) -> None:
    for _ in setup.job.epochs(1):
        with pytest.raises(LeaderOnly, match=r"job\.save\(a\) was called inside job\.once"):
            setup.job.once(lambda: setup.job.save("a"))
        break


@pytest.mark.parametrize("call", [lambda job: job.save("a"), lambda job: job.once(int), lambda job: score(job)])
def test_a_collective_call_before_the_loop_says_where_it_belongs(setup: Setup, call: Callable[[Job], object]) -> None:
    with pytest.raises(UsageError, match=r"came before the loop.*job\.epochs"):
        call(setup.job)


def score(job: Job) -> object:
    return job.evaluate(lambda x, y: {"mean": x.mean()}, dataset())


@pytest.mark.parametrize(
    "call", [score, lambda job: job.save("a"), lambda job: job.once(int), lambda job: job.digest()]
)
def test_a_collective_call_inside_a_pass_says_where_it_belongs(setup: Setup, call: Callable[[Job], object]) -> None:
    with pytest.raises(UsageError, match="in pass 0 of step 0; call it behind the inner loop"):
        run(setup, lambda step, x, y: call(setup.job))


# NotUnderElastic


@pytest.mark.parametrize(
    ("variable", "launcher"), [("WORLD_SIZE", "torchrun"), ("SLURM_NTASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun")]
)
def test_one_of_several_processes_without_an_agent_is_told_how_to_start(variable: str, launcher: str) -> None:
    with pytest.raises(NotUnderElastic, match=f"{variable}=4, so {launcher}.*elastic run --workers 4"):
        checks.check_launcher({variable: "4"})


@pytest.mark.parametrize("value", ["", "0", "1", " 1 "])
def test_a_single_process_is_a_job_of_one_under_any_launcher(value: str) -> None:
    checks.check_launcher({"WORLD_SIZE": value})


# What sessions raise


PASS = Op(OpKind.PASS, 4, step=7)
LEAVE = Op(OpKind.LEAVE, 1, step=7)
SAVE = Op(OpKind.ONCE, 1, step=7, label="save(best)")


def test_a_worker_that_leaves_is_left_alone() -> None:
    error = checks.disagreement({"a": PASS, "b": LEAVE, "c": PASS}, leader="a")
    assert isinstance(error, LeftAlone)
    assert "b left the loop" in str(error)
    assert "job.stop(because)" in str(error)


def test_a_leader_that_saves_alone_is_leader_only() -> None:
    error = checks.disagreement({"a": SAVE, "b": PASS, "c": PASS}, leader="a")
    assert isinstance(error, LeaderOnly)
    assert "only the leader called job.save(best)" in str(error)
    assert "Move the call out of `if job.is_leader:`" in str(error)


def test_another_worker_that_saves_alone_is_a_disagreement() -> None:
    error = checks.disagreement({"a": PASS, "b": SAVE, "c": PASS}, leader="a")
    assert type(error) is Disagree
    assert "b: job.save(best) after step 7" in str(error)
    assert "make it depend on step.metrics, job.state or job.evaluate()" in str(error)


def test_a_disagreement_names_workers_and_values_of_what_differs_only() -> None:
    error = checks.disagree({"a": {"lr": "0.1", "x": "same"}, "b": {"lr": "0.2", "x": "same"}}, PASS)
    assert "lr: a=0.1, b=0.2" in str(error)
    assert "same;" not in str(error)
    assert "pass 0 of step 7" in str(error)
    assert "Take such a value from job.agree(x)" in str(error)


# allow


@pytest.mark.parametrize("allow", [{"TooEarly"}, {"LossDivide"}, "LossDivided"])
def test_allow_takes_a_set_of_names_that_can_be_turned_off(setup: Setup, allow: Any) -> None:
    with pytest.raises(ConfigError, match="allow"):
        steps(setup, allow=allow)


def test_a_newcomer_whose_epoch_is_over_is_replaced() -> None:
    class Outside(Recorded):
        def __init__(self) -> None:
            super().__init__()
            self.script = ScriptLoop(newcomer=True)

        def await_invitation(self) -> None:
            """There is a place."""

        def meta(self, until: Callable[[JoinMeta], bool] = bool) -> JoinMeta:
            return JoinMeta(epoch=1, step=3, epoch_start=3, state={}, once={})

    setup = set_up(make_job(Outside()))
    with pytest.raises(JoinMissed, match="epoch 1"):
        list(setup.job.epochs(3))
    setup.job.close()
