"""What a provider of notices has to offer to the watcher."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod

from elastic.errors import ElasticError
from elastic.preemption.notice import Notice


class Unanswered(ElasticError):
    """The provider did not answer, or not in its own language: ask again later."""


class NoticeSource(ABC):
    """Used by one thread. name: for people. pause_s: between two looks. last_word_s: how long the end of this process
    waits for `left`."""

    name: str
    pause_s: float
    last_word_s: float = 2.0
    round = 0
    """Where this is another number, what was looked at is heard again, also if it is the same."""
    signals: tuple[signal.Signals, ...] = ()
    """Signals by which this provider speaks: `signalled` is called, then `look`, at once."""

    @abstractmethod
    def look(self) -> Notice | None:
        """What the provider says now. May block for as long as its own timeouts say. Raises Unanswered."""

    def signalled(self) -> None:  # noqa: B027  most providers do not speak by signals
        """One of `signals` came."""

    def close(self) -> None:  # noqa: B027  most providers hold nothing
        """Nobody looks any more."""

    def left(self) -> None:  # noqa: B027  most providers do not listen
        """No worker is on this node any more: the provider need not wait. Raises Unanswered."""
