"""How the scripts of a round end behind the same step when workers join or leave as planned, so that none is lost.

A worker makes a file for each of its scripts, which each of them looks for in done(). A script that finds it says so in
the round's store. When all have said so, one of them writes the number of the last step there, and from then on each
reads it in done(). Behind that step, which is kept, it waits until all are there, leaves word for its worker, and waits
to be ended. A worker whose scripts do not come there in time ends them wherever they are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from runtime.recovery.kept.place import KeptPlace

END, THERE = "end", "there"
"""In the directory of a round, with the rank behind the name: made by the worker, and by the script."""
AHEAD = 2
"""The last step is so many behind that of the script which writes it: another one may be a step ahead, and looks for
the number in its next done()."""
POLL_S = 0.02
STORE_S = 5.0
"""Seconds for an answer of the store, whose worker may be gone."""
_SEEN, _LAST, _THERE = (f"elastic/kept/{name}" for name in ("seen", "last", "there"))


def last_step(seen: int, world: int, step: int) -> int | None:
    """The last step of the round, as a script writes it that is behind this one. None: it is too early, as not all
    look for the number. seen: scripts that do. world: scripts of the round."""
    return step + AHEAD if seen == world else None


class AgreedEnd:
    """The script's side, for its main thread."""

    def __init__(self, place: KeptPlace, rank: int, world: int, environment: Mapping[str, str]) -> None:
        """environment: as torchrun sets it."""
        self._place = place
        self._rank, self._world = rank, world
        self._environment = environment
        self._store: TCPStore | None = None
        self._last: int | None = None

    def is_last(self, step: int) -> bool:
        """Whether the script has to end behind this step. Called once behind each step."""
        if not self._asked():
            return False
        with suppress(RuntimeError):  # the store is gone: the worker will end the script
            if self._store is None:
                host, port = self._environment["MASTER_ADDR"], int(self._environment["MASTER_PORT"])
                answer = timedelta(seconds=STORE_S)
                self._store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=answer)
                self._store.add(_SEEN, 1)
            if self._last is None and (last := last_step(self._store.add(_SEEN, 0), self._world, step)) is not None:
                self._last = int(self._store.compare_set(_LAST, "", str(last)))
        return step == self._last

    def arrive(self) -> None:
        """The last step is kept: block until the worker ends the script, or has given up waiting for others."""
        with suppress(RuntimeError):
            assert self._store is not None, "it has said which step is the last one"
            self._store.add(_THERE, 1)
            while self._asked() and self._store.add(_THERE, 0) < self._world:
                time.sleep(POLL_S)
        self._place.leave_word(f"{THERE}{self._rank}", str(self._last))
        while self._asked():
            time.sleep(POLL_S)

    def _asked(self) -> bool:
        return (self._place.directory_there / f"{END}{self._rank}").exists()


class EndOfRound:
    """The worker's side. directory: of the round. ranks: of its scripts. Raises OSError."""

    def __init__(self, directory: Path, ranks: Sequence[int]) -> None:
        self._asked = [directory / f"{END}{rank}" for rank in ranks]
        self._there = [directory / f"{THERE}{rank}" for rank in ranks]

    def ask(self) -> None:
        for path in self._asked:
            path.touch(0o600)

    def reached(self) -> int | None:
        """The last step, if all scripts of this worker wait behind it."""
        said = [path.read_text() if path.exists() else "" for path in self._there]
        return int(said[0]) if all(said) else None

    def let_go(self) -> None:
        """Before the scripts get a signal: one may go on with its own way to end."""
        for path in self._asked:
            path.unlink(missing_ok=True)
