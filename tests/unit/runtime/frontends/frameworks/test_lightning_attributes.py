"""However the batches of an evaluation are spread over workers, all have the attributes that one worker has of them."""

from __future__ import annotations

from collections import defaultdict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import ConfigError
from runtime.frontends.frameworks.lightning import parts

Pair = namedtuple("Pair", "value name")

SPREADS = ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 3], [1], [2]])
"""The batches that each worker computes."""


class Evaluated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._outs: list[Any] = []
        self.nested: list[list[Any]] = [[], []]
        self.preds: list[Any] = []
        self.both = [self.preds, self.nested[0]]
        self.window: list[int] = []
        self.rows, self.matrix = torch.empty(0), torch.zeros(80, 80)
        self.table, self.replaced = torch.arange(2.0), torch.zeros(80, 80)
        self._last: Any = None
        self.cache: dict[Any, Any] = {"shown": None}
        self.by_name: defaultdict[str, list[int]] = defaultdict(list)
        self.counts = {"right": 0}
        self.from_none: Any = None
        self.large = torch.zeros(300, 300)

    def batch(self, number: int) -> None:
        self._outs.append(Pair(torch.tensor(number), "a"))
        self.nested[number % 2].append(number)
        self.preds.append(number)
        self.window = [*self.window, number][-2:]
        one = torch.full((1, 1), float(number))
        self.rows = torch.cat([self.rows, one]) if self.rows.numel() else one
        self.matrix[number, 1] += 1
        self.table = torch.arange(2.0 + number)  # grows with the longest batch
        self.replaced = torch.full((80, 80), float(number))
        self._last = float(number)
        self.cache[number, "logits"] = self.cache["shown"] = torch.tensor(number)


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
        assert [(int(one.value), one.name) for one in module._outs] == [(0, "a"), (1, "a"), (2, "a"), (3, "a")]
        assert module.nested == [[0, 2], [1, 3]]
        assert module.preds == [0, 1, 2, 3]
        assert module.both == [[0, 1, 2, 3], [0, 2]]
        assert module.window == [0, 1, 2, 3], "each batch has put one behind an empty list"
        assert module.rows.tolist() == [[0.0], [1.0], [2.0], [3.0]]
        assert module.matrix[:5].sum(1).tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]
        assert module._last == 3.0


def test_a_list_of_other_items_is_set() -> None:
    def body(module: Any, number: int) -> None:
        module.window = [number, *module.window][:2]

    workers = evaluate([[0, 1], [2, 3]], body)
    assert [module.window for module in workers] == [[0, 1, 2, 3]] * 2
    for module in workers:
        with parts.attributes(module) as record:
            body(module, 7)
        parts.have(module, parts.Record.of(record.plain()))
    assert [module.window for module in workers] == [[7, 0]] * 2


def test_what_is_not_carried_is_not_taken_back() -> None:
    (first, second) = evaluate([[0, 1], [2, 3]], Evaluated.batch)
    assert [sorted(map(str, module.cache)) for module in (first, second)] == [
        ["(0, 'logits')", "(1, 'logits')", "shown"],
        ["(2, 'logits')", "(3, 'logits')", "shown"],
    ]
    assert (int(first.cache["shown"]), int(second.cache["shown"])) == (1, 3)
    assert [float(module.replaced[0, 0]) for module in (first, second)] == [1.0, 3.0]
    assert first.table.tolist() == [0.0, 1.0], "rows are put behind what began without any"


def test_the_values_of_an_evaluation_may_be_inference_tensors() -> None:
    def body(module: Any, number: int) -> None:
        with torch.inference_mode():
            module.large = torch.full((300, 300), float(number))

    (module,) = evaluate([[0, 1, 2, 3]], body)
    assert float(module.large[0, 0]) == 3.0


def _grows_from_none(module: Any, number: int) -> None:
    rows = torch.tensor([float(number)])
    module.from_none = rows if module.from_none is None else torch.cat([module.from_none, rows])


def _changes_a_large_tensor(module: Any, number: int) -> None:
    module.large[number] += 1


def _has_rows_of_other_shapes(module: Any, number: int) -> None:
    module.rows = torch.ones(2, 1 + number)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (_grows_from_none, r"self.from_none begins with None.*torch.empty\(0\)"),
        (_changes_a_large_tensor, "self.large .* 90000 elements"),
        (_has_rows_of_other_shapes, "self.rows .* different shapes"),
        (lambda module, number: module.by_name["a"].append(number), r"self.by_name\['a'\] counts or collects"),
        (lambda module, number: module.counts.update(right=number + 1), r"self.counts\['right'\] counts or collects"),
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
        lambda module: setattr(module, "rows", torch.ones(1, 2)),
    ],
)
def test_a_training_step_does_not_carry_them(body: Callable[[Any], object]) -> None:
    module: Any = Evaluated()
    step: Any = SimpleNamespace(log=lambda **values: None, shard=SimpleNamespace(index=0))
    with parts.attributes(module) as record:
        body(module)
    assert (module.nested, module.rows.numel()) == ([[], []], 0)
    with pytest.raises(ConfigError, match="training_step"):
        parts.tell(step, module, 0, record)


def test_a_large_tensor_that_a_training_step_sets_is_left_out() -> None:
    module: Any = Evaluated()
    step: Any = SimpleNamespace(log=lambda **values: None, shard=SimpleNamespace(index=0))
    with parts.attributes(module) as record:
        module.replaced = torch.ones(80, 80)
    parts.tell(step, module, 0, record)


def test_a_list_that_a_training_step_sets_anew_stays() -> None:
    """Hooks behind the step find that of the last rank."""
    module: Any = Evaluated()
    module._outs, told = [5], []
    step: Any = SimpleNamespace(log=lambda **values: told.append(values), shard=SimpleNamespace(index=0))
    for _ in range(2):
        with parts.attributes(module) as record:
            module._outs = ["hidden", 2]
        parts.tell(step, module, 0, record)
    assert module._outs == ["hidden", 2]
    assert told == [{"sum": {}}, {"sum": {}}]
