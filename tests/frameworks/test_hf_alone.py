"""transformers.Trainer in a job of one worker that has all ranks, in this process: what it evaluates and keeps."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from elastic.errors import BufferChanged, ConfigError, StateChanged
from runtime.frontends.frameworks import hugging_face
from runtime.frontends.frameworks.rank_batches import RankBatches
from tests.frameworks.in_process import adapted
from tests.unit.runtime.frontends.ddp import threads

transformers = pytest.importorskip("transformers", reason="frameworks are installed by `make test-frameworks`")
pytest.importorskip("accelerate")
Trainer: Any = transformers.Trainer

RANKS = 4
LISTED_S = 20
"""An evaluation that is refused does not list the batches of an infinite sampler."""


@pytest.fixture(autouse=True)
def in_place() -> Iterator[None]:
    trainer = importlib.import_module("transformers.trainer")
    with adapted(lambda seams: hugging_face.install(seams, trainer)):
        yield


class Model(nn.Module):
    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.dtypes.append(self.layer.weight.dtype)
        logits = self.layer(x.to(self.layer.weight.dtype)).float()
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Points(Dataset[Any]):
    def __init__(self, samples: int = 32) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((3,), index / 10), "labels": index % 2}


class Tokens(nn.Module):
    """Its loss is the sum over its tokens divided by the number that Trainer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.linspace(-2, 2, 5))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **told: Any) -> dict[str, torch.Tensor]:
        logits = self.scores * torch.ones(*labels.shape, 5)
        total = nn.functional.cross_entropy(logits.reshape(-1, 5), labels.reshape(-1), reduction="sum")
        return {"loss": total / told["num_items_in_batch"], "logits": logits[:, 0]}


