"""What verbs share: the parser and how an error is said; which script a verb is about (SCRIPT [ARGS...], or -m MODULE
[ARGS...]); which job or fleet (--job-dir, --rendezvous, --certs).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.errors import ConfigError, ExitCode
from elastic.process.children import REASON_FILE
from elastic.rendezvous.endpoint import INSECURE, check_plain, parse
from elastic.security.roles import CERTS_VARIABLE, Role

if TYPE_CHECKING:
    from elastic.fleet.client import FleetClient
    from elastic.security.keyring import Keyring


REPLICAS = "ELASTIC_RENDEZVOUS"
"""The replicas if no --rendezvous is given."""

YEAR_S = 365 * 86400

_reason_file = os.environ.pop(REASON_FILE, "")  # processes that this one starts must not write there

EXIT_CODES = """
exit codes:
  0 done    2 bad input    3 nobody answers, or the time is over    130 interrupted
"""
"""What the help of each verb that asks about a job or a fleet ends with."""


def add_either(verb: argparse.ArgumentParser, *, several: bool = False, by_default: bool = True) -> None:
    """--job-dir of a job on this machine, or --rendezvous of a fleet. several: any number of directories. by_default:
    without either of them the newest directory is meant, see `job_dir_of`."""
    where = verb.add_mutually_exclusive_group(required=not by_default and not known_replicas())
    what = "of a job on this machine" + "; of one of several machines those of its nodes, one by one" * several
    what += " (default, without a fleet: the newest in ./elastic-jobs, of a job that runs if one does)" * by_default
    where.add_argument("--job-dir", type=Path, metavar="DIR", action="append" if several else "store", help=what)
    add_replicas(verb, where)


def add_answer(verb: argparse.ArgumentParser, act: Callable[[argparse.Namespace], int]) -> None:
    """Add --json, and have the verb do `act`, which ends with `answer`."""
    verb.add_argument("--json", action="store_true", help="as one JSON object")
    verb.set_defaults(verb=act)


def answer(options: argparse.Namespace, document: object, text: str, code: int = ExitCode.DONE) -> int:
    """Print what a verb has to say, with --json as a document. Returns the exit code."""
    print(json.dumps(document) if options.json else text)
    return code


def add_replicas(verb: argparse.ArgumentParser, group: Any = None) -> None:
    """--rendezvous, --certs and --insecure of a verb. group: the one in which --rendezvous has alternatives."""
    add_rendezvous(group or verb, required=group is None)
    add_certs(verb)


def add_rendezvous(group: Any, *, required: bool = True) -> None:
    """--rendezvous. required: unless the environment has a default."""
    group.add_argument(
        "--rendezvous",
        default=known_replicas(),
        required=required and not known_replicas(),
        metavar="HOST:PORT,...",
        help=f"replicas of the rendezvous, all or some (default: ${REPLICAS})",
    )


def add_certs(verb: argparse.ArgumentParser) -> None:
    """--certs and --insecure."""
    verb.add_argument(
        "--certs",
        type=Path,
        metavar="DIR",
        help=f"your certificate and those to trust, see `elastic certs --help` (default: ${CERTS_VARIABLE})",
    )
    verb.add_argument(INSECURE, action="store_true", help="allow plain text with other machines, without certificates")


def known_replicas() -> str | None:
    """By the environment; an empty variable is none."""
    return os.environ.get(REPLICAS) or None


def job_dir_of(options: argparse.Namespace) -> Path | None:
    """As given, or the newest here, as `newest_job_dir`; None if a job of a fleet is meant."""
    if options.job_dir is not None or options.rendezvous:
        job_dir: Path | None = options.job_dir
        return job_dir
    if options.job is not None and (Path(options.job) / "job.json").exists():
        job_dir, options.job = Path(options.job), None
        return job_dir
    if options.job is not None:
        raise ConfigError(f"{options.job}: give the job's fleet with --rendezvous, or its directory with --job-dir")
    return newest_job_dir()


def newest_job_dir() -> Path:
    """In ./elastic-jobs, of a job that runs if one does; of several it is said which one was taken. Raises ConfigError
    if there is none."""
    found, live = job_dirs_here()
    if len(found) > 1:
        of = f"{live} that run" if live > 1 else "the jobs here that runs" if live else f"{len(found)}"
        print(f"elastic: {found[0]}, the {'only one' if live == 1 else 'newest'} of {of}", file=sys.stderr)
    return found[0]


def job_dirs_here() -> tuple[list[Path], int]:
    """As `jobs_in` of ./elastic-jobs, at least one. Raises ConfigError."""
    from elastic.records.job_directory import DEFAULT_PARENT, jobs_in

    found, live = jobs_in(Path(DEFAULT_PARENT))
    if not found:
        raise ConfigError(
            f"there is no job in {Path.cwd() / DEFAULT_PARENT}; give --job-dir DIR, or --rendezvous HOST:PORT,... of a "
            f"fleet (${REPLICAS})"
        )
    return found, live


def certs_of(options: argparse.Namespace) -> Path | None:
    """As given, or by the environment; an empty variable is none."""
    given = options.certs or os.environ.get(CERTS_VARIABLE)
    return Path(given).absolute() if given else None


def keyring_of(certs: Path | None, *roles: Role) -> Keyring | None:
    """The certificate for the first of these roles that there is, or None without certificates. Raises ConfigError."""
    if certs is None:
        return None
    from elastic.security.keyring import of_role

    return of_role(certs, *roles)


def client_of(options: argparse.Namespace) -> FleetClient:
    """For an operator's verb. Raises ConfigError."""
    from elastic.fleet.client import FleetClient
    from elastic.security.channels import ChannelFactory

    for word in vars(options).values():
        if isinstance(word, str) and word.encode(errors="replace").decode() != word:
            raise ConfigError(f"{word!r} is no text in UTF-8, so no job, node or owner is called so")
        if isinstance(word, int) and abs(word) >= 1 << 63:
            raise ConfigError(f"{word} is too large a number")
    replicas = parse("--rendezvous", options.rendezvous)
    keyring = keyring_of(certs_of(options), Role.OPERATOR, Role.VIEWER)
    check_plain("--rendezvous", replicas, allowed=options.insecure or keyring is not None)
    return FleetClient(replicas, channels=ChannelFactory(keyring))


