"""What one trial trains and what is done to it. One seed is one trial; nothing here looks at a clock or a process."""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from typing import Any

KINDS = ("steps", "steps", "steps", "outer", "ranks", "ranks", "units", "replayed")
"""What drives a training, and the program that trains:

steps      job.steps(), steps_program.py
outer      job.steps(outer=...), which is DiLoCo or LocalSGD, outer_program.py
ranks      a torchrun script in place, `--ranks`, ranks_program.py
units      elastic.keep(units=...) of a sharded model, in rounds, kept_program.py
replayed   elastic.keep() of a torchrun script that always has N processes, `--restart --ranks`, kept_program.py
"""

FRAMEWORKS = ("trainer", "lightning")
"""Drawn only where these frameworks are installed: their own loop in place, tests/frameworks/scripts/drawn.py."""

IN_ROUNDS = ("units", "replayed")

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
    {"momentum_mean", "momentum_reset"},
    {"localsgd", "pieces"},
    {"momentum_mean", "pieces"},
    {"momentum_mean", "mixed"},
    {"evaluate", "evaluate_each"},
    {"static_graph", "unused"},
    {"static_graph", "accumulate"},
)
"""Of each set a script has one at most: together they are not what a script would do."""

OUTER_EXTRAS = (
    "accumulate",
    "autocast",
    "checkpointing",
    "clip",
    "delay",
    "draw_in_epoch",
    "evaluate",
    "localsgd",
    "mixed",
    "momentum_mean",
    "momentum_reset",
    "once",
    "pieces",
    "state",
)
RANKS_EXTRAS = (
    "accumulate",
    "autocast",
    "clip",
    "drop_last",
    "ema",
    "evaluate",
    "evaluate_each",
    "gather_each",
    "meters",
    "noise",
    "own_snapshot",
    "reduce_each",
    "save",
    "scaler",
    "static_graph",
    "unused",
)
UNITS_EXTRAS = ("clip", "counter", "every", "log", "noise")
REPLAYED_EXTRAS = ("clip", "counter", "ema", "every", "gather", "log", "noise", "own_loader", "scaler")

FRAMEWORK_EXTRAS = (
    "accumulate",
    "autocast",
    "best",
    "clip",
    "drop_last",
    "early_stopping",
    "evaluate",
    "first",
    "leaves_epoch",
    "noisy_data",
    "predict",
    "save",
    "smoothed",
    "twice",
)

SUMMED = (
    ("--reduction=fixed",),
    ("--reduction=fixed64",),
    ("--compression=bf16",),
    ("--compression=fp16",),
    ("--compression=int8",),
)
"""Options that change the bits, and so are those of the quiet run, too."""

SHARDED_MODELS = ("mlp", "dropout", "transformer", "embedding", "large")
SHARDED_OPTIMIZERS = ("sgd", "momentum", "adam", "adamw_foreach", "rmsprop", "radam", "lion")

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
    kind: str
    model: str
    optimizer: str
    schedule: str
    source: str
    shards: int
    """Of a step; the ranks of a torchrun script, or the units of a step."""
    batch_size: int
    samples: int
    epochs: int
    """0: job.steps() without job.epochs(), and always 0 in rounds."""
    steps: int
    """In all, or in each epoch. With outer= these are inner steps of a replica, `every` of them a step of the job."""
    every: int
    """Of outer=, and of elastic.keep; 1 elsewhere."""
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
    """Of "kill", "freeze" and "segfault". "script": a process of the newest round."""
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
    sums: tuple[str, ...]
    """One of SUMMED, or nothing."""
    strikes: tuple[Strike, ...]


