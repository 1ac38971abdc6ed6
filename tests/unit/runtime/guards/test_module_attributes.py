"""Plain attributes of modules: what a newcomer would not have is refused by name, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elastic.errors import Unregistered
from runtime.loop.job import Job
from runtime.loop.step import Step
from tests.unit.features import STEPS, loader, mlp
from tests.unit.jobs import Recorded, cross_entropy, dataset, make_job
from tests.unit.worlds import World

Call = Callable[[Step], object]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    original = nn.Module.__setattr__
    yield
    assert nn.Module.__setattr__ is original


def nothing(step: Step) -> None:
    pass


def loop(
    job: Job,
    model: nn.Module,
    *,
    start: Call = nothing,
    inside: Call = nothing,
    behind: Call = nothing,
    passes: int = 1,
    **arguments: Any,
) -> None:
    """start: called before the inner loop, inside: in it, behind: after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job.register(model=model, optimizer=optimizer)
    try:
        for step in job.steps(loader(job), total=STEPS, **arguments):
            start(step)
            for _ in range(passes):
                for x, y in step:
                    inside(step)
                    cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                behind(step)
    finally:
        job._detach()


def layer(model: nn.Module) -> Any:
    """Its dropout, whose p is 0.1 to begin with."""
    return model.get_submodule("1")


def dropping() -> nn.Module:
    return mlp(nn.Dropout(0.1))


def test_an_attribute_changed_behind_the_inner_loop_is_named_in_the_next_step() -> None:
    session, model = Recorded(), dropping()

    def behind(step: Step) -> None:
        if step.index == 1:
            layer(model).p = 0.2

    with pytest.raises(Unregistered) as raised:
        loop(make_job(session), model, behind=behind)
    for part in (
        *("model.1.p has changed", "it is 0.2 in pass 0 of step 2", "would find it 0.1"),
        *("(model.1).p = job.state.p", 'allow={"Unregistered"}'),
    ):
        assert part in str(raised.value)
    assert [record.step for record in session.records] == [0, 1], "the step that had it is not applied"


def test_all_workers_are_told() -> None:
    def script(session: Any) -> str:
        job, model = make_job(session), dropping()
        loop(job, model, behind=lambda step: setattr(layer(model), "p", 0.3))
        return ""

    world = World(3)
    world.run(script)
    assert {worker: type(error) for worker, error in world.errors.items()} == dict.fromkeys(
        ("w0", "w1", "w2"), Unregistered
    )


def test_an_attribute_set_at_the_start_of_one_step_only_is_found_in_the_next() -> None:
    model = dropping()

    def start(step: Step) -> None:
        if step.index == 2:
            layer(model).p = 0.2

    with pytest.raises(Unregistered, match=r"model\.1\.p .* is 0\.2 in pass 0 of step 3"):
        loop(make_job(), model, start=start)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("p", 1, "it is 1 in"),
        ("inplace", True, "it is True in"),
        ("kind", "late", "it is 'late' in .* would find it not there"),
        ("sizes", (1, (2, "a")), r"it is \(1, \(2, 'a'\)\) in"),
    ],
)
def test_every_simple_type_is_found_and_an_attribute_that_was_not_there(name: str, value: object, told: str) -> None:
    model = dropping()
    with pytest.raises(Unregistered, match=rf"model\.1\.{name} has changed.*{told}"):
        loop(make_job(), model, behind=lambda step: setattr(layer(model), name, value))


def test_several_are_named() -> None:
    model = mlp(nn.Dropout(0.1), nn.Dropout(0.1))

    def behind(step: Step) -> None:
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.2

    with pytest.raises(Unregistered, match=r"model\.1\.p has changed \(and so did model\.2\.p\)"):
        loop(make_job(), model, behind=behind)


@pytest.mark.parametrize("value", [lambda step: 0.1 + 0.05 * step.index, lambda step: 0.5 if step.index > 2 else 0.1])
def test_what_each_step_sets_from_its_own_number_is_no_mistake(value: Callable[[Step], float]) -> None:
    model = dropping()
    loop(make_job(), model, start=lambda step: setattr(layer(model), "p", value(step)))


