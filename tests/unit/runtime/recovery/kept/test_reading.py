"""What is read again of a script's objects is what a new look at them finds, whatever has happened to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard

from elastic.errors import NotCarried
from runtime.recovery.kept import reading
from runtime.recovery.kept.content import CurrentState, Piece, object_state, state_of
from runtime.recovery.kept.copying import BodyLayout, WriteRule, table
from runtime.recovery.kept.reading import StateReader


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Script:
    def __init__(self, *, shard: bool) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        if shard:
            fully_shard(self.model[0])
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.5**step)

    def step(self) -> None:
        self.model(torch.randn(3, 4)).square().sum().backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.schedule}


def told(state: CurrentState) -> list[Any]:
    """All that is kept of it, and where its tensors are."""
    pieces = [
        (
            p.path,
            p.tensor.data_ptr(),
            p.tensor.stride(),
            p.tensor.dtype,
            p.shape,
            p.box,
            p.distributed,
            p.sharded,
            p.steady,
        )
        for p in state.pieces
    ]
    placed = BodyLayout(EVERYTHING).place(state)
    said = table(state.parts, placed, plain=True)
    return [state.plain, pieces, said, [(p.begin, p.end) for p in placed], [p._version for p in _sources(state.pieces)]]


def _sources(pieces: Sequence[Piece]) -> list[torch.Tensor]:
    return [piece.source for piece in pieces]


EVERYTHING = WriteRule(lambda piece: True, lambda piece: piece.steady, samples=True)


MORE = torch.ones(3)


def nothing(script: Script) -> None:
    pass


def other_rate(script: Script) -> None:
    script.optimizer.param_groups[0]["lr"] = 0.25


def equal_rate_of_another_kind(script: Script) -> None:
    script.optimizer.param_groups[0]["weight_decay"] = True if script.optimizer.param_groups[0]["lr"] else 1


def rate_in_a_tensor(script: Script) -> None:
    script.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)


def a_number_as_the_name_of_an_option(script: Script) -> None:
    script.optimizer.param_groups[0][3] = 1  # type: ignore[index]


def an_option_with_underscores(script: Script) -> None:
    script.optimizer.param_groups[0]["__tag"] = 1


def an_optimizer_with_a_state_of_its_own(script: Script) -> None:
    found = script.optimizer.state_dict()
    script.optimizer.state_dict = lambda: {**found, "more": 1}  # type: ignore[method-assign]


def another_group(script: Script) -> None:
    script.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def moved_data(script: Script) -> None:
    weight = script.model[2].weight
    weight.data = weight.data.clone()


def turned_data(script: Script) -> None:
    weight = script.model[2].weight
    weight.data = weight.data.t()


def data_of_another_kind(script: Script) -> None:
    weight = script.model[2].weight
    weight.data = weight.data.view(torch.int32).view(torch.float32).double()


def another_layer(script: Script) -> None:
    script.model.append(nn.Linear(4, 4))


def other_layer(script: Script) -> None:
    script.model[2] = nn.Linear(4, 2)


def other_name(script: Script) -> None:
    script.model.last = script.model[2]
    del script.model[2]


def a_buffer_for_a_parameter(script: Script) -> None:
    bias = script.model[2].bias
    del script.model[2].bias
    script.model[2].register_buffer("bias", bias)


def a_buffer_that_is_not_kept(script: Script) -> None:
    script.model[1]._non_persistent_buffers_set.add("running_mean")


def other_buffer(script: Script) -> None:
    script.model[1].running_mean = torch.ones(4)


def a_buffer_that_is_gone(script: Script) -> None:
    script.model[1].running_mean = None


def shared(script: Script) -> None:
    script.model[2].bias = script.model[2].weight


def a_hook(script: Script) -> None:
    def hook(module: nn.Module, found: dict[str, Any], prefix: str, metadata: object) -> None:
        found[f"{prefix}more"] = MORE

    script.model[2].register_state_dict_post_hook(hook)


def a_hook_before(script: Script) -> None:
    script.model[2].register_state_dict_pre_hook(lambda module, prefix, keep: module.register_buffer("more", MORE))


def a_state_of_its_own(script: Script) -> None:
    script.model[2].state_dict = lambda destination, prefix, keep_vars: destination.update({prefix + "x": MORE})


def more_state(script: Script) -> None:
    class More(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

    script.model.append(More(2, 2))


def other_moment(script: Script) -> None:
    state = script.optimizer.state[next(script.model.parameters())]
    state["exp_avg"] = state["exp_avg"].clone()


def a_number_in_the_state(script: Script) -> None:
    state = script.optimizer.state[next(script.model.parameters())]
    state["calls"] = state.get("calls", 0) + 1000


def a_list_in_the_state(script: Script) -> None:
    """It changes while it is the same object."""
    state = script.optimizer.state[next(script.model.parameters())]
    state.setdefault("history", []).append(1.0)


def no_state(script: Script) -> None:
    script.optimizer.state.clear()


def a_state_that_was_loaded(script: Script) -> None:
    script.optimizer.load_state_dict(script.optimizer.state_dict())


def a_hook_of_the_optimizer(script: Script) -> None:
    script.optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "more": 1})


def other_number(script: Script) -> None:
    """Tensors behind it are numbered anew."""
    script.model.register_buffer("first", torch.zeros(1))


CHANGES = [
    *(nothing, Script.step, other_rate, equal_rate_of_another_kind, rate_in_a_tensor, another_group, moved_data),
    *(turned_data, data_of_another_kind, another_layer, other_layer, other_name, a_buffer_for_a_parameter),
    *(a_buffer_that_is_not_kept, other_buffer, a_buffer_that_is_gone, shared, a_hook, a_hook_before),
    *(a_state_of_its_own, more_state, other_moment, a_number_in_the_state, a_list_in_the_state, no_state),
    *(a_state_that_was_loaded, a_hook_of_the_optimizer, other_number, a_number_as_the_name_of_an_option),
    *(an_option_with_underscores, an_optimizer_with_a_state_of_its_own),
]
OF_SHARDS = [
    *(nothing, Script.step, other_rate, another_layer, other_moment, no_state, other_buffer, a_hook),
    *(a_state_that_was_loaded, other_number),
]


@pytest.mark.parametrize(
    ("change", "shard"), [*((change, False) for change in CHANGES), *((change, True) for change in OF_SHARDS)]
)
def test_what_is_read_again_is_what_is_there(change: Callable[[Script], object], *, shard: bool) -> None:
    script = Script(shard=shard)
    reader = StateReader(script.objects)
    for _ in range(2):
        script.step()
        assert told(reader.read()) == told(state_of(script.objects))
    for _ in range(2):
        change(script)
        for _ in range(2):
            assert told(reader.read()) == told(state_of(script.objects))


@pytest.mark.parametrize("shard", [False, True])
def test_what_has_not_changed_is_not_made_anew(monkeypatch: pytest.MonkeyPatch, *, shard: bool) -> None:
    script = Script(shard=shard)
    reader, layout = StateReader(script.objects), BodyLayout(EVERYTHING)
    script.step()
    first = reader.read()
    placed = layout.place(first)
    asked: list[str] = []
    anew = object_state

    def seen(name: str, *more: Any) -> Any:
        asked.append(name)
        return anew(name, *more)

    monkeypatch.setattr(reading, "object_state", seen)
    for _ in range(3):
        script.step()
        again = reader.read()
        assert [a.pieces is b.pieces for a, b in zip(first.parts, again.parts, strict=True)][:2] == [True, True]
        assert layout.place(again)[:2] == placed[:2]
    assert asked == ["scheduler"] * 3


def test_whole_parameters_in_the_place_of_shards_are_seen() -> None:
    script = Script(shard=True)
    reader = StateReader(script.objects)
    for _ in range(2):
        script.step()
        reader.read()
        script.model.unshard()
        script.model[0].unshard()
        assert told(reader.read()) == told(state_of(script.objects))


def test_what_cannot_be_kept_is_said_in_each_step() -> None:
    script = Script(shard=False)
    reader = StateReader(script.objects)
    script.step()
    reader.read()
    script.optimizer.param_groups[0]["odd"] = {1, 2}
    for _ in range(2):
        with pytest.raises(NotCarried, match=r"optimizer\.param_groups\.0\.odd is a builtins\.set"):
            reader.read()
    del script.optimizer.param_groups[0]["odd"]
    assert told(reader.read()) == told(state_of(script.objects))