def draw(seed: int, kinds: tuple[str, ...] = KINDS) -> Trial:
    """kinds: of which the trial has one; more often, what is named more often."""
    rng = random.Random(seed)
    program = _program(rng, rng.choice(kinds))
    in_rounds = program.kind in IN_ROUNDS
    workers = rng.choice((1, 2, 2, 3) if in_rounds else (1, 2, 2, 3, 3, 4))
    if program.kind == "replayed":
        workers = min(workers, program.shards)
    count = rng.choice((1, 2, 2, 3, 3, 4, 5))
    total = program.steps * max(1, program.epochs)
    if program.kind == "outer":
        total //= program.every
    strikes = tuple(_strike(rng, total, workers, first=number == 0, in_rounds=in_rounds) for number in range(count))
    sums = rng.choice(SUMMED) if not in_rounds and rng.random() < 0.4 else ()
    return Trial(seed, program, workers, _options(rng, program.kind, sums), sums, strikes)


def _program(rng: random.Random, kind: str) -> Program:
    match kind:
        case "steps":
            return _of_steps(rng)
        case "outer":
            return _of_outer(rng)
        case "ranks":
            return _of_ranks(rng)
        case "trainer" | "lightning":
            return _of_framework(rng, kind)
        case _:
            return _in_rounds(rng, kind)


def _extras(rng: random.Random, known: tuple[str, ...], chance: float) -> tuple[str, ...]:
    extras = {extra for extra in known if rng.random() < chance}
    for group in EXCLUSIVE:
        extras -= set(sorted(extras & group)[1:])
    return tuple(sorted(extras))


