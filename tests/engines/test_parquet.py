"""elastic.ParquetStream: which rows come, whatever the world, and where they are read again."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from elastic.errors import ConfigError, LaunchFailed
from elastic.records import ledger

pyarrow = pytest.importorskip("pyarrow", reason="make test-engines installs it")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = 1003
SHARDS = 4


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Three files, of row groups of 50 rows and their rests. The column `row` says which row it is."""
    directory = tmp_path / "table"
    directory.mkdir()
    for number, (first, end) in enumerate(((0, 410), (410, 411), (411, ROWS))):
        rows = list(range(first, end))
        columns = {
            "row": rows,
            "x": pyarrow.array([[row / 7, row % 5, 1.0] for row in rows], pyarrow.list_(pyarrow.float32(), 3)),
            "name": [f"row {row}" for row in rows],
        }
        parquet.write_table(pyarrow.table(columns), directory / f"part-{number}.parquet", row_group_size=50)
    return directory


def rows(stream: elastic.ParquetStream, epoch: int, shards: int = SHARDS) -> list[list[list[int]]]:
    """Of each shard the batches."""
    return [[batch["row"].tolist() for batch in stream.open(shards, shard, epoch, 0)] for shard in range(shards)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("shards", [1, 4, 7])
def test_each_row_of_an_epoch_comes_once_and_all_shards_have_as_many_batches(
    table: Path, shuffle: bool, shards: int
) -> None:
    stream = elastic.ParquetStream(table, batch_size=12, shuffle=shuffle, seed=5)
    assert stream.rows == ROWS
    for epoch in (0, 1):
        found = rows(stream, epoch, shards)
        assert {len(batches) for batches in found} == {ROWS // (12 * shards)} == {stream.steps(shards)}
        flat = [row for batches in found for batch in batches for row in batch]
        assert len(flat) == len(set(flat)) == stream.steps(shards) * 12 * shards and set(flat) <= set(range(ROWS))
        assert (flat == list(range(len(flat)))) == (not shuffle)
    assert (rows(stream, 0) == rows(stream, 1)) == (not shuffle)


def test_a_shard_that_is_opened_behind_any_batch_goes_on_as_if_it_had_been_read_from_the_start(table: Path) -> None:
    stream = elastic.ParquetStream(str(table), batch_size=9, columns=["row"], shuffle=True)
    for shard, batches in enumerate(rows(stream, 3)):
        for skip in range(len(batches) + 1):
            assert [batch["row"].tolist() for batch in stream.open(SHARDS, shard, 3, skip)] == batches[skip:]


def test_a_batch_has_tensors_of_numbers_and_lists_of_the_rest(table: Path) -> None:
    batch = next(iter(elastic.ParquetStream(table, batch_size=8).open(SHARDS, 1, 0, 0)))
    first = int(batch["row"][0])
    assert batch["row"].dtype == torch.int64 and batch["x"].dtype == torch.float32 and batch["x"].shape == (8, 3)
    assert batch["x"][0].tolist() == pytest.approx([first / 7, first % 5, 1.0])
    assert batch["name"][0] == f"row {first}"


def test_an_fsspec_path_and_several_paths_give_the_rows_of_the_local_directory(table: Path) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    for path in sorted(table.iterdir()):
        files.pipe(f"/parquet-test/{path.name}", path.read_bytes())
    try:
        here = rows(elastic.ParquetStream(table, batch_size=12, shuffle=True), 0)
        assert rows(elastic.ParquetStream("memory://parquet-test", batch_size=12, shuffle=True), 0) == here
        assert rows(elastic.ParquetStream(sorted(table.iterdir()), batch_size=12, shuffle=True), 0) == here
    finally:
        files.rm("/parquet-test", recursive=True)


def test_what_cannot_be_read_is_said(table: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no column 'y'"):
        elastic.ParquetStream(table, batch_size=1, columns=["y"])
    with pytest.raises(ConfigError, match="cannot be read"):
        elastic.ParquetStream(tmp_path / "nowhere", batch_size=1)
    with pytest.raises(ConfigError, match="less than one step"):
        elastic.ParquetStream(table, batch_size=500).open(SHARDS, 0, 0, 0)
    parquet.write_table(pyarrow.table({"z": [1, None]}), tmp_path / "nulls.parquet")
    with pytest.raises(ConfigError, match="'z' has nulls"):
        list(elastic.ParquetStream(tmp_path / "nulls.parquet", batch_size=1).open(2, 1, 0, 0))


def train(home: str, dying: dict[str, int]) -> str:
    """Three epochs. dying: worker -> the step in which it kills itself; "all": the function raises in that one."""
    job = elastic.join(seed=1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    job.register(model=model, optimizer=optimizer)
    data = elastic.ParquetStream(f"{home}/table", batch_size=8, columns=["row", "x"], shuffle=True, seed=7)
    stream = job.stream(data, shards=SHARDS)
    for _ in job.epochs(3):
        for step in job.steps(stream):
            for batch in step:
                time.sleep(0.02 if dying else 0)
                loss = model(batch["x"]).square().mean()
                loss.backward()
                step.log(rows=batch["row"].sum().double())
                if step.index == dying.get(job.worker_id):
                    os.kill(os.getpid(), signal.SIGKILL)
            if step.index == dying.get("all"):
                raise ArithmeticError
            optimizer.step()
            optimizer.zero_grad()
    return job.digest()


@pytest.fixture
def quiet(table: Path, tmp_path: Path) -> tuple[str, list[dict[str, Any]]]:
    return launched(tmp_path, "quiet", 1, {})


def launched(home: Path, name: str, workers: int, dying: dict[str, int], **options: Any) -> tuple[str, Any]:
    """The digest, and the ledger."""
    digest = elastic.launch(train, str(home), dying, workers=workers, job_dir=home / name, quiet=True, **options)
    return digest, [json.loads(line) for line in (home / name / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "dying",
    [
        pytest.param({"local.1.0": 20}, id="a worker dies and another one joins"),
        pytest.param(
            {"local.0.0": 40, "local.1.0": 40, "local.2.0": 40}, id="all die and the job goes on from a snapshot"
        ),
    ],
)
def test_the_bits_are_those_of_the_quiet_run(
    tmp_path: Path, quiet: tuple[str, list[dict[str, Any]]], dying: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    digest, steps = launched(tmp_path, "killed", 3, dying, snapshot_every="5 steps", checkpoint_every="10 steps")
    assert digest == quiet[0]
    assert ledger.compare(steps, quiet[1]) is None
    files = (tmp_path / "killed" / "journal").glob("*.jsonl")
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert any(line["event"] == "worker_started" and not line["worker_id"].endswith(".0") for line in lines)
    assert len(dying) == 1 or any(line["event"] == "state_restored" for line in lines)
    assert [len(epoch) for epoch in epochs(steps)] == 3 * [ROWS // (8 * SHARDS)]


def epochs(steps: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [list(group) for _, group in itertools.groupby(steps, key=lambda line: line["epoch"])]


def test_files_that_do_not_fit_together_are_refused_before_the_first_step(table: Path) -> None:
    odd = pyarrow.table({"row": [0.5], "name": ["a"]})
    parquet.write_table(odd, table / "part-9.parquet")
    for columns, named in ((["name", "row"], "'row' is double in .*part-9"), (["x"], "'x' is missing in .*part-9")):
        with pytest.raises(ConfigError, match=named):
            elastic.ParquetStream(table, batch_size=2, columns=columns)
    assert elastic.ParquetStream(table, batch_size=2, columns=["name"]).rows == ROWS + 1


def test_a_list_that_is_null_is_named(tmp_path: Path) -> None:
    lists = pyarrow.array([[1, 2], None, [3, 4], [5, 6]], pyarrow.list_(pyarrow.int64(), 2))
    parquet.write_table(pyarrow.table({"x": lists}), tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match="column 'x' has nulls"):
        list(elastic.ParquetStream(tmp_path, batch_size=2).open(1, 0, 0, 0))


def test_a_run_that_goes_on_with_other_files_is_refused(tmp_path: Path, table: Path) -> None:
    with pytest.raises(LaunchFailed):
        launched(tmp_path, "job", 1, {"all": 30}, checkpoint_every="10 steps", max_restarts=0)
    (table / "part-1.parquet").unlink()
    with pytest.raises(LaunchFailed) as caught:
        launched(tmp_path, "job", 1, {})
    assert any(
        "this job was begun with other data (rows: 1002 here, 1003 there" in note for note in caught.value.__notes__
    )
