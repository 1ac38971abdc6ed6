"""`elastic adopt`: prints, as a diff, what makes of a plain training script one that uses `job.steps()`."""

from __future__ import annotations

import argparse
import io
import json
import stat
import tokenize
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError, ExitCode

EXAMPLES = """\
examples:
  elastic adopt --ranks 4 train.py                  written for torchrun --nproc-per-node=4
  elastic adopt --ranks 4 train.py | patch -p1      or --write
  elastic adopt --ranks 8 train.py                  of one process: its batch is cut into 8 shards
  elastic adopt --ranks 4 --json train.py | jq -r '.refused[] | "\\(.line): \\(.write)"'

The script is read, and not run. What is not known is refused, with its line and what to write instead; then nothing is
printed but that. What is adopted is to be checked: elastic doctor --exact train.py

exit codes:
  0 the diff is printed or written, or there is nothing to do    1 refused    2 bad input
"""


def add(verbs: Any) -> None:
    """The verb."""
    verb = verbs.add_parser(
        "adopt",
        help="turn a DistributedDataParallel script into one with job.steps(), as a diff",
        usage="elastic adopt --ranks N [--write] [--json] SCRIPT",
        description="Print the diff that turns a script written for torchrun and DistributedDataParallel, or for one "
        "process, into one that uses elastic.join() and job.steps().",
        epilog=EXAMPLES,
    )
    verb.add_argument(
        "--ranks",
        type=int,
        required=True,
        metavar="N",
        help="processes that the script was written for, each of which becomes a shard; of a script without "
        "DistributedDataParallel the shards that its batch is cut into",
    )
    verb.add_argument("--write", action="store_true", help="change the file, and print what was changed")
    verb.add_argument("--json", action="store_true", help="as one JSON object")
    verb.add_argument("script", metavar="SCRIPT", type=Path)
    verb.set_defaults(verb=_run)


def _run(options: argparse.Namespace) -> int:
    from elastic.adopt.adoption import adopt, diff

    if options.ranks < 1:
        raise ConfigError(f"--ranks {options.ranks} must be at least 1")
    path: Path = options.script
    content = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        before = content.decode(encoding)
        found = adopt(before, options.ranks)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is no script that Python takes: {error}") from error
    if options.write and found.text != before:
        _write(path, found.text.encode(encoding))
    changes = diff(path.name if path.is_absolute() else str(path), before, found.text)
    if options.json:
        refused = [{"line": one.line, "reason": one.reason, "write": one.write} for one in found.refusals]
        document = {
            "script": str(path),
            "diff": changes,
            "refused": refused,
            "written": options.write and bool(changes),
        }
        print(json.dumps(document))
    elif found.refusals:
        print("\n".join(f"{path}:{one.line}: {one.reason}\n    {one.write}" for one in found.refusals))
    else:
        print(changes or f"{path}: nothing to do, it uses elastic already\n", end="")
    return ExitCode.SCRIPT_FAILED if found.refusals else ExitCode.DONE


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, with the mode it had."""
    from elastic.records.files import write_atomically

    target = path.resolve()
    write_atomically(target, content, stat.S_IMODE(target.stat().st_mode))
