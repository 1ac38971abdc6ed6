"""A program: one process trains with transformers.Trainer, in one round and in two, the second from memory.

`trainer_rounds.py NAME...` prints for each name a line `NAME DIGEST LOG`: of the weights, and the log without times, in
JSON. `quiet` has one round, `two` has two. `odd` has one round, and a log with a value that JSON cannot have.
"""

import functools
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, trainer

from runtime.frontends.restart.kept_trainer import KeptTrainer, install
from runtime.recovery.kept.choice import RoundNumber, newest_whole
from runtime.recovery.kept.look import KeptHere
from runtime.recovery.kept.place import KeptPlace
from tests.memory_directory import memory_directory
from tests.unit.runtime.recovery.kept.worlds import fork

STEPS, FIRST = 14, 5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels):
        found = self.layer(x).squeeze(-1)
        return {"loss": (found - labels).square().mean(), "logits": found}


class Logging(Trainer):
    """Logs numbers that are no Python numbers, as scripts of users do."""

    odd = False

    def log(self, logs, *args, **kwargs):
        logs["zero_d"] = torch.tensor(0.5)
        if self.odd:
            logs["odd"] = torch.ones(2)
        super().log(logs, *args, **kwargs)


class Stop(TrainerCallback):
    until = STEPS + 1  # of the class: attributes of a callback are those of the round before

    def on_step_begin(self, args, state, control, **words):
        if state.global_step == self.until:
            KeptTrainer.first._kept.wait()
            os._exit(0)  # the other round begins now; no farewell


def train(name, until, home, place):
    os.environ.update(place.to_environment())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(20)]
    install(trainer)
    arguments = TrainingArguments(
        output_dir=str(home / "output"),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        learning_rate=0.1,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ignore_data_skip=True,
    )
    one = Logging(model=Model(), args=arguments, train_dataset=data, callbacks=[Stop()])
    Stop.until = until
    one.odd = name == "odd"
    names = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({key: str(value) for key, value in names.items()})  # not before: there is no process group
    one.train()
    weights = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in one.model.parameters())).hexdigest()
    log = [{key: float(row[key]) for key in row if key in ("step", "loss", "zero_d")} for row in one.state.log_history]
    (home / "said").write_text(f"{weights} {json.dumps(log)}")


def run(name):
    with memory_directory() as directory:
        home = Path(directory)
        for number, until in enumerate((FIRST, STEPS + 1) if name == "two" else (STEPS + 1,), 1):
            source = newest_whole(KeptHere(directory, None).check(0, 1))
            assert (source.step if source else 0) == (0 if number == 1 else FIRST), "the newest step is whole"
            place = KeptPlace(directory, RoundNumber(0, number), source, own=True)
            if os.waitpid(fork(functools.partial(train, name, until, home, place)), 0)[1]:
                sys.exit(1)
        return (home / "said").read_text()


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(argument, run(argument), flush=True)
