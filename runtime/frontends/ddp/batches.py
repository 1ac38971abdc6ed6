"""What iterating over a DataLoader gives: the turns of a training loop, the batches of an evaluation, or what it always
gives."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.evaluation.first_batch import evaluate
from runtime.frontends.ddp.frames.loop_shape import asked_by_head, loop_around
from runtime.frontends.ddp.frames.places import is_defined_by_script
from runtime.frontends.ddp.own_parts import own_part
from runtime.frontends.ddp.rank_script import RankScript, Turn
from runtime.frontends.ddp.rank_source import Position, RankSource
from runtime.frontends.ddp.sampler_source import SamplerSource, sampler_of


class TrainingBatches(Iterator[Any]):
    """One epoch of training batches. A class and not a generator, as a generator left by `break` says nothing."""

    def __init__(
        self,
        script: RankScript,
        source: Callable[[Position], RankSource],
        evaluation: Callable[[], Iterator[Any]] | None = None,
    ) -> None:
        """evaluation: gives the same batches to a loop that turns out to be one, as it runs the model without gradients
        although it has not called eval()."""
        if script.turn is Turn.ELSEWHERE:
            raise mistakes.behind_a_framework()
        self._script = script
        self._over = False
        self._evaluation = evaluation
        self._instead: Iterator[Any] | None = None
        script.iterate(self, source)

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        if self._instead is None and self._evaluation is not None and self._script.withdraw():
            self._instead = self._evaluation()
        if self._instead is not None:
            return next(self._instead)
        try:
            return self._script.next_batch()
        except StopIteration:
            self._over = True
            raise


def iterate(script: RankScript, original: Any, loader: DataLoader[Any]) -> Iterator[Any]:
    """DataLoader.__iter__. A loader without a DistributedSampler gives each worker the same, as ever."""
    sampler = sampler_of(loader)
    if sampler is None:
        part = None if script.turn is Turn.ELSEWHERE else own_part(loader, script.home, script.ranks)
        if part is not None:
            raise mistakes.own_part(part)
        found: Iterator[Any] = original(loader)
        script.objects.iterates(found)
        return found

    training = all(model.training for model in script.objects.wrapped) or _calls_backward(script)
    training = training and torch.is_grad_enabled()
    again = script.epochs.again(sampler, int(getattr(sampler, "epoch", 0))) if training else 0

    def source(position: Position) -> SamplerSource:
        return SamplerSource(loader, sampler, script.ranks, position, again)

    if not training:
        return evaluate(script, source(Position()))
    return TrainingBatches(script, source, lambda: evaluate(script, source(Position())))


def ask(script: RankScript, original: Any, batches: Iterator[Any]) -> Any:
    """__next__ of what torch's own DataLoader.__iter__ gives."""
    script.objects.asked(batches)
    return original(batches)


def _calls_backward(script: RankScript) -> bool:
    """Whether the `for` loop that begins now calls backward() in any case, by its text. Then it trains, also if the
    model is in eval(), as where a layer is trained on what frozen layers give. In a loop that trains or evaluates, as a
    condition says, eval() decides."""
    for frame in script.frames.standing()[::-1]:
        loop = loop_around([frame])
        if loop is None or not asked_by_head([frame]):
            return False
        if any(map(_calls_in_any_case, loop[1].body)):
            return True
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:  # one that gives the batches of a loop around it
            return False
    return False


def _calls_in_any_case(node: ast.AST) -> bool:
    """Whether backward is called here, not only in one branch of an `if`."""
    if isinstance(node, ast.If):
        return all(any(map(_calls_in_any_case, branch)) for branch in (node.body, node.orelse))
    if isinstance(node, ast.Attribute) and node.attr == "backward":
        return True
    return any(map(_calls_in_any_case, ast.iter_child_nodes(node)))


class Counted(enumerate):  # type: ignore[type-arg]  # generic for the type checker only
    """enumerate(), of which a training loader's batches, also inside tqdm(), zip() or a generator of the script's, are
    counted as each rank counts them: a worker that computes two ranks, or has come later, finds the numbers that the
    others find."""

    def __new__(cls, iterable: Iterable[Any], start: int = 0) -> Any:
        script = RankScript.current()
        if script is not None:
            inner = getattr(iterable, "iterable", iterable)
            if isinstance(inner, DataLoader | Iterator) or is_defined_by_script(type(inner)):
                return _numbered(script, iterable, start)
        return super().__new__(cls, iterable, start)


def _numbered(script: RankScript, iterable: Iterable[Any], start: int) -> Iterator[tuple[int, Any]]:
    """A batch that was handed out since the item before has its own number; other items are counted."""
    count, batches = start, script.handed_out
    for item in iterable:
        if script.handed_out != batches and (number := script.place_in_loop) is not None:
            count = start + number
        yield count, item
        count, batches = count + 1, script.handed_out
