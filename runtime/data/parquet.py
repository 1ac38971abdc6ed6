"""elastic.ParquetStream: Parquet files as a stream of job.stream, without an iterator state.

Row groups are what is read at once. An epoch puts all of them into an order, and the rows of each into another one; the
rows of all, one after the other, are cut into as many equal runs as there are shards. So which rows a batch has is
computed from (seed, epoch, shard, number), and a shard is opened behind any batch by reading one row group. The footers
of all files are read when the stream is made; of each row group 8 bytes are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from elastic.errors import ConfigError
from elastic.protocol.sampling import Indices, permute

ROWS_SEED = 1
"""Added to the seed for the order of rows, so that it is not that of the row groups."""


class ParquetStream:
    """For `job.stream(ParquetStream(...), shards=8)`.

    path: a file, a directory of files, or several of either; local, or an fsspec URL such as s3://bucket/table.
    batch_size: rows of one shard in one step. columns: which are read (default: all). shuffle: the order of row groups,
    and of rows in each, is another one in each epoch. seed: of that order; the same on all workers.

    A batch is a dict, column -> values of `batch_size` rows: a tensor of numbers or booleans, 2-D for lists of one
    length, else a list. Rows behind the last whole step of an epoch's order are left out; all others come once.

    Raises ConfigError if there is nothing to read, or pyarrow is missing.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        batch_size: int,
        columns: Sequence[str] | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size={batch_size!r} must be an integer of at least 1")
        if isinstance(columns, str):
            raise ConfigError(f"columns={columns!r} must be a list of names: columns=[{columns!r}]")
        self._groups = _row_groups([path] if isinstance(path, str | Path) else list(path))
        self._ends: Indices = np.cumsum([group.rows for group in self._groups], dtype=np.int64)
        self.rows = int(self._ends[-1]) if self._groups else 0
        """The number of rows of all files."""
        names = self._groups[0].fragment.physical_schema.names if self._groups else []
        self._columns = list(names) if columns is None else list(columns)
        if missing := [name for name in self._columns if name not in names]:
            raise ConfigError(f"ParquetStream: no column {missing[0]!r}; there are {', '.join(names) or 'none'}")
        self._check_types()
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed

    def _check_types(self) -> None:
        """Raise ConfigError if a file has another type in a column than the first file, or lacks the column: batches of
        rows of both could not be made, which training would find only when it comes there."""
        files = list({group.fragment.path: group.fragment for group in self._groups}.values())
        wanted = {name: files[0].physical_schema.field(name).type for name in self._columns} if files else {}
        for file in files[1:]:
            schema = file.physical_schema
            for name, kind in wanted.items():
                if (here := schema.field(name).type if name in schema.names else "missing") != kind:
                    raise ConfigError(
                        f"ParquetStream: column {name!r} is {here} in {file.path}, and {kind} in {files[0].path}; "
                        "write it with one type, or leave it out by columns="
                    )

    def about(self) -> dict[str, Any]:
        """All that decides which rows a batch has, as JSON; members compare it."""
        parts = hashlib.sha256(",".join(str(group.rows) for group in self._groups).encode()).hexdigest()[:16]
        return {
            "rows": self.rows,
            "row_groups": parts,
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "data_seed": self._seed,
        }

    def steps(self, shards: int) -> int:
        """How many steps an epoch has."""
        return self.rows // (self._batch_size * shards)

    def open(self, shards: int, shard: int, epoch: int, skip: int) -> Iterator[dict[str, Any]]:
        """The batches of one of so many shards in an epoch, without the first `skip`. Raises ConfigError if an epoch
        has no step, and for a null in a column of numbers."""
        steps, size = self.steps(shards), self._batch_size
        if steps == 0:
            raise ConfigError(
                f"ParquetStream: {self.rows} rows are less than one step, which has {shards} shards of {size} rows"
            )
        first = (shard * steps + skip) * size
        return self._batches(epoch, first, (steps - skip) * size)

    def _batches(self, epoch: int, first: int, rows: int) -> Iterator[dict[str, Any]]:
        """The batches of so many rows, from the row `first` of the epoch's order on."""
        import pyarrow

        held: list[Any] = []
        count = 0
        for table in self._tables(epoch, first, rows):
            held.append(table)
            count += table.num_rows
            if count < self._batch_size:
                continue
            whole = pyarrow.concat_tables(held)
            for at in range(0, count - self._batch_size + 1, self._batch_size):
                yield self._batch(whole.slice(at, self._batch_size))
            held, count = [whole.slice(count - count % self._batch_size)], count % self._batch_size

    def _tables(self, epoch: int, first: int, rows: int) -> Iterator[Any]:
        """What each row group gives to these places."""
        number = len(self._groups)
        order = np.arange(number, dtype=np.int64)
        if self._shuffle:
            order = permute(self._seed, epoch, number, order)
        ends = np.cumsum([self._groups[group].rows for group in order])
        at = int(np.searchsorted(ends, first, side="right"))
        while rows > 0:
            group = self._groups[order[at]]
            begin = first - (int(ends[at]) - group.rows)
            taken = min(group.rows - begin, rows)
            table = group.fragment.to_table(columns=self._columns)
            places = np.arange(begin, begin + taken, dtype=np.int64)
            if self._shuffle:
                places = permute(self._seed + ROWS_SEED + int(order[at]), epoch, group.rows, places)
                yield table.take(places)
            else:
                yield table.slice(begin, taken)
            first, rows, at = first + taken, rows - taken, at + 1

    def _batch(self, table: Any) -> dict[str, Any]:
        return {name: _values(name, table.column(name)) for name in self._columns}