@pytest.mark.parametrize("value", [True, None, 7, "on"])
def test_nor_is_the_same_value_set_anew(value: object) -> None:
    """Which an eye on the values alone cannot tell from one that stays."""
    model = dropping()
    loop(make_job(), model, start=lambda step: setattr(layer(model), "note", value))


def test_nor_is_what_is_set_behind_the_loop_and_at_the_start() -> None:
    job, model = make_job(), dropping()
    job.state.setdefault(p=0.1)

    def behind(step: Step) -> None:
        job.state.p += 0.01
        layer(model).p = job.state.p

    loop(job, model, start=lambda step: setattr(layer(model), "p", job.state.p), behind=behind)


def in_epochs(job: Job, model: nn.Module, start: Callable[[int], object], end: Callable[[int], object]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job.register(model=model, optimizer=optimizer)
    data = loader(job)
    try:
        for epoch in job.epochs(3):
            start(epoch)
            for step in job.steps(data):
                for x, y in step:
                    cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            end(epoch)
    finally:
        job._detach()


def test_what_each_epoch_sets_is_no_mistake_and_what_it_leaves_behind_is() -> None:
    model = dropping()
    in_epochs(make_job(), model, lambda epoch: setattr(layer(model), "p", 0.1 + 0.1 * epoch), lambda epoch: None)
    model = dropping()
    with pytest.raises(Unregistered, match=r"model\.1\.p .* is 0\.2 in pass 0 of step 3.* find it 0\.1"):
        in_epochs(make_job(), model, lambda epoch: None, lambda epoch: setattr(layer(model), "p", 0.2))
    model = dropping()

    def in_the_first(epoch: int) -> None:
        if epoch == 0:
            layer(model).p = 0.2

    with pytest.raises(Unregistered, match=r"model\.1\.p .* is 0\.2 in pass 0 of step 3.* find it 0\.1"):
        in_epochs(make_job(), model, in_the_first, lambda epoch: None)


class Counting(nn.Module):
    """Forward leaves things behind, as layers of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.shape: tuple[int, ...] | None = None
        self.longest = 1
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.shape = tuple(x.shape)
        self.longest = max(self.longest, len(x))
        self.last = float(x.detach().sum())
        scores: torch.Tensor = self.inner(x)
        return scores


def test_what_passes_and_evaluations_change_is_left_alone() -> None:
    job, model = make_job(), Counting()

    def behind(step: Step) -> None:
        job.evaluate(lambda x, y: {"loss": F.cross_entropy(model(x), y)}, dataset(), batch_size=25)
        job.once(lambda: setattr(model, "noted", 1))
        with torch.no_grad():
            model(torch.zeros(40, 6))

    loop(job, model, behind=behind)
    assert model.longest == 40


def test_what_is_put_back_or_is_of_torch_is_left_alone() -> None:
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.1))
    nn.utils.parametrizations.weight_norm(model.get_submodule("0"))
    nn.utils.parametrizations.orthogonal(model.get_submodule("3"))
    momentum = layer(model).momentum

    def behind(step: Step) -> None:
        layer(model).momentum = 0.0
        model.eval()
        model.train()
        layer(model).momentum = momentum
        model.register_forward_hook(lambda *_: None)
        layer(model).register_full_backward_hook(lambda *_: None)
        layer(model).tag = object()

    loop(make_job(), model, behind=behind)


def test_a_mode_of_each_pass_and_what_the_inner_loop_sets_are_left_alone() -> None:
    model = dropping()
    layer(model).mode = "second"
    loop(
        make_job(),
        model,
        start=lambda step: setattr(layer(model), "mode", "first"),
        inside=lambda step: setattr(layer(model), "p", 0.1 + 0.01 * step.index),
        behind=lambda step: setattr(layer(model), "mode", "second"),
        passes=2,
    )


def test_it_can_be_allowed_and_on_restore_stands_for_a_script_that_rebuilds_it() -> None:
    model = dropping()
    loop(make_job(), model, behind=lambda step: setattr(layer(model), "p", 0.2), allow={"Unregistered"})
    job, model = make_job(), dropping()
    job.on_restore(lambda header: None)
    loop(job, model, behind=lambda step: setattr(layer(model), "p", 0.2))
