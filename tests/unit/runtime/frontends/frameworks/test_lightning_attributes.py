"""However the batches of an evaluation are spread over workers, all have the attributes that one worker has of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import ConfigError
from runtime.frontends.frameworks.lightning import parts

SPREADS = ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 3], [1], [2]])
"""The batches that each worker computes."""


class Evaluated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._outs: list[Any] = []
        self.by_loader: defaultdict[int, list[Any]] = defaultdict(list)
        self.nested: list[list[Any]] = [[], []]
        self.counts = {"right": 0}
        self.rows, self.more = torch.empty(0), torch.zeros(1, 2)
        self.matrix = torch.zeros(80, 80)
        self._last: Any = None
        self.cache: dict[int, Any] = {}
        self.from_none: Any = None
        self.large = torch.zeros(300, 300)

    def batch(self, number: int) -> None:
        self._outs.append(torch.tensor(number))
        self.by_loader[number % 2].append(number)
        self.nested[number % 2].append(number)
        self.counts["right"] += number
        self.counts["all"] = self.counts.get("all", 0) + 1
        self.rows = torch.cat(
            [self.rows, torch.tensor([[float(number)]]) if self.rows.numel() else torch.full((1, 1), number)]
        )
        self.more = torch.cat([self.more, torch.full((1, 2), float(number))])
        self.matrix[number, 1] += 1
        self._last = float(number)
        self.cache[number] = object()


def evaluate(spread: list[list[int]], body: Callable[[Any, int], None]) -> list[Any]:
    """The module of each worker, when all have all parts."""
    workers: list[Any] = [Evaluated() for _ in spread]
    trainer: Any = SimpleNamespace(_logger_connector=SimpleNamespace(_current_fx=None))
    records: dict[int, list[Any]] = {}
    for module, batches in zip(workers, spread, strict=True):
        for number in batches:
            with parts.recording(trainer, module, SimpleNamespace(_results={}), lambda: 1) as record:
                body(module, number)
            records[number] = record.plain()
    for module in workers:
        for number in sorted(records):
            parts.have(module, parts.Record.of(records[number]))
    return workers


@pytest.mark.parametrize("spread", SPREADS)
def test_every_worker_has_what_one_has(spread: list[list[int]]) -> None:
    for module in evaluate(spread, Evaluated.batch):
        assert [int(one) for one in module._outs] == [0, 1, 2, 3]
        assert dict(module.by_loader) == {0: [0, 2], 1: [1, 3]}
        assert type(module.by_loader) is defaultdict
        assert module.nested == [[0, 2], [1, 3]]
        assert module.counts == {"right": 6, "all": 4}
        assert module.rows.tolist() == [[0.0], [1.0], [2.0], [3.0]]
        assert module.more.tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
        assert module.matrix[:5].sum(1).tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]
        assert module._last == 3.0


def test_a_cache_stays_with_the_worker_that_has_made_it() -> None:
    (first, second) = evaluate([[0, 1], [2, 3]], Evaluated.batch)
    assert (sorted(first.cache), sorted(second.cache)) == ([0, 1], [2, 3])


def _grows_from_none(module: Any, number: int) -> None:
    rows = torch.tensor([float(number)])
    module.from_none = rows if module.from_none is None else torch.cat([module.from_none, rows])


def _changes_a_large_tensor(module: Any, number: int) -> None:
    module.large[number] += 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (_grows_from_none, r"self.from_none begins with None.*torch.empty\(0\)"),
        (_changes_a_large_tensor, "90000 elements"),
    ],
)
def test_what_cannot_be_carried_is_refused(body: Callable[[Any, int], None], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        evaluate([[0, 1], [2, 3]], body)


def test_a_mask_that_is_made_once_is_no_row() -> None:
    def body(module: Any, number: int) -> None:
        if module.from_none is None:
            module.from_none = torch.ones(3)

    assert [module.from_none.tolist() for module in evaluate([[0, 1], [2, 3]], body)] == [[1.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize(
    "body",
    [
        lambda module: module.nested[0].append(1.0),
        lambda module: module.counts.update(right=2),
        lambda module: setattr(module, "more", torch.cat([module.more, torch.ones(1, 2)])),
    ],
)
def test_a_training_step_does_not_carry_them(body: Callable[[Any], object]) -> None:
    module: Any = Evaluated()
    step: Any = SimpleNamespace(log=lambda **values: None, shard=SimpleNamespace(index=0))
    with parts.attributes(module) as record:
        body(module)
    assert (module.nested, module.counts, len(module.more)) == ([[], []], {"right": 0}, 1)
    with pytest.raises(ConfigError, match="training_step"):
        parts.tell(step, module, 0, record)
