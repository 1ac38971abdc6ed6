"""`elastic checkpoints list | verify | show | export | prune`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elastic.checkpoints.description import described_tensors
from elastic.checkpoints.export import export
from elastic.checkpoints.naming import PERIODIC, EntryName
from elastic.checkpoints.policy import Keep
from elastic.checkpoints.select import Found
from elastic.checkpoints.series import Series
from elastic.checkpoints.storage import Storage, storage_at
from elastic.cli.options import answer
from elastic.errors import ConfigError, ExitCode, NoCheckpoint

LATEST = "latest"

EXAMPLES = """\
examples:
  elastic checkpoints list --job-dir elastic-jobs/train-1
  elastic checkpoints verify --job-dir elastic-jobs/train-1          reads every byte
  elastic checkpoints show latest --job-dir elastic-jobs/train-1
  elastic checkpoints export best --job-dir elastic-jobs/train-1 --output best
  elastic checkpoints prune --keep "last 1" --job-dir elastic-jobs/train-1
  elastic checkpoints list --dir s3://bucket/run --json | jq .[0].step

NAME is `latest` (the newest that was taken by itself), the name of a job.save, or the full name of one checkpoint.

exit codes:
  0 done, and with `verify`: all are whole    1 `verify` found a damaged one
  2 bad input, or there is no such checkpoint
