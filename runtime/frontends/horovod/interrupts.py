"""What Horovod raises, under its names, and what this package raises besides.

Horovod's scripts catch HorovodInternalError and HostsUpdatedInterrupt as RuntimeError, and a call before init() as
ValueError, so these are both an error of this project and one of Python's.
"""

from __future__ import annotations

from elastic.errors import ConfigError, Disagree, ElasticError


class HorovodInternalError(ElasticError, RuntimeError):
    """A collective has failed. Under `elastic run` no lost worker is a cause of it: the collective is repeated."""


class HostsUpdatedInterrupt(RuntimeError):
    """The workers are other ones since the last commit. hvd.elastic.run catches it, and calls its function again."""

    def __init__(self, skip_sync: bool = False) -> None:
        """skip_sync: the state is alike on all workers already."""
        super().__init__("the workers of the job have changed")
        self.skip_sync = skip_sync


class BadArgument(ConfigError, ValueError, RuntimeError):
    """Give other arguments, as the message says. Horovod raises ValueError for some, RuntimeError for others."""


class NotInitialized(BadArgument):
    """Call hvd.init() before the call that the message names."""


class CallsDiffer(Disagree, RuntimeError):
    """Make the same collectives on all ranks, in one order; the message names the calls of the ranks."""
