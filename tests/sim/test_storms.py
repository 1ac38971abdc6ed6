"""Storms of faults that have nothing to do with each other: no verdict ends a job or leaves a node because of them."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import replace
from random import Random
from unittest.mock import patch

import pytest

from elastic.protocol.failures import Verdict, WorkerFailure, judge, judge_node
from elastic.protocol.membership import verdicts
from elastic.protocol.messages import Word, WorkerDead
from tests.sim.agent import Agent
from tests.sim.faults import Fault, Scene, draw_by_chance
from tests.sim.worker import Worker
from tests.sim.world import World

SEEDS = 20
FAULTS = 25
STARVED = 0.3


class Storm:
    """What is seen of one run. Whoever is struck dies of its own fault (SIGSEGV), or is starved, in its shard."""

    def __init__(self, random: Random) -> None:
        self.failures: Counter[str] = Counter()
        self.verdicts: list[Verdict] = []
        self._random = random
        self._shards: dict[str, str] = {}
        self._die, self._hear = Worker.die, Agent.hear

    def die(self, worker: Worker, status: int, because: str, last_words: str = "") -> None:
        if worker.p.running is not None:
            self._shards[worker.me] = f"shard {worker.p.running} in pass 0 of step {worker.p.reduced}"
        own = -signal.SIGSEGV if status == -signal.SIGKILL and because == "killed" else status
        self._die(worker, own, because, last_words)

    def hear(self, agent: Agent, word: Word) -> None:
        if isinstance(word, WorkerDead) and word.failure:
            starved = self._random.random() < STARVED
            shard = self._shards.get(word.worker_id, "")
            word = replace(word, where=shard, failure="memory" if starved else word.failure)
            self.failures[word.failure] += 1
        self._hear(agent, word)

    def judge(self, history: tuple[WorkerFailure, ...]) -> Verdict | None:
        return self._seen(judge(history))

    def judge_node(
        self, history: tuple[WorkerFailure, ...], others_train: bool, one_is_fruitful: bool
    ) -> Verdict | None:
        return self._seen(judge_node(history, others_train, one_is_fruitful))

    def _seen(self, verdict: Verdict | None) -> Verdict | None:
        self.verdicts += [verdict] if verdict is not None else []
        return verdict

    def run(self, seed: int, scene: Scene) -> None:
        with (
            patch.object(Worker, "die", lambda *given, **named: self.die(*given, **named)),
            patch.object(Agent, "hear", lambda *given: self.hear(*given)),
            patch.object(verdicts, "judge", self.judge),
            patch.object(verdicts, "judge_node", self.judge_node),
        ):
            World(seed, scene=scene).run()


def stormy(seed: int) -> Scene:
    random = Random(seed)
    scene = draw_by_chance(seed)
    faults = [Fault("crash", random.randrange(8), at_s=random.uniform(0.3, 4.0)) for _ in range(FAULTS)]
    faults += [Fault("crash_node", random.randrange(8), at_s=random.uniform(0.3, 4.0))] * random.randint(0, 2)
    faults += [Fault("add_node", at_s=random.uniform(0.3, 4.0)) for _ in range(random.randint(0, 3))]
    return replace(
        scene, name="storm", faults=tuple(faults), heal_s=5.0, steps=60, max_restarts=1000, poison=-1, never_joins=-1,
        strange=-1, cannot_start=-1, units=max(4, scene.units), replace=True,
    )  # fmt: skip


@pytest.mark.parametrize("first", range(3))
def test_no_storm_of_unrelated_faults_leads_to_a_verdict(first: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(first * SEEDS, (first + 1) * SEEDS):
        storm = Storm(Random(seed))
        storm.run(seed, stormy(seed))
        assert storm.verdicts == [], seed
        total += storm.failures
    assert total["crash"] > 5 * SEEDS and total["memory"] > SEEDS, total


def test_what_a_tick_gives_up_may_end_a_silence_in_the_same_tick() -> None:
    """Else the leader asks for a tick in the past. Seed 1214 has a node whose last member is given up in a tick."""
    Storm(Random(1214)).run(1214, stormy(1214))
