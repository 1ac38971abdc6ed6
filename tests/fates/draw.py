"""What one trial trains and what is done to it. One seed is one trial; nothing here looks at a clock or a process."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from typing import Any

MODELS = ("mlp", "norms", "dropout", "transformer", "lstm", "embedding", "tied", "many", "large", "partly_frozen")
OPTIMIZERS = (
    "sgd",
    "momentum",
    "adam",
    "adamw_fused",
    "adamw_foreach",
    "rmsprop",
    "adagrad",
    "radam",
    "adafactor",
    "lion",
)
SCHEDULES = ("none", "none", "cosine", "plateau", "warmup", "by_hand")
SOURCES = ("loader", "loader", "workers", "weighted", "transform", "stream", "drawn")
EXTRAS = (
    "accumulate",
    "agree",
    "autocast",
    "call_before_pass",
    "call_in_epoch",
    "checkpointing",
    "clip",
    "default_dict",
    "draw_after_pass",
    "draw_before_pass",
    "draw_in_epoch",
    "draw_numpy",
    "ema",
    "evaluate",
    "gan",
    "nonfinite",
    "once",
    "queue_state",
    "read_place",
    "read_state",
    "sam",
    "save",
    "scaler",
    "skip",
    "state",
    "tensor_state",
    "unsaved_buffer",
    "weigh",
)
"""What a script does besides; each is drawn by itself. "gan" and "sam" make a second pass."""

INEXACT = "own_generator"
"""What no script may do and keep its bits; never drawn, so that a test can show that it is noticed."""

EXCLUSIVE = (
    {"gan", "sam"},
    {"scaler", "nonfinite", "autocast"},
    {"scaler", "clip"},
    {"scaler", "sam"},
    {"weigh", "skip"},
    {"checkpointing", "autocast"},
)
"""Of each set a script has one at most: together they are not what a script would do."""

ACTS = ("kill", "kill", "kill", "kill", "freeze", "segfault")
VICTIMS = ("oldest", "youngest", "middle", "two", "all_but_one", "newest_process", "fork_server")
WHOLE = (
    "kill_all",
    "kill_agent",
    "kill_rendezvous",
    "freeze_rendezvous",
    "kill_command",
    "stop_command",
    "interrupt_command",
    "signal_all",
)
EVENTS = (
    "announced",
    "committed",
    "snapshot_complete",
    "checkpoint_complete",
    "quiesce_started",
    "state_copied",
    "joined",
)


@dataclass(frozen=True)
class Program:
    model: str
    optimizer: str
    schedule: str
    source: str
    shards: int
    batch_size: int
    samples: int
    epochs: int
    """0: job.steps() without job.epochs()."""
    steps: int
    """In all, or in each epoch."""
    extras: tuple[str, ...]
    pause_ms: int
    """How long each shard takes, but in the quiet run."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        document: dict[str, Any] = json.loads(text)
        return cls(**{**document, "extras": tuple(document["extras"])})


@dataclass(frozen=True)
class Strike:
    """when: "step", of which `number` have been applied; "event", of which that many more have been written since the
    strike before; "start" of the command; "after" the strike before. Then delay_ms pass."""

    when: str
    number: int
    event: str
    delay_ms: int
    act: str
    victim: str
    """Of "kill", "freeze" and "segfault"."""
    freeze_ms: int

    def __str__(self) -> str:
        moment = {"step": f"step {self.number}", "event": f"{self.number} x {self.event}"}.get(self.when, self.when)
        what = f"{self.act} {self.victim}".strip() + (f" for {self.freeze_ms} ms" if "freeze" in self.act else "")
        return f"{what} at {moment} + {self.delay_ms} ms"


@dataclass(frozen=True)
class Trial:
    seed: int
    program: Program
    workers: int
    options: tuple[str, ...]
    strikes: tuple[Strike, ...]


def draw(seed: int) -> Trial:
    rng = random.Random(seed)
    program = _program(rng)
    workers = rng.choice((1, 2, 2, 3, 3, 4))
    count = rng.choice((1, 2, 2, 3, 3, 4, 5))
    total = program.steps * max(1, program.epochs)
    strikes = tuple(_strike(rng, total, workers, first=number == 0) for number in range(count))
    return Trial(seed, program, workers, _options(rng), strikes)


def _program(rng: random.Random) -> Program:
    shards = rng.randint(1, 9)
    batch_size = rng.randint(2 * shards, 2 * shards + 7)  # BatchNorm takes two samples a shard at least
    extras = {extra for extra in EXTRAS if rng.random() < 0.15}
    for group in EXCLUSIVE:
        extras -= set(sorted(extras & group)[1:])
    source, optimizer = rng.choice(SOURCES), rng.choice(OPTIMIZERS)
    epochs = rng.choice((0, 0, 2, 3, 5))
    samples = batch_size * rng.randint(4, 12) + rng.randint(0, batch_size - 1)
    steps = rng.randint(30, 120) if not epochs else rng.randint(4, 30)
    if source in ("loader", "workers", "weighted", "transform") and epochs:
        samples = batch_size * steps + rng.randint(0, batch_size - 1)
    return Program(
        model=rng.choice(MODELS),
        optimizer=optimizer,
        schedule=rng.choice(SCHEDULES),
        source=source,
        shards=shards,
        batch_size=batch_size,
        samples=samples,
        epochs=epochs,
        steps=steps,
        extras=tuple(sorted(extras)),
        pause_ms=max(1, min(40, rng.randint(3000, 9000) // (shards * steps * max(1, epochs)))),
    )


def _options(rng: random.Random) -> tuple[str, ...]:
    options = [f"--checkpoint-every={rng.choice(('auto', '5 steps', '20 steps', 'off'))}"]
    options.append(f"--snapshot-every={rng.choice(('auto', '3 steps', '10 steps', 'off'))}")
    for option, chance in (("--no-retain-results", 0.2), ("--spares=1", 0.2), ("--cold-start", 0.1)):
        if rng.random() < chance:
            options.append(option)
    return tuple(options)


def _strike(rng: random.Random, total: int, workers: int, first: bool) -> Strike:
    whens = ("start", "step", "step", "step") if first else ("after", "after", "step", "event", "event")
    victims = VICTIMS if workers > 1 else ("oldest", "newest_process", "fork_server")
    act, victim = (rng.choice(WHOLE), "") if rng.random() < 0.3 else (rng.choice(ACTS), rng.choice(victims))
    return Strike(
        when=(when := rng.choice(whens)),
        number=rng.randint(0, total * 3 // 4) if when == "step" else rng.randint(1, 2),
        event=rng.choice(EVENTS),
        delay_ms=rng.choice((0, 0, 1, 5, 20, 50, 200, 800)) if when != "start" else rng.randint(0, 4000),
        act=act,
        victim=victim,
        freeze_ms=rng.choice((300, 1200, 4000, 8000)),
    )