@dataclass(frozen=True, slots=True)
class ParquetShards:
    """open(shard, epoch, skip) of a stream that is cut into so many shards."""

    stream: ParquetStream
    shards: int

    def __call__(self, shard: int, epoch: int, skip: int) -> Iterator[Mapping[str, Any]]:
        return self.stream.open(self.shards, shard, epoch, skip)


@dataclass(frozen=True, slots=True)
class _RowGroup:
    fragment: Any
    rows: int


def _row_groups(paths: Sequence[str | Path]) -> list[_RowGroup]:
    """The row groups of all files, in the order of `paths`; the files of a directory in the order of their names."""
    if not paths:
        raise ConfigError("ParquetStream was given no path")
    try:
        import pyarrow
        import pyarrow.dataset
    except ImportError:
        raise ConfigError("ParquetStream needs pyarrow, of an extra: pip install 'elastic-ring[parquet]'") from None
    found = []
    for path in map(str, paths):
        where, files = _filesystem(path)
        try:
            dataset = pyarrow.dataset.dataset(where, format="parquet", filesystem=files)
            for fragment in sorted(dataset.get_fragments(), key=lambda fragment: str(fragment.path)):
                for group in fragment.split_by_row_group():
                    found.append(_RowGroup(group, group.row_groups[0].num_rows))
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise ConfigError(f"ParquetStream: {path} cannot be read: {error}") from error
    return [group for group in found if group.rows]


def _filesystem(path: str) -> tuple[str, Any]:
    """The path, and what pyarrow reads it by; None: as a local one."""
    if "://" not in path:
        return path, None
    import fsspec
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    files, where = fsspec.core.url_to_fs(path)
    return where, PyFileSystem(FSSpecHandler(files))


def _values(name: str, column: Any) -> torch.Tensor | list[Any]:
    import pyarrow
    from pyarrow import types

    kind = column.type
    shape: list[int] = []
    while types.is_fixed_size_list(kind):
        kind, shape = kind.value_type, [*shape, kind.list_size]
    is_list = types.is_list(kind) or types.is_large_list(kind)
    inner = kind.value_type if is_list else kind
    if not (types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner)):
        return list(column.to_pylist())
    array = column.combine_chunks()
    if isinstance(array, pyarrow.ChunkedArray):
        array = pyarrow.concat_arrays(array.chunks)
    rows = len(array)
    if is_list:
        lengths = set(array.value_lengths().to_pylist())
        if len(lengths) != 1 or None in lengths or shape:
            return list(column.to_pylist())
        shape = [lengths.pop()]
    nulls = array.null_count
    while hasattr(array, "flatten") and (types.is_fixed_size_list(array.type) or is_list):
        array, is_list = array.flatten(), False  # without the lists that are null
        nulls += array.null_count
    if nulls:
        raise ConfigError(f"ParquetStream: column {name!r} has nulls among its numbers; write a number in their place")
    return torch.from_numpy(np.array(array.to_numpy(zero_copy_only=False))).reshape(rows, *shape)
