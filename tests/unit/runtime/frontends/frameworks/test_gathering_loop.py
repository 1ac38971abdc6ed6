"""An evaluation whose loop gathers, of a script for prepared DataLoaders, in worlds with deaths and newcomers."""

from __future__ import annotations

import itertools
from collections import UserDict
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from elastic.errors import MidShardCollective, NotInPlace
from runtime.frontends.ddp.evaluation.fed_metrics import guard
from runtime.frontends.ddp.evaluation.gathering_loop import GatheringLoop
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.ddp.seams import Seams
from runtime.frontends.frameworks.accelerate_batches import PreparedBatches, PreparedTraining
from tests.unit.jobs import dataset
from tests.unit.runtime.frontends.ddp import threads
from tests.unit.runtime.frontends.ddp.threads import RANKS, Main
from tests.unit.thoroughness import some

EPOCHS = 3


class Shard(BatchSampler):
    """As accelerate's BatchSamplerShard: rank r has the batches r, r + ranks, ... of another batch sampler."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler, self.num_processes, self.process_index = batch_sampler, RANKS, 0

    def __iter__(self) -> Any:
        return iter(list(self.batch_sampler)[self.process_index :: RANKS])


class Counts:
    """What a framework counts in a turn."""

    def __init__(self) -> None:
        self.passes = self.turns = 0

    def note(self) -> None:
        self.passes += 1

    def put_back(self) -> None:
        self.turns += 1


class Prepared:
    """As accelerate's DataLoaderShard."""

    num_workers, worker_init_fn, device, end_of_dataloader, iteration = 0, None, None, False, 0

    def __init__(self, samples: int, size: int, generator: torch.Generator | None = None) -> None:
        self.dataset = dataset(samples)
        order = RandomSampler(self.dataset, generator=generator) if generator else SequentialSampler(self.dataset)
        self.batch_sampler = Shard(BatchSampler(order, size, drop_last=False))
        self.counts = Counts()

    def collate_fn(self, samples: list[Any]) -> Any:
        return tuple(map(torch.stack, zip(*samples, strict=True)))

    def set_epoch(self, epoch: int) -> None:
        self.iteration = epoch

    def begin(self) -> None:
        self.end_of_dataloader = False

    def end(self) -> None:
        pass

    def __len__(self) -> int:
        return len(list(self.batch_sampler))

    def __iter__(self) -> Iterator[Any]:
        script, loader = RankScript.running(), self
        if torch.is_grad_enabled() and all(model.training for model in script.objects.wrapped):
            return PreparedTraining(script, loader, self.counts)
        return GatheringLoop(script, loader, PreparedBatches.of_evaluation(loader, script)).batches()


def gather(tensor: torch.Tensor) -> torch.Tensor:
    loop = RankScript.running().evaluations.loop
    assert isinstance(loop, GatheringLoop)
    return loop.gather(tensor)


class Log:
    """What the workers have found, in an object that elastic does not follow."""

    def __init__(self) -> None:
        self.rows: UserDict[int, list[Any]] = UserDict()

    def __call__(self, row: Any) -> None:
        self.rows.setdefault(id(RankScript.running()), []).append(row)


class Metric:
    """As evaluate.EvaluationModule: it must not be fed with nothing. Its list is followed, and its tuple is not."""

    def __init__(self) -> None:
        self.listed: list[int] = []
        self.hidden: tuple[int, ...] = ()

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        right = int((predictions[0] == references[0]) + (predictions == references).sum())
        self.listed.append(right)
        self.hidden = (*self.hidden, right)

    add = add_batch

    def compute(self) -> tuple[int, int]:
        found = sum(self.listed), sum(self.hidden)
        self.listed, self.hidden = [], ()
        return found


