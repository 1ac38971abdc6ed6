"""The parser of every verb, and how an error is said."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elastic.errors import ConfigError, ExitCode


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        if about := options.get("description"):
            options["description"] = textwrap.fill(about, 100)
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> Any:
        complain(ConfigError(f"{message}. See `{self.prog} --help`."))
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
