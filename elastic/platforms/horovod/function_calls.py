"""Functions that use Horovod's names, called in several workers: the arguments of horovod.run and its relatives."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from elastic.errors import ConfigError
from elastic.platforms.horovod import option_mapping
from elastic.platforms.horovod.host_options import HostOptions
from elastic.platforms.horovod.option_mapping import NOT_USED, WantedWorkers
from elastic.platforms.local.launcher import launch_for_all

T = TypeVar("T")

_OLD = {"np": "num_proc", "min_np": "min_num_proc", "max_np": "max_num_proc"}
_SHOWN = {
    **{name.removeprefix("--").replace("-", "_"): option.because for option in NOT_USED for name in option.names},
    "nics": "a host is reached under the name that the list has",
    "executable": "workers have the Python of this program",
    "stdout": "what rank 0 prints is printed here",
    "stderr": "what rank 0 prints is printed here",
    "extra_mpi_args": "there is no mpirun here",
    "prefix_output_with_timestamp": "see `elastic logs`",
}
"""Argument that is accepted and not used -> what became of it."""


_OF_HOSTS = {"reset_limit": "reset_limit", "cooldown_range": "cooldown_s"}
_LIMITS = {"start_timeout": "start_timeout_s", "elastic_timeout": "elastic_timeout_s", **_OF_HOSTS}
_PLACES = {
    "hosts": "hosts",
    "hostfile": "hostfile",
    "host_discovery_script": "script",
    "slots": "slots",
    "ssh_port": "ssh_port",
    "ssh_identity_file": "ssh_identity_file",
}
"""Argument -> field of HostOptions."""


class _Kind(NamedTuple):
    """What an argument has to be."""

    words: str
    fits: Callable[[Any], bool]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _from(least: int, words: str) -> _Kind:
    return _Kind(words, lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least)


_TEXT = _Kind("a string that is not empty", lambda value: isinstance(value, str) and bool(value.strip()))
_PATH = _Kind("a path", lambda value: isinstance(value, str | os.PathLike) and bool(os.fspath(value)))
_SECONDS = _Kind("a number of seconds above 0", lambda value: _number(value) and value > 0)
_KINDS = {
    **dict.fromkeys(("num_proc", "min_num_proc", "max_num_proc", "slots"), _from(1, "a whole number of at least 1")),
    "reset_limit": _from(0, "a whole number of at least 0"),
    "ssh_port": _Kind("a port, 1 to 65535", lambda value: type(value) is int and 1 <= value <= 65535),
    **dict.fromkeys(("start_timeout", "elastic_timeout"), _SECONDS),
    **dict.fromkeys(("hosts", "host_discovery_script"), _TEXT),
    **dict.fromkeys(("hostfile", "ssh_identity_file"), _PATH),
    "cooldown_range": _Kind(
        "two numbers of seconds, such as (10, 100)",
        lambda value: isinstance(value, tuple | list) and len(value) == 2 and all(map(_number, value)),
    ),
}
"""Argument that is used here -> what it has to be."""


def _check(function: object, args: object, kwargs: object, given: Mapping[str, Any]) -> None:
    """Raises ConfigError."""
    if not callable(function):
        raise ConfigError(f"{function!r:.80} is no function; give the one that the workers are to call")
    if not isinstance(args, tuple | list):
        raise ConfigError(f"args={args!r:.80}: give a tuple or a list of the arguments of the function, such as (5,)")
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ConfigError(f"kwargs={kwargs!r:.80}: give a dict, name of an argument of the function -> value")
    for name, value in given.items():
        if (kind := _KINDS.get(name)) is not None and not kind.fits(value):
            raise ConfigError(f"{name}={value!r:.80}: give {kind.words}")


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function, bound to its arguments. places: arguments that say where its workers are to be. others: what is left
    of the arguments."""

    function: Callable[..., Any]
    wanted: WantedWorkers
    limits: Mapping[str, float]
    places: Mapping[str, Any]
    others: Mapping[str, Any]

    @property
    def hosts(self) -> HostOptions:
        """Raises ConfigError."""
        named: dict[str, Any] = {_PLACES[name]: value for name, value in self.places.items()}
        if "hostfile" in named:
            named["hostfile"] = Path(named["hostfile"])
        if "ssh_identity_file" in named:
            named["ssh_identity_file"] = os.fspath(named["ssh_identity_file"])
        named |= {_LIMITS[name]: value for name, value in self.limits.items()}
        return HostOptions(**named)

    def of_engine(self) -> dict[str, Any]:
        """Arguments of elastic.spark.run() and elastic.ray.Trainer(). Raises ConfigError for places: the engine finds
        its own."""
        if self.places:
            raise ConfigError(f"{next(iter(self.places))}= names hosts, and the engine finds its own: leave it out")
        timing = {"pause_limit_s": self.hosts.elastic_timeout_s, "join_window_s": self.hosts.start_timeout_s}
        restart = {"restart": True} if self.wanted.restart else {}
        return {"workers": (self.wanted.least, self.wanted.most), "timing": timing, **restart, **self.others}


def call_of(
    function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> FunctionCall:
    """What horovod.run(function, args, kwargs, **options) means. Without min_num_proc, max_num_proc and a discovery
    script the function is started again when a worker is lost; with one of them it has @hvd.elastic.run. Says of each
    argument that is not used what became of it. Raises ConfigError."""
    given = {_OLD.get(name, name): value for name, value in options.items() if value is not None}
    _check(function, args, kwargs or {}, given)
    least, most = given.pop("min_num_proc", None), given.pop("max_num_proc", None)
    elastic = least is not None or most is not None or "host_discovery_script" in given
    first = given.pop("num_proc", None)
    wanted = option_mapping.wanted(
        least or most or 1 if first is None else first,
        least,
        most,
        None,
        discovers="host_discovery_script" in given,
        restart=not elastic,
    )
    for name in sorted(given.keys() & _SHOWN.keys()):
        if given.pop(name):
            print(f"elastic: {name}= is not used: {_SHOWN[name]}", file=sys.stderr, flush=True)
    limits, places = ({name: given.pop(name) for name in sorted(given.keys() & of)} for of in (_LIMITS, _PLACES))
    for name in () if places.keys() & {"hosts", "hostfile", "host_discovery_script"} else _OF_HOSTS:
        if limits.pop(name, None):
            print(f"elastic: {name}= is not used: there are no hosts that come and go", file=sys.stderr, flush=True)
    bound = functools.partial(function, *args, **(kwargs or {}))
    functools.update_wrapper(bound, function)  # a job has the name of its function
    return FunctionCall(bound, wanted, limits, places, given)


def run(call: FunctionCall) -> list[Any]:
    """Call the function in workers of this machine, or on the hosts, and return what it has returned, by rank. Raises
    ConfigError, LaunchFailed, and what the discovery of hosts raises."""
    wanted, hosts = call.wanted, call.hosts
    listed = hosts.listed(wanted.workers)
    wanted = wanted.among(listed)
    if listed is not None and set(listed) == {"localhost"}:
        options = {"workers": wanted.most, "pause_limit": f"{hosts.elastic_timeout_s:g}", **call.others}
        # The smallest number is all of them where the function is started again.
        options |= {"restart": True} if wanted.restart else {"min_workers": wanted.least}
        return launch_for_all(call.function, (), options, options.pop("job_dir", None))
    if call.others:
        raise ConfigError(f"horovod.run({next(iter(call.others))}=): there is no such argument for a job on hosts")
    return list(hosts.launch(call.function, (), wanted, listed).values)
