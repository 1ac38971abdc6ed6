"""The files that transformers' TensorBoardCallback writes: in one directory for all leaders.

A name of transformers that is not public, as 5.24 has it: `_SummaryWriter` of its TensorBoardCallback.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from copy import copy
from typing import Any

from runtime.frontends.frameworks.trackers.rows import ROWS_KEPT, as_row, rewrite


class TrainerEventFiles:
    """The files of transformers' TensorBoardCallback, in one directory for all leaders of a trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.goes_on = False
        """Another leader, or an earlier run, may have written in this train()."""
        self._before = 0
        """The largest step that was logged in earlier train()."""

    def begin(self, agree: Callable[[Callable[[], str]], str | None]) -> None:
        """A train() begins; the trainer still has the history of the one before. agree: gives all workers what the
        function gives one of them. By default the directory has the time in its name, so one worker says it."""
        self.goes_on = False
        self._before = max((row["step"] for row in self._trainer.state.log_history), default=self._before)
        for callback in self._trainer.callback_handler.callbacks:
            if not any(kind.__name__ == "TensorBoardCallback" for kind in type(callback).__mro__):
                continue
            own = callback._SummaryWriter
            own = own.args[1] if isinstance(own, functools.partial) else own  # of an earlier train()
            callback._SummaryWriter = functools.partial(self._written_on, callback, own)
            if callback.logging_dir is None:
                name = agree(_default_directory) or _default_directory()
                callback.logging_dir = os.path.join(self._trainer.args.output_dir, name)

    def _written_on(self, callback: Any, own: Callable[..., Any], log_dir: Any = None) -> Any:
        """A writer for this directory. own: makes one."""
        if not self.goes_on:
            return own(log_dir=log_dir)
        trainer, history = self._trainer, self._trainer.state.log_history
        rows = [as_row(row) for row in history]
        again = rewrite(rows[-ROWS_KEPT:], max([self._before, *(step for step, _ in rows[:-ROWS_KEPT])]))
        callback.tb_writer = own(log_dir=log_dir, purge_step=again.purge_step)
        state = copy(trainer.state)
        for state.global_step, row in again.rows:
            callback.on_log(trainer.args, state, trainer.control, logs=row)
        return callback.tb_writer


def _default_directory() -> str:
    return str(sys.modules["transformers.integrations.integration_utils"].default_logdir())
