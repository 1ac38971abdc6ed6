"""The parser of every verb, and how an error is said."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from elastic.errors import ConfigError, ExitCode

VERBS = argparse._SubParsersAction
_OPTION = re.compile(r"-(?!\d|\.\d)[^\s]")
"""What argparse takes for an option: a negative number is none, nor what holds a space."""


class Parser(argparse.ArgumentParser):
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


@contextmanager
def waiting(meanwhile: str) -> Iterator[None]:
    """Ctrl-C ends the wait, and nothing else. meanwhile: what goes on without this command."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"elastic: not waited for any more: {meanwhile}", file=sys.stderr)
        raise


def complain(error: Exception) -> None:
    print(textwrap.fill(f"elastic: {error}", 100, break_long_words=False, break_on_hyphens=False), file=sys.stderr)