def _pause_ms(rng: random.Random, turns: int) -> int:
    """So that all shards of all steps take some seconds with one worker."""
    return max(1, min(40, rng.randint(3000, 9000) // turns))


def _of_steps(rng: random.Random) -> Program:
    shards = rng.randint(1, 9)
    batch_size = rng.randint(2 * shards, 2 * shards + 7)  # BatchNorm takes two samples a shard at least
    source = rng.choice(SOURCES)
    epochs = rng.choice((0, 0, 2, 3, 5))
    samples = batch_size * rng.randint(4, 12) + rng.randint(0, batch_size - 1)
    steps = rng.randint(30, 120) if not epochs else rng.randint(4, 30)
    if source in ("loader", "workers", "weighted", "transform") and epochs:
        samples = batch_size * steps + rng.randint(0, batch_size - 1)
    return Program(
        kind="steps",
        model=rng.choice(MODELS),
        optimizer=rng.choice(OPTIMIZERS),
        schedule=rng.choice(SCHEDULES),
        source=source,
        shards=shards,
        batch_size=batch_size,
        samples=samples,
        epochs=epochs,
        steps=steps,
        every=1,
        extras=_extras(rng, EXTRAS, 0.15),
        pause_ms=_pause_ms(rng, shards * steps * max(1, epochs)),
    )


def _of_outer(rng: random.Random) -> Program:
    shards, every = rng.randint(1, 5), 2 * rng.randint(1, 5)
    batch_size, steps = 2 * shards + rng.randint(0, 5), every * rng.randint(8, 25)
    return Program(
        kind="outer",
        model=rng.choice([name for name in MODELS if name != "many"]),
        optimizer=rng.choice(OPTIMIZERS),
        schedule=rng.choice(("none", "cosine", "warmup")),
        source=rng.choice(("loader", "loader", "drawn")),
        shards=shards,
        batch_size=batch_size,
        samples=batch_size * rng.randint(4, 12),
        epochs=0,
        steps=steps,
        every=every,
        extras=_extras(rng, OUTER_EXTRAS, 0.2),
        pause_ms=_pause_ms(rng, shards * steps),
    )


def _samples_of_ranks(rng: random.Random, ranks: int, batch_size: int, batches: int) -> int:
    """The last batch of a rank is whole, or has two samples: BatchNorm takes no single one."""
    short = rng.choice((0, 2)) if batch_size == 4 else 0
    return (batch_size * batches - short) * ranks - rng.randint(0, ranks - 1)


def _of_ranks(rng: random.Random) -> Program:
    ranks, batch_size = rng.randint(1, 6), rng.randint(2, 4)
    epochs, steps = rng.choice((1, 2, 3, 5)), rng.randint(6, 30)
    extras, schedule = _extras(rng, RANKS_EXTRAS, 0.2), rng.choice(SCHEDULES)
    if schedule == "plateau" and not {"evaluate", "evaluate_each"} & set(extras):
        schedule = "cosine"  # what an epoch has summed of its own batches is of the worker's last turns
    return Program(
        kind="ranks",
        model=rng.choice(MODELS),
        optimizer=rng.choice(OPTIMIZERS),
        schedule=schedule,
        source=rng.choice(("loader", "loader", "workers", "transform", "drawn")),
        shards=ranks,
        batch_size=batch_size,
        samples=_samples_of_ranks(rng, ranks, batch_size, steps),
        epochs=epochs,
        steps=steps,
        every=1,
        extras=extras,
        pause_ms=_pause_ms(rng, ranks * steps * epochs),
    )


def _of_framework(rng: random.Random, kind: str) -> Program:
    ranks, batch_size = rng.randint(1, 5), rng.randint(2, 4)
    epochs, steps = rng.choice((2, 3, 5)), rng.randint(6, 20)
    extras = _extras(rng, FRAMEWORK_EXTRAS, 0.25)
    batches = steps * (2 if "accumulate" in extras else 1)
    return Program(
        kind=kind,
        model=rng.choice(("mlp", "norms", "dropout", "many")),
        optimizer=rng.choice(("sgd", "rmsprop", "adamw_fused", "adafactor", "adagrad")),
        schedule=rng.choice(("none", "cosine", "plateau", "warmup")),
        source=rng.choice(("loader", "loader", "workers")),
        shards=ranks,
        batch_size=batch_size,
        samples=_samples_of_ranks(rng, ranks, batch_size, batches),
        epochs=epochs,
        steps=steps,
        every=1,
        extras=extras,
        pause_ms=rng.randint(20, 60),
    )


def _in_rounds(rng: random.Random, kind: str) -> Program:
    units = kind == "units"
    shards = rng.randint(1, 6) if units else rng.randint(2, 3)
    extras = _extras(rng, UNITS_EXTRAS if units else REPLAYED_EXTRAS, 0.3)
    every = rng.randint(2, 4) if "every" in extras else 1
    steps = every * (rng.randint(30, 80) // every)
    return Program(
        kind=kind,
        model=rng.choice(SHARDED_MODELS if units else MODELS),
        optimizer=rng.choice(SHARDED_OPTIMIZERS if units else OPTIMIZERS),
        schedule=rng.choice(("none", "cosine", "warmup")),
        source="drawn",
        shards=shards,
        batch_size=rng.randint(2, 4),
        samples=64,
        epochs=0,
        steps=steps,
        every=every,
        extras=extras,
        pause_ms=_pause_ms(rng, steps * (shards if units else 1)),
    )


def _options(rng: random.Random, kind: str, sums: tuple[str, ...]) -> tuple[str, ...]:
    if kind in IN_ROUNDS:
        return ("--spares=1",) if rng.random() < 0.2 else ()
    options = [f"--checkpoint-every={rng.choice(('auto', '5 steps', '20 steps', 'off'))}"]
    options.append(f"--snapshot-every={rng.choice(('auto', '3 steps', '10 steps', 'off'))}")
    chances = {"--no-retain-results": 0.2, "--spares=1": 0.2, "--cold-start": 0.1, "--overlap=on": 0.3}
    if kind == "outer":
        chances["--overlap=on"] = 0.7  # differences leave early
    else:
        chances["--verify=every=3"] = 0.1
    return (*options, *(option for option, chance in chances.items() if rng.random() < chance), *sums)


def _strike(rng: random.Random, total: int, workers: int, first: bool, in_rounds: bool) -> Strike:
    whens = ("start", "step", "step", "step") if first else ("after", "after", "step", "event", "event")
    victims = VICTIMS if workers > 1 else ("oldest", "newest_process", "fork_server")
    if in_rounds:
        victims = (*victims, "script", "script", "script")
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