VERBS = argparse._SubParsersAction
_OPTION = re.compile(r"-(?!\d|\.\d)[^\s]")
"""What argparse takes for an option: a negative number is none, nor what holds a space."""


class Parser(argparse.ArgumentParser):
    remembers = False
    """Whether its options have `parser`, which is this one, and `words`, what it has read: for options that may come
    from a file too."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        if about := options.get("description"):
            options["description"] = textwrap.fill(about, 100)
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What nobody knows is said by the parser of the verb that was asked for, and before what is missing."""
        words = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown(words)
        found = super().parse_known_args(words, namespace)
        if found[1]:
            self.error(f"unrecognized arguments: {' '.join(found[1])}")
        if self.remembers:
            found[0].parser, found[0].words = self, words
        return found

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Options up to where a script begins or a verb, whose own parser reads on; and that verb."""
        verbs = next((action.choices for action in self._actions if isinstance(action, VERBS)), None)
        ends = any(action.nargs == argparse.REMAINDER for action in self._actions)
        rest = iter(words)
        for word in rest:
            name = word.partition("=")[0]
            option = self._option_string_actions.get(name)
            if word == "--":
                return
            if option is not None:
                if option.nargs is None and name == word:
                    next(rest, None)  # its value
            elif verbs is not None and not word.startswith("-"):
                if word not in verbs:
                    self._refuse("command", word, verbs)
                return
            elif ends and not word.startswith("-"):
                return
            elif _OPTION.match(word) and word[:2] not in self._option_string_actions:
                told = [action for action in self._actions if action.help != argparse.SUPPRESS]
                self._refuse("option", name, [known for action in told for known in action.option_strings])

    def _refuse(self, what: str, word: str, known: Iterable[str]) -> None:
        from difflib import get_close_matches

        near = get_close_matches(word, list(known), 1)
        self.error(f"there is no {what} {word}" + (f"; did you mean {near[0]}?" if near else ""))

    def error(self, message: str) -> Any:
        complain(ConfigError(f"{message.rstrip('.')}{'' if message.endswith('?') else '.'} See `{self.prog} --help`."))
        sys.exit(ExitCode.BAD_INPUT)


def check_seconds(option: str, value: float) -> None:
    """Raise ConfigError for what is no time that somebody would wait. A NaN is none, either."""
    if not 0 < value <= YEAR_S:
        raise ConfigError(f"{option} {value:g} must be a positive number of seconds, of at most {YEAR_S}, a year")


@contextmanager
def waiting(meanwhile: str) -> Iterator[None]:
    """Ctrl-C ends the wait, and nothing else. meanwhile: what goes on without this command."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"elastic: not waited for any more: {meanwhile}", file=sys.stderr)
        raise


def complain(error: Exception) -> None:
    if _reason_file:
        Path(_reason_file).write_text(str(error))
    print(textwrap.fill(f"elastic: {error}", 100, break_long_words=False, break_on_hyphens=False), file=sys.stderr)