class Kit:
    """What each script of this module has made."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.train = Prepared(24, 2, torch.Generator().manual_seed(3))
        self.evaluated = Prepared(36, 3)
        self.metric = Metric()

    def epoch(self, at: int = -1, then: Callable[[], object] = int) -> None:
        """then: what comes behind this step of the epoch."""
        self.model.train()
        for number, (x, y) in enumerate(self.train):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            if number == at:
                then()
                self.model.train()

    def evaluate(self, until: int = 99) -> tuple[Any, ...]:
        """What the ranks have gathered and what they have added up themselves, also where the loop is left early."""
        self.model.eval()
        right = seen = 0
        own, parts, smallest, largest = 0.0, [], float("inf"), float("-inf")
        for number, (x, y) in enumerate(self.evaluated):
            if number == until:
                break
            with torch.no_grad():
                outputs = self.model(x)
            loss = F.cross_entropy(outputs, y).item()
            own += loss
            smallest, largest = min(smallest, loss), max(largest, loss)
            found, labels = gather(outputs.argmax(1)), gather(y)
            right += int((found == labels).sum())
            seen += len(labels)
            parts.append(found)
            self.metric.add_batch(predictions=found, references=labels)
        return right, seen, own, smallest, largest, torch.cat(parts).tolist(), self.metric.compute()


def gathering(log: Log, *, until: int = 99) -> Main:
    """Trains with a rate that depends on what its evaluations have gathered."""

    def main() -> None:
        kit = Kit()
        best = waited = 0
        for _ in range(EPOCHS):
            kit.epoch()
            right, _, own, *_ = found = kit.evaluate(until)
            waited = 0 if right > best else waited + 1
            best = max(best, right)
            log((*found, best, waited))
            for group in kit.optimizer.param_groups:
                group["lr"] = 0.05 / (1 + right + own)

    return main


def inside(log: Log) -> Main:
    """Evaluates in the middle of its epochs."""

    def main() -> None:
        kit = Kit()

        def then() -> None:
            right, _, own, *_ = found = kit.evaluate()
            log(found)
            for group in kit.optimizer.param_groups:
                group["lr"] = 0.05 / (1 + right + own)

        for _ in range(EPOCHS):
            kit.epoch(1, then)

    return main


def rows_of(log: Log) -> set[str]:
    """Those of workers that were there all the time, without the places where newcomers know less."""
    return {repr(rows) for rows in log.rows.values() if len(rows) == EPOCHS}


@pytest.fixture(autouse=True)
def seams() -> Iterator[None]:
    found = Seams()
    guard(found, SimpleNamespace(__name__="evaluate", EvaluationModule=Metric))
    with threads.seams():
        yield
    found.restore()


def check(workers: int, until: int = 99, **how: Any) -> None:
    quiet, log = Log(), Log()
    digest, ledger = threads.alone(gathering(quiet, until=until))
    outcome = threads.together(workers, gathering(log, until=until), **how)
    assert not outcome.errors
    assert set(outcome.digests.values()) == {digest}
    assert all(rows == ledger for name, rows in outcome.ledgers.items() if name not in outcome.joined)
    assert rows_of(log) == rows_of(quiet), "also in a newcomer: it is told what it has not gone through"


def test_values_come_in_rank_order_and_once() -> None:
    log = Log()
    threads.alone(gathering(log))
    (rows,) = log.rows.values()
    for _, seen, *_, parts, _, _, _ in rows:
        assert seen == len(parts) == 36
    assert len({repr(row) for row in rows}) == EPOCHS


def test_extremes_are_those_of_all_batches_of_all_ranks() -> None:
    def main() -> None:
        kit = Kit()
        kit.epoch()
        *_, smallest, largest, _, _ = kit.evaluate()
        losses = []
        for x, y in zip(kit.evaluated.dataset[:][0].split(3), kit.evaluated.dataset[:][1].split(3), strict=True):
            with torch.no_grad():  # of a copy, as a loader collates: some processors sum a view in another order
                losses.append(F.cross_entropy(kit.model.module(x.clone()), y.clone()).item())
        assert (smallest, largest) == (min(losses), max(losses))

    for workers in (1, 3):
        assert not threads.together(workers, main).errors


def test_what_training_has_left_in_a_name_is_no_mistake() -> None:
    """Each worker has the loss of its own last turn there."""

    def main() -> None:
        kit = Kit()
        for _ in range(2):
            total = 0.0
            for x, y in kit.train:
                kit.optimizer.zero_grad()
                loss = F.cross_entropy(kit.model(x), y)
                loss.backward()
                value = loss.item()
                kit.optimizer.step()
            kit.model.eval()
            for x, y in kit.evaluated:
                with torch.no_grad():
                    value = F.cross_entropy(kit.model(x), y).item()
                total += value
                gather(y)
            for group in kit.optimizer.param_groups:
                group["lr"] = 0.05 / (1 + total)
            kit.model.train()

    digest, _ = threads.alone(main)
    for workers in (2, 3):
        outcome = threads.together(workers, main)
        assert not outcome.errors
        assert set(outcome.digests.values()) == {digest}


def test_a_rank_that_prints_in_an_evaluation_prints_once_a_batch() -> None:
    printed = SimpleQueue[int]()  # nothing follows it

    def main() -> None:
        kit = Kit()
        kit.epoch()
        kit.model.eval()
        for number, (x, _) in enumerate(kit.evaluated):
            gather(x)
            if dist.get_rank() == 0:
                printed.put(number)

    for workers in (1, 3):
        assert not threads.together(workers, main).errors
        assert [printed.get() for _ in range(printed.qsize())] == [0, 1, 2]


def test_a_shuffled_evaluation_inside_an_epoch_has_each_sample_once() -> None:
    found = SimpleQueue[list[float]]()  # nothing follows it

    def main() -> None:
        kit = Kit()
        kit.evaluated = Prepared(36, 3, torch.Generator().manual_seed(5))

        def then() -> None:
            kit.model.eval()
            samples = []
            for x, _ in kit.evaluated:
                samples.extend(gather(x[:, 0]).tolist())
            if not RankScript.running().silent:
                found.put(samples)

        for _ in range(2):
            kit.epoch(1, then)

    for workers in (1, 2, 3):
        assert not threads.together(workers, main).errors
        seen = [found.get() for _ in range(found.qsize())]
        assert len(seen) == 2 * workers
        assert all(len(set(samples)) == 36 for samples in seen)
        assert len({tuple(samples) for samples in seen}) == 2


@pytest.mark.parametrize("gathers", [True, False])
def test_a_loop_that_is_left_at_its_end_is_refused(gathers: bool) -> None:
    """The turns of other ranks are missing."""

    def main() -> None:
        kit = Kit()
        kit.epoch()
        kit.model.eval()
        for number, (x, y) in enumerate(kit.evaluated):
            with torch.no_grad():
                kit.model(x)
            if gathers:
                gather(y)
            if number == 1:
                break
        dist.barrier()

    with pytest.raises(MidShardCollective, match="without `break`"):
        threads.alone(main)


def test_a_newcomer_counts_the_epochs_that_are_left_early() -> None:
    def main() -> None:
        kit = Kit()
        for _ in range(4):
            kit.model.train()
            for number, (x, y) in enumerate(kit.train):
                kit.optimizer.zero_grad()
                F.cross_entropy(kit.model(x), y).backward()
                kit.optimizer.step()
                if number == 1:
                    break

    digest, _ = threads.alone(main)
    outcome = threads.together(2, main, newcomers=1, asked_at=6, admit_at=6)
    assert not outcome.errors
    assert set(outcome.digests.values()) == {digest}


@pytest.mark.parametrize("until", [99, 2])
def test_any_number_of_workers_finds_the_same(until: int) -> None:
    for workers in some((2, 3, 4, 6), 1, f"gathering {until}"):
        check(workers, until)


def test_a_death_in_any_operation_of_an_evaluation_changes_nothing() -> None:
    # Of an epoch: three steps, and two operations for each of three batches.
    for operation, units in some(list(itertools.product(range(3, 10), (0, 1))), 2, "gathering deaths"):
        check(3, kills={"w0": (operation, units)})
    check(4, kills={"w0": (4, 0), "w2": (5, 0), "w1": (7, 1)})


def test_a_newcomer_knows_what_the_others_have_found() -> None:
    for asked, admitted in some([(0, 0), (0, 1), (3, 4), (4, 5), (6, 6), (6, 8)], 1, "gathering newcomers"):
        check(2, newcomers=1, asked_at=asked, admit_at=admitted)
    check(2, kills={"w0": (15, 0)}, newcomers=1, asked_at=3, admit_at=4)


def test_an_evaluation_in_the_middle_of_an_epoch_is_done_once_a_step() -> None:
    digest, ledger = threads.alone(inside(Log()))
    for workers, how in ((2, {}), (3, {"kills": {"w0": (4, 1)}}), (2, {"newcomers": 1, "asked_at": 3, "admit_at": 4})):
        outcome = threads.together(workers, inside(Log()), **how)
        assert not outcome.errors
        assert set(outcome.digests.values()) == {digest}
        assert all(rows == ledger for name, rows in outcome.ledgers.items() if name not in outcome.joined)


def evaluates(body: Callable[[Any, Any, dict[str, Any]], None]) -> Main:
    def main() -> None:
        kit = Kit()
        kit.epoch()
        kit.model.eval()
        kept: dict[str, Any] = {"total": 0.0, "list": []}
        for x, y in kit.evaluated:
            with torch.no_grad():
                body(kit.model(x), y, kept)

    return main


def mixes(outputs: Any, y: Any, kept: dict[str, Any]) -> None:
    kept["total"] += float(outputs.sum() * gather(y).sum())
    kept["total"] += float(outputs.sum())


def feeds_its_own(outputs: Any, y: Any, kept: dict[str, Any]) -> None:
    Metric().add_batch(predictions=outputs.argmax(1), references=y)
    gather(y)


def collects(outputs: Any, y: Any, kept: dict[str, Any]) -> None:
    gather(y)
    kept["list"].append(outputs)


def broadcasts(outputs: Any, y: Any, kept: dict[str, Any]) -> None:
    dist.broadcast(y, 0)


def gathers_unequal(outputs: Any, y: Any, kept: dict[str, Any]) -> None:
    gather(torch.zeros(2, 1 + int(y[0] != y[1])))


@pytest.mark.parametrize(
    ("body", "error", "match"),
    [
        (mixes, NotInPlace, "changes by a value of the batch together with what gather"),
        (collects, NotInPlace, "a list that gets other things than one number a batch"),
        (feeds_its_own, NotInPlace, r"Metric.update\(\) of values of one rank"),
        (broadcasts, MidShardCollective, "dist.broadcast came inside the loop of an evaluation"),
        (gathers_unequal, NotInPlace, "tensors of the shapes .* in the loop of an evaluation"),
    ],
)
def test_what_cannot_be_gathered_is_refused(body: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        threads.alone(evaluates(body))


def sums(outputs: Any, y: Any, kept: dict[str, Any]) -> None:
    whole = y.sum().clone()
    dist.all_reduce(whole)
    kept["total"] += int(whole)
    assert not kept["list"] or kept["list"][-1] <= kept["total"]
    kept["list"].append(int(whole))


def test_a_sum_over_the_ranks_may_come_in_the_loop() -> None:
    totals = []

    def body(outputs: Any, y: Any, kept: dict[str, Any]) -> None:
        sums(outputs, y, kept)
        totals.append(kept["total"])

    for workers in (1, 2):
        totals.clear()
        assert not threads.together(workers, evaluates(body)).errors
        assert max(totals) == int(dataset(36)[:][1].sum())


def test_a_loop_without_a_model_is_an_evaluation_if_it_is_written_as_one() -> None:
    log = Log()

    def main() -> None:
        own, gathered = 0, 0
        with torch.no_grad():
            for _, y in Prepared(36, 3):
                own += int(y.sum())
                gathered += int(gather(y).sum())
        log((own * RANKS, gathered))
        Kit().epoch()

    for workers in (1, 2):
        assert not threads.together(workers, main).errors
    labels = int(dataset(36)[:][1].sum())
    assert [row for rows in log.rows.values() for row in rows] == 3 * [(labels, labels)]


def test_a_loop_that_has_no_model_is_told_to_be_an_evaluation_or_to_prepare_one() -> None:
    def main() -> None:
        dist.init_process_group("gloo")
        for _ in Prepared(24, 2):
            pass

    with pytest.raises(NotInPlace, match=r"has prepared no model.*accelerator.prepare\(\).*torch.no_grad\(\)"):
        threads.alone(main)