"""


def add(verbs: Any) -> None:
    """The verb and its own verbs."""
    top = verbs.add_parser(
        "checkpoints",
        help="list, verify, export and remove the checkpoints of a job",
        description="Look at the durable checkpoints of a job, check them, and make plain files of them.",
        epilog=EXAMPLES,
    )
    own = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, about, act in (
        ("list", "all checkpoints, newest first", _list),
        ("verify", "read every byte, and compare it with the manifest", _verify),
        ("show", "what one checkpoint holds", _show),
        ("export", "write plain safetensors and JSON", _export),
        ("prune", "remove old ones", _prune),
    ):
        verb = own.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=EXAMPLES)
        where = verb.add_mutually_exclusive_group(required=True)
        where.add_argument("--job-dir", type=Path, metavar="DIR", help="the job whose checkpoints are meant")
        where.add_argument("--dir", metavar="URL", help="a checkpoint directory, also an fsspec path")
        verb.add_argument("--json", action="store_true", help="print JSON")
        if name in ("show", "export"):
            verb.add_argument("name", metavar="NAME", help="latest, the name of a job.save, or a full name")
        if name == "export":
            verb.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new directory")
        if name == "prune":
            verb.add_argument(
                "--keep",
                metavar="K",
                help='checkpoints to keep: "last 2", or "last 2, every 10000 steps" (default: as the job keeps '
                'them; with --dir "last 2")',
            )
        verb.set_defaults(verb=_saying(act))


Said = tuple[Any, str] | tuple[Any, str, int]
"""What `answer` prints: a document, the same as text, and the exit code if it may be another one than 0."""


def _saying(act: Callable[[Storage, str, argparse.Namespace], Said]) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        storage, job_id = _where(options)
        try:
            said = act(storage, job_id, options)
        except NoCheckpoint as error:
            raise ConfigError(str(error)) from error
        except OSError as error:
            about = f"{storage.url}: {error.filename}" if error.filename not in (None, storage.url) else storage.url
            raise ConfigError(f"{about} cannot be used: {error.strerror or error}") from error
        return answer(options, *said)  # behind the block: an error of stdout is none of the storage

    return run


def _where(options: argparse.Namespace) -> tuple[Storage, str]:
    from elastic.records.job_directory import read_json, read_settings

    if options.dir is not None:
        return storage_at(options.dir), ""
    job = read_json(options.job_dir / "job.json")
    if job is None:
        raise ConfigError(f"{options.job_dir} holds no job; give the --job-dir of `elastic run`, or --dir")
    settings = read_settings(options.job_dir)
    # The settings have the paths at the time of the run. The directory may have been moved since, or be a copy.
    root, then = settings.root, Path(settings.ledger).parent
    if not job.get("checkpoint_dir"):
        root = str(options.job_dir / "checkpoints")
    elif settings.ledger and Path(root).is_relative_to(then):
        moved = options.job_dir / Path(root).relative_to(then)
        root = str(moved) if moved.is_dir() else root
    return storage_at(root), settings.job_id


def _all_series(storage: Storage) -> list[Series]:
    """The periodic one first."""
    names = storage.directories("")
    return [Series(storage, name) for name in sorted(names, key=lambda name: (name != PERIODIC, name))]


def _find(storage: Storage, job_id: str, name: str) -> tuple[Series, Found]:
    """The newest whole one of that name. Raises NoCheckpoint saying what is wrong with those there are."""
    full, everything = EntryName.parse(name), _all_series(storage)
    saved = any(series.name == name for series in everything)
    wanted = PERIODIC if name == LATEST and not saved else name
    skipped: list[Found] = []
    for series in everything:
        if full is not None and full in series.names():
            found: Found | None = series.verify(series.look(full, job_id))
            if found is not None and not found.problem:
                return series, found
            skipped += [found] if found is not None else []
        elif series.name == wanted:
            found, skipped = series.newest(job_id)
            if found is not None:
                return series, found
    why = "; ".join(f"{found.name}: {found.problem}" for found in skipped)
    known = ", ".join(LATEST if series.name == PERIODIC else series.name for series in everything) or "none"
    raise NoCheckpoint(
        f"{storage.url} has no usable checkpoint {name}" + (f" ({why})" if why else "") + f"; there are {known}"
    )


def _facts(series: Series, found: Found) -> dict[str, Any]:
    manifest = found.manifest
    return {
        "series": "periodic" if series.name == PERIODIC else series.name,
        "name": str(found.name),
        "step": found.name.step,
        "epoch": manifest.moment.epoch if manifest else None,
        "bytes": manifest.size if manifest else None,
        "world": manifest.world if manifest else None,
        "taken": manifest.taken if manifest else None,
        "problem": found.problem,
    }


def _table(rows: list[dict[str, Any]], whole: str) -> Iterator[str]:
    yield f"{'name':<8} {'step':>8} {'epoch':>5} {'size':>10} {'taken':<20} checkpoint"
    for row in rows:
        size = "" if row["bytes"] is None else _size(row["bytes"])
        epoch = "" if row["epoch"] is None else row["epoch"]
        end = f"  {row['problem']}" if row["problem"] else f"  {whole}" if whole else ""
        yield f"{row['series']:<8} {row['step']:>8} {epoch:>5} {size:>10} {row['taken'] or '':<20} {row['name']}{end}"


def _size(count: int) -> str:
    return f"{count / 1e3:.1f} kB" if count < 100_000 else f"{count / 1e6:.1f} MB"


def _list(storage: Storage, job_id: str, options: argparse.Namespace) -> Said:
    rows = [_facts(series, found) for series in _all_series(storage) for found in series.all(job_id)]
    return rows, "\n".join(_table(rows, "")) if rows else f"{storage.url} has no checkpoints"


def _verify(storage: Storage, job_id: str, options: argparse.Namespace) -> Said:
    every = [(series, series.verify(one)) for series in _all_series(storage) for one in series.all(job_id)]
    found = [(series, one) for series, one in every if not one.removed]
    if all(one.unfinished for _, one in found):
        raise NoCheckpoint(f"{storage.url} has no completed checkpoints, so there is nothing to verify")
    rows = [_facts(series, one) for series, one in found]
    damaged = any(one.problem and not one.unfinished for _, one in found)
    return rows, "\n".join(_table(rows, "whole")), ExitCode.SCRIPT_FAILED if damaged else ExitCode.DONE


def _show(storage: Storage, job_id: str, options: argparse.Namespace) -> Said:
    series, found = _find(storage, job_id, options.name)
    manifest = found.manifest
    assert manifest is not None
    tensors = described_tensors(manifest.header)
    document = {
        **_facts(series, found),
        "job": manifest.job,
        **asdict(manifest.moment),
        "generation": manifest.generation,
        "files": [asdict(file) for file in manifest.files],
        "state": manifest.header["state"],
        "tensors": {tensor.name: f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors},
    }
    moment = manifest.moment
    lines = [
        *_table([_facts(series, found)], "whole"),
        f"job {manifest.job}, seed {moment.seed}, {moment.shards} shards, written by {manifest.world} workers",
        f"job.state {json.dumps(document['state'])}",
        *(f"  {file.size:>12} bytes  {file.sha256[:16]}  {file.name}" for file in manifest.files),
        *(f"  {tensor.dtype:<10} {list(tensor.shape)!s:<20} {tensor.name}" for tensor in tensors),
    ]
    return document, "\n".join(lines)


def _export(storage: Storage, job_id: str, options: argparse.Namespace) -> Said:
    series, found = _find(storage, job_id, options.name)
    assert found.manifest is not None
    written = [str(path) for path in export(series, found.manifest, options.output)]
    return written, "\n".join(written)


def _prune(storage: Storage, job_id: str, options: argparse.Namespace) -> Said:
    from elastic.records.job_directory import read_settings
    from elastic.records.resume import steps_on_file

    keep, steps, skipped = Keep(), None, tuple[str, ...]()
    if options.job_dir is not None:  # from what the job does not go on replaces nothing from which it would
        settings = read_settings(options.job_dir)
        steps, skipped = steps_on_file(options.job_dir) if settings.ledger else None, settings.skipped
        keep = Keep.parse(settings.keep)
    if options.keep is not None:
        keep = Keep.parse(options.keep)
    removed = Series(storage).prune(keep, job_id, skipped=skipped, thorough=True, steps=steps)
    gone = [str(name) for name in removed]
    return gone, "\n".join(f"removed {name}" for name in gone) or "nothing to remove"
