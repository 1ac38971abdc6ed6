"""How a script has failed, and which of several failures is the cause of the others."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ABORTS_S = 0.1
"""A library aborts its process more seconds than this behind the end of another one. The end of a process that aborts
by itself is noticed sooner than that, so it counts as the first failure."""

_CALL = re.compile(r'^\s*File "(.+)", line (\d+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Failure:
    """How a script failed."""

    status: int
    """Exit status, or minus the signal that ended the process."""
    at_s: float
    """Seconds since 1970, of the worker's clock."""
    place: str = ""
    """File and line, where the script says it by torch's @record."""
    message: str = ""

    @classmethod
    def read(cls, status: int, at_s: float, error_file: Path) -> Self:
        """at_s: when it ended. error_file: where torch.distributed.elastic.multiprocessing.errors.record writes an
        exception; a script that does not use it writes none."""
        try:
            written_s = error_file.stat().st_mtime  # its own timestamp is in whole seconds
            found = json.loads(error_file.read_text())["message"]
            extra = found["extraInfo"]
            calls = _CALL.findall(extra["py_callstack"])
            place = f"{calls[-1][0]}:{calls[-1][1]}" if calls else ""
            return cls(status, written_s, place, str(found["message"]))
        except FileNotFoundError:
            return cls(status, at_s)
        except (ValueError, LookupError, TypeError, AttributeError):
            return cls(status, at_s, message=f"{error_file} cannot be read")

    @property
    def order(self) -> tuple[bool, bool, float]:
        """The first of several is the cause: the failure of one script closes its connections, by which the others
        fail too, some of them faster than one that was killed. A library may abort its process for that, too, as NCCL
        does, but not at once."""
        aborted = self.status == -signal.SIGABRT
        return not self.is_cause, self.status >= 0 or aborted, self.at_s - ABORTS_S * aborted

    @property
    def is_from_outside(self) -> bool:
        """Whether somebody else has ended the script, so that nobody counts it as its fault."""
        return self.status < 0 and not self.message

    @property
    def is_cause(self) -> bool:
        """Whether it is no consequence of another script's failure: SIGKILL. No report of another failure has to be
        waited for."""
        return self.is_from_outside and self.status == -signal.SIGKILL

    @property
    def said(self) -> str:
        ended = f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
        return f"the script ended with {ended}" + (f": {self.message}" if self.message else "")