class Words(Dataset[Any]):
    """Sequences of different lengths."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = torch.full((8,), -100)
        labels[: 1 + index % 7] = index % 5
        return {"x": torch.zeros(8), "labels": labels}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(Points()[index] for index in range(32))


def arguments(tmp_path: Path, **given: Any) -> Any:
    fixed: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 8,
        "max_steps": 2,
        "learning_rate": 0.1,
        "optim": "sgd",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return transformers.TrainingArguments(**{**fixed, **given})


def trained(tmp_path: Path, cls: Any = None, model: nn.Module | None = None, **given: Any) -> Any:
    """A trainer behind its train()."""
    parts = {name: given.pop(name) for name in ("compute_metrics", "eval_dataset", "callbacks") if name in given}
    data = given.pop("train_dataset", None) or Points()
    transformers.set_seed(0)
    made = cls or Trainer
    trainer = made(model or Model(), arguments(tmp_path, **given), train_dataset=data, **parts)
    trainer.train()
    return trainer


def alone(main: Callable[[], Any]) -> Any:
    """What `main` returns, in a job of one worker."""
    found: list[Any] = []
    threads.alone(lambda: found.append(main()), RANKS)
    return found[0]


# Evaluations


@pytest.mark.parametrize("across", [True, False])
def test_the_loss_of_an_evaluation_is_that_of_torchrun_however_tokens_are_counted(tmp_path: Path, across: bool) -> None:
    """22 samples in batches of 4: three ranks have the last ones together, and one of them has two."""

    def main() -> tuple[float, float]:
        trainer = trained(
            tmp_path,
            model=Tokens(),
            train_dataset=Words(),
            eval_dataset=Words(),
            average_tokens_across_devices=across,
            per_device_eval_batch_size=4,
        )
        with torch.no_grad():
            each = nn.functional.cross_entropy(trainer.model.scores.expand(5, 5), torch.arange(5), reduction="none")
        counts = torch.tensor([1 + index % 7 for index in range(22)])
        sums = counts * each[torch.arange(22) % 5]
        size = 16 if across else 4  # over which tokens have the same weight
        parts = zip(sums.split(size), counts.split(size), strict=True)
        wanted = sum(len(some) * some.sum() / count.sum() for some, count in parts) / 22
        return trainer.evaluate()["eval_loss"], float(wanted)

    found, wanted = alone(main)
    assert found == pytest.approx(wanted, rel=1e-6)


def test_an_evaluation_before_train_has_the_loss_of_one_behind_it(tmp_path: Path) -> None:
    def main() -> tuple[float, float]:
        trainer = Trainer(Tokens(), arguments(tmp_path, learning_rate=0.0), train_dataset=Words(), eval_dataset=Words())
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        return before, trainer.evaluate()["eval_loss"]

    before, behind = alone(main)
    assert before == behind


@pytest.mark.parametrize("batch_eval_metrics", [False, True])
def test_each_sample_of_an_evaluation_weighs_the_same(tmp_path: Path, batch_eval_metrics: bool) -> None:
    class Counts:
        right = seen = 0

        def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
            self.right += int((torch.as_tensor(prediction.predictions).argmax(-1) == _labels(prediction)).sum())
            self.seen += len(prediction.label_ids)
            return {"right": self.right, "seen": self.seen} if compute_result else {}

    def main() -> tuple[dict[str, float], float, int]:
        trainer = trained(
            tmp_path, eval_dataset=Points(33), compute_metrics=Counts(), batch_eval_metrics=batch_eval_metrics
        )
        inputs = torch.stack([Points()[index]["x"] for index in range(33)])
        labels = torch.arange(33) % 2
        with torch.no_grad():
            out = trainer.model(inputs, labels)
        return trainer.evaluate(), float(out["loss"]), int((out["logits"].argmax(-1) == labels).sum())

    found, loss, right = alone(main)
    assert found["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert (found["eval_right"], found["eval_seen"]) == (right, 33)


def _labels(prediction: Any) -> torch.Tensor:
    return torch.as_tensor(prediction.label_ids)


def test_metrics_by_batch_have_the_inputs_that_were_asked_for(tmp_path: Path) -> None:
    seen: list[float] = []

    def noted(prediction: Any, compute_result: bool) -> dict[str, float]:
        seen.extend(prediction.inputs["x"][:, 0].tolist())
        return {}

    def main() -> None:
        options: dict[str, Any] = {"batch_eval_metrics": True, "include_for_metrics": ["inputs"]}
        trained(tmp_path, eval_dataset=Points(10), compute_metrics=noted, **options).evaluate()

    alone(main)
    assert seen == pytest.approx([index / 10 for index in range(10)])


def test_a_stream_cannot_be_evaluated(tmp_path: Path) -> None:
    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LISTED_S)
    try:
        with pytest.raises(ConfigError, match="Evaluation of Stream, which has no random access"):
            alone(lambda: trained(tmp_path, eval_dataset=Stream()).evaluate())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_an_evaluation_computes_with_the_weights_that_trainer_has_cast(tmp_path: Path) -> None:
    def main() -> list[torch.dtype]:
        trainer = trained(tmp_path, eval_dataset=Points(), bf16_full_eval=True)
        trainer.model.dtypes.clear()
        trainer.evaluate()
        return list(trainer.model.dtypes)

    assert alone(main) == 4 * [torch.bfloat16]


# What cannot be trained


class Free(torch.optim.SGD):
    """As optimizers without a schedule: evaluations have other weights."""

    def eval(self) -> None: ...
    def train(self) -> None: ...


def test_an_optimizer_with_other_weights_in_evaluations_is_refused(tmp_path: Path) -> None:
    def main() -> None:
        model = Model()
        optimizers = (Free(model.parameters(), lr=0.1), None)
        Trainer(model, arguments(tmp_path), train_dataset=Points(), optimizers=optimizers).train()

    with pytest.raises(ConfigError, match=r"Free has other weights in evaluations .* with --restart"):
        alone(main)


# Batches


@pytest.mark.parametrize("seed", [None, 7])
def test_masks_depend_on_the_place_of_a_batch_also_with_a_seed_of_its_own(tmp_path: Path, seed: int | None) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {**{f"w{number}": number for number in range(50)}, "[MASK]": 50, "[PAD]": 51}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")),
        mask_token="[MASK]",
        pad_token="[PAD]",
    )

    class Lines(Points):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": [(index + place) % 50 for place in range(16)]}

    def main() -> None:
        collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=True, seed=seed)
        settings = arguments(tmp_path, remove_unused_columns=False)
        trainer = Trainer(Model(), settings, train_dataset=Lines(), data_collator=collator)
        source = RankBatches(trainer.get_train_dataloader(), RANKS, 1, 42)
        found = [source._fetch(0, 1, rank)[0]["labels"] for rank in (2, 3, 2)]
        assert torch.equal(found[0], found[2])
        assert not torch.equal(found[0] == -100, found[1] == -100)

    alone(main)


# Attributes of a trainer


class Annealed(Trainer):  # type: ignore[misc]  # it is Any here
    """Its loss depends on how often it was called, and it logs what it has collected since."""

    calls = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.penalties: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.total = 0.0
        self.last: float | None = None
        self.seen: list[int] = []

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **told: Any) -> Any:
        self.calls += 1
        self.seen.append(self.calls)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **told)
        self.losses.append(loss.detach())
        self.last = float(loss.detach())
        self.total += self.last
        penalty = self.calls / 100 * self.model.layer.weight.pow(2).sum()
        self.penalties.append(float(penalty.detach()))
        return (loss + penalty, outputs) if return_outputs else loss + penalty

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.losses and "loss" in logs:
            logs["own_loss"] = torch.stack(self.losses).mean().item()
            logs["penalty"], logs["collected"] = sum(self.penalties) / len(self.penalties), len(self.penalties)
            self.penalties, self.losses = [], []
        super().log(logs, *args, **kwargs)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_attributes_that_compute_loss_changes_have_the_mean_of_all_ranks(tmp_path: Path, accumulated: int) -> None:
    def main() -> Any:
        return trained(tmp_path, Annealed, max_steps=3, gradient_accumulation_steps=accumulated)

    trainer = alone(main)
    assert trainer.calls == 3 * accumulated
    assert trainer.seen == list(range(1, 3 * accumulated + 1))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["collected"] for row in rows] == 3 * [accumulated]
    for row in rows:
        assert row["own_loss"] + row["penalty"] == pytest.approx(row["loss"], rel=1e-5)
    assert trainer.last == pytest.approx(rows[-1]["own_loss"], rel=0.2)
    assert trainer.total == pytest.approx(sum(accumulated * row["own_loss"] for row in rows), rel=1e-5)


def test_gradients_are_in_sync_in_the_last_batch_of_a_rank_alone(tmp_path: Path) -> None:
    class Asks(Trainer):  # type: ignore[misc]  # it is Any here
        synced = calls = 0

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.synced += int(self.accelerator.sync_gradients)
            return super().training_step(*args, **kwargs)

    trainer = alone(lambda: trained(tmp_path, Asks, gradient_accumulation_steps=3, train_dataset=Points(48)))
    assert (trainer.calls, trainer.synced) == (6, 2)
    assert trainer.accelerator.sync_gradients


def test_attributes_that_an_evaluation_changes_are_those_of_one_rank(tmp_path: Path) -> None:
    """Seven batches: ranks have four of them at the same time, then three. These begin with what was before it."""

    def main() -> Any:
        trainer = trained(tmp_path, Annealed, eval_dataset=Points(50))
        trainer.evaluate()
        return trainer

    trainer = alone(main)
    assert trainer.calls == 4
    assert trainer.seen == [1, 2, 3, 3]


def test_what_a_step_does_not_carry_is_named(tmp_path: Path) -> None:
    class Texts(Trainer):  # type: ignore[misc]  # it is Any here
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.texts: list[str] = []

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.texts.append("a line")
            return super().compute_loss(*args, **kwargs)

    with pytest.raises(ConfigError, match=r"of Texts appends to self.texts what a step does not carry: .*--restart"):
        alone(lambda: trained(tmp_path, Texts))


def test_a_list_that_is_another_one_each_time_is_that_of_the_last_rank(tmp_path: Path) -> None:
    class Last(Trainer):  # type: ignore[misc]  # it is Any here
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.shape = [0, 0]

        def compute_loss(self, model: Any, inputs: Any, **told: Any) -> Any:
            self.shape = list(inputs["x"].shape)
            self.made = [float(inputs["x"][0, 0])]
            return super().compute_loss(model, inputs, **told)

    trainer = alone(lambda: trained(tmp_path, Last))
    assert trainer.shape == [2, 3]
    assert len(trainer.made) == 1


# Rows of self.log() in compute_loss()


class Logs(Trainer):  # type: ignore[misc]  # it is Any here
    text: Any = 1

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **told: Any) -> Any:
        self.log({"mean_x": inputs["x"].mean(), "text": self.text})
        return super().compute_loss(model, inputs, *args, **told)


def test_what_ranks_log_at_the_same_time_is_one_row_with_their_mean(tmp_path: Path) -> None:
    """An evaluation has seven batches: ranks have four of them at the same time, then three."""

    def main() -> list[dict[str, float]]:
        trainer = trained(tmp_path, Logs, gradient_accumulation_steps=2, eval_dataset=Points(50))
        trainer.evaluate()
        return [row for row in trainer.state.log_history if "mean_x" in row]

    rows = alone(main)
    assert [(row["step"], row["text"]) for row in rows] == [(0, 1), (0, 1), (1, 1), (1, 1), (2, 1), (2, 1)]
    assert sum(row["mean_x"] for row in rows[:4]) / 4 == pytest.approx(1.55)  # of all samples
    assert rows[4]["mean_x"] == pytest.approx(1.55)  # of the first four batches


def test_a_row_that_has_no_mean_is_refused(tmp_path: Path) -> None:
    class Texts(Logs):
        text = "a line"

    with pytest.raises(ConfigError, match=r"self.log\(\) in compute_loss.* of Texts has 'text', a str.*in a callback"):
        alone(lambda: trained(tmp_path, Texts))


# What a script calls by itself, and what it has of its own


def test_a_script_may_call_methods_of_the_loop_by_itself(tmp_path: Path) -> None:
    def main() -> list[Any]:
        trainer = Trainer(Model(), arguments(tmp_path), train_dataset=Points())
        trainer.current_gradient_accumulation_steps = 1  # Trainer's own step wants it
        found = []
        for _ in range(2):  # before train(), and behind it
            batches, items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 2, trainer.args.device)
            loss = trainer.training_step(trainer.model, batches[0], num_items_in_batch=items)
            trainer._track_num_input_tokens(batches[0])
            found.append(([len(batch["x"]) for batch in batches], float(loss) > 0))
            trainer.model.zero_grad()
            trainer.train()
        return [*found, trainer.state.global_step, trainer.control.should_training_stop]

    assert alone(main) == [([2, 2], True), ([2, 2], True), 2, True]


def test_a_class_may_look_at_get_batch_samples_and_change_nothing(tmp_path: Path) -> None:
    class Looks(Trainer):  # type: ignore[misc]
        seen: ClassVar[list[int]] = []

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            found = super().get_batch_samples(*args, **kwargs)
            self.seen.append(len(found[0]))
            return found

    trainer = alone(lambda: trained(tmp_path, cls=Looks, gradient_accumulation_steps=2))
    assert Looks.seen == [2, 2]
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("calls", [True, False])
def test_batches_that_a_class_takes_itself_are_refused(tmp_path: Path, calls: bool) -> None:
    class Filters(Trainer):  # type: ignore[misc]
        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            if calls:
                return super().get_batch_samples(epoch_iterator, num_batches, device)[0][:1], None
            return [next(epoch_iterator) for _ in range(num_batches)], None

    with pytest.raises(ConfigError, match=r"get_batch_samples\(\) of Filters gives other batches.*--restart"):
        alone(lambda: trained(tmp_path, cls=Filters, gradient_accumulation_steps=2))


def test_a_buffer_that_forward_changes_is_refused_with_what_to_do(tmp_path: Path) -> None:
    class Counts(Model):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if self.training:
                self.seen = self.seen + len(x)
            return super().forward(x, labels)

    with pytest.raises(BufferChanged, match=r"model\.seen changed in forward.*elastic run --restart") as raised:
        alone(lambda: trained(tmp_path, model=Counts()))
    assert "job.register" not in str(raised.value)


def test_weights_that_compute_loss_changes_are_refused_with_what_to_do(tmp_path: Path) -> None:
    class Decays(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                self.model.layer.bias.mul_(0.9)
            return super().compute_loss(model, *args, **kwargs)

    with pytest.raises(StateChanged, match=r"model\.layer\.bias changed while the ranks .* callback.*--restart"):
        alone(lambda: trained(tmp_path, cls=Decays))
