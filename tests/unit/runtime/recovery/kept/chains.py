"""A program: rounds of random worlds, each ended by kills at random points, until a sharded training is done.

The arguments are seeds. For each it prints `SEED ROUNDS KILLS AGAIN DIGEST`: how many rounds there were and how many of
them ended by a kill, and how many steps at most were done again, of those that all ranks had done.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from runtime.recovery.kept import copying, segment
from runtime.recovery.kept.choice import RoundNumber, newest_whole
from runtime.recovery.kept.copying import NativeGroup
from runtime.recovery.kept.loading import SavedTensor
from runtime.recovery.kept.look import KeptHere
from runtime.recovery.kept.place import KeptPlace
from runtime.recovery.kept.segment import Header, SegmentFile
from runtime.recovery.transfer.checksum import FilledBody
from tests.memory_directory import memory_directory
from tests.unit.runtime.recovery.kept.worlds import fork, train

STEPS = 8
POINTS = ("load", "begin", "half", "checksum", "header", "kept", "done")


class Deaths:
    """Kills this process when it comes to a point for the n-th time."""

    def __init__(self, point: str, times: int) -> None:
        self._left = {point: times}
        self._wrap(SavedTensor, "fill", "load")
        self._wrap(SegmentFile, "begin", "begin", behind=True)
        self._wrap(SegmentFile, "finish", "kept", behind=True)
        self._wrap(Header, "pack", "header")
        self._wrap(segment, "checksum", "checksum")
        copy_all, copy = copying.copy_all, NativeGroup.copy

        def half(into: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
            middle = len(tensors) // 2
            copy_all(into[:middle], tensors[:middle])
            self.at("half")
            copy_all(into[middle:], tensors[middle:])

        def half_of_group(group: NativeGroup, body: FilledBody) -> str:
            middle = len(group.at) // 2
            copy(NativeGroup(group.paths[:middle], group.tensors[:middle], group.at[:middle]), body)
            self.at("half")
            return copy(NativeGroup(group.paths[middle:], group.tensors[middle:], group.at[middle:]), body)

        vars(copying)["copy_all"] = half
        setattr(NativeGroup, "copy", half_of_group)  # noqa: B010  # mypy takes it for a method of this class

    def at(self, point: str) -> None:
        self._left[point] = self._left.get(point, 0) - 1
        if self._left[point] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def _wrap(self, owner: Any, name: str, point: str, *, behind: bool = False) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(call)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if not behind:
                self.at(point)
            result = call(*arguments, **named)
            if behind:
                self.at(point)
            return result

        setattr(owner, name, wrapped)


def rank(number: int, world: int, home: Path, place: KeptPlace, death: tuple[str, int]) -> None:
    named = {"RANK": number, "LOCAL_RANK": number, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in named.items()}, **place.to_environment())
    torch.set_num_threads(1)
    deaths = Deaths(*death)
    store = FileStore(str(home / f"store.{place.round}"), world)
    dist.init_process_group("gloo", store=store, rank=number, world_size=world)

    def done(step: int) -> None:
        with open(home / f"done.{place.round}.{number}", "a") as file:
            print(step, file=file)
        deaths.at("done")

    digest = train(steps=STEPS, done=done)
    dist.barrier()
    (home / "digest").write_text(digest)


def steps_done(home: Path, number: RoundNumber, world: int) -> list[list[int]]:
    """Of each rank that has begun the round: its first step, and those that it has done."""
    files = [home / f"done.{number}.{rank}" for rank in range(world)]
    return [list(map(int, file.read_text().split())) for file in files if file.exists()]


def chain(seed: int) -> str:
    dice = random.Random(seed)
    rounds = kills = again = whole = 0
    with memory_directory() as directory:
        home = Path(directory)
        while not (home / "digest").exists():
            rounds += 1
            world, number = dice.choice((1, 2, 2, 3)), RoundNumber(0, rounds)
            source = newest_whole(KeptHere(directory, cast(Any, None)).check(0, 1))
            place = KeptPlace(directory, number, source)
            victims = dice.sample(range(world), dice.randint(1, world)) if rounds < 6 else []
            deaths = [(dice.choice(POINTS), dice.randint(1, 4)) if r in victims else ("", 0) for r in range(world)]
            ranks = [fork(functools.partial(rank, r, world, home, place, deaths[r])) for r in range(world)]
            kills += await_end(ranks)
            seen = steps_done(home, number, world)
            if len(firsts := {each[0] for each in seen}) > 1:
                return f"{seed} begins with steps {firsts} in round {rounds}"
            again = max([again, *(whole - first for first in firsts)])
            whole = max(whole, min((max(each) for each in seen), default=0) if len(seen) == world else 0)
        return f"{seed} {rounds} {kills} {again} {(home / 'digest').read_text()}"


def await_end(ranks: list[int]) -> bool:
    """Until all have ended; the first that is killed takes the others with it. Returns whether one was."""
    left, killed = set(ranks), False
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status and not killed:
            killed = True
            if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
                print("a rank has raised", file=sys.stderr)
            for other in left:
                os.kill(other, signal.SIGKILL)
    return killed


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(chain(int(argument)), flush=True)
