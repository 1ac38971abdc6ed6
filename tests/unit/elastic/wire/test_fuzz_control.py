"""What the control plane reads from outside: messages of other processes, files, and what a user has written.

Whatever the bytes are, the answer is a value or the typed error of that reader, soon.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any, get_args

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from elastic.agent import ledger_writer
from elastic.checkpoints.manifest import Manifest, PartNote, _digest
from elastic.checkpoints.pointer import Pointer
from elastic.config import JobSpec, job_from_toml
from elastic.errors import CheckpointCorrupt, ConfigError
from elastic.protocol.messages import Generation, Kind, Member, Order, Plan, Publish, Word
from elastic.records import journal, ledger
from elastic.records.ledger import Ledger, LedgerConflict
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb
from elastic.wire.broadcast import Publisher, Reader
from elastic.wire.generation_delta import Delta
from tests.unit.broken import DEEP, documents, json_bytes, mutated
from tests.unit.elastic.checkpoints.test_checkpoint_rules import MANIFEST as WHOLE
from tests.unit.elastic.wire.test_codec import values


def wire(kinds: Any, write: Callable[[Any], Any]) -> st.SearchStrategy[bytes]:
    """Messages, of which some bytes are others, missing or twice."""
    whole = st.one_of([values(kind, "") for kind in get_args(kinds)]).map(lambda it: write(it).SerializeToString())
    return st.binary(max_size=200) | mutated(whole)


@given(wire(Word, codec.word_to_wire))
def test_a_word_is_read_or_refused(data: bytes) -> None:
    try:
        message = pb.Word.FromString(data)
    except DecodeError:  # gRPC ends the call
        return
    try:
        word = codec.word_from_wire(message)
    except codec.WireError:
        return
    assert codec.word_from_wire(codec.word_to_wire(word)) == word


@given(wire(Order, codec.order_to_wire))
def test_an_order_is_read_or_refused(data: bytes) -> None:
    try:
        message = pb.Order.FromString(data)
    except DecodeError:
        return
    try:
        order = codec.order_from_wire(message)
    except codec.WireError:
        return
    assert codec.order_from_wire(codec.order_to_wire(order)) == order


DELTAS = values(Delta, "").map(lambda delta: codec.value_to_wire(delta).SerializeToString())


@given(st.binary(max_size=200) | mutated(DELTAS), st.binary(max_size=50))
def test_a_delta_is_read_or_refused(data: bytes, packed: bytes) -> None:
    """By the agent's reader, which has the generation that it may be against."""
    reader, base = Reader(), Generation(1, Kind.FORM, 1, (Member("a.0.0", "a", "host", 1, 0),), Plan(), "here")
    reader.read(Publisher().addressed(Publish(1, base), ["a.0.0"], {}))
    known = pb.Delta(base_number=1, base_digest=base.digest()).SerializeToString()
    for addressed in (pb.Addressed(delta=data), pb.Addressed(delta=data + known), pb.Addressed(packed=packed)):
        with contextlib.suppress(codec.WireError):
            reader.read(addressed)


@given(mutated(values(Generation, "").map(codec.to_json)) | json_bytes())
@example(DEEP)
def test_a_generation_of_the_store_is_read_or_refused(data: bytes) -> None:
    try:
        found = codec.generation_from_json(data)
    except codec.WireError:
        return
    assert codec.generation_from_json(codec.to_json(found)) == found


JOB = JobSpec(name="job", command=("python", "train.py"), workers=2, env=("A=b",))


@given(mutated(st.just(codec.to_json(JOB))) | json_bytes() | documents(json.loads(codec.to_json(JOB))))
@example(DEEP)
@example(codec.to_json(JOB).replace(b'"beat_s": 0.25', b'"beat_s": 1' + b"0" * 400))
def test_a_job_of_a_directory_is_read_or_refused(data: bytes) -> None:
    try:
        found = codec.job_from_json(data, "job.json")
    except ConfigError as error:
        assert "job.json" in str(error)
        return
    assert isinstance(found, JobSpec)


TOML = """\
name = "job"
command = ["python", "train.py"]
workers = 3
checkpoint_every = "10 min"
checkpoint_keep = "last 2, every 1000 steps"
slow_factor = 2.5
[timing]
beat_s = 0.25
[env]
A = "b"
"""


@given(mutated(st.just(TOML.encode())) | st.text(max_size=60).map(lambda text: text.encode(errors="replace")))
@example(TOML.replace("3", "1" + "0" * 400).encode())
@example(TOML.replace("0.25", "1" + "0" * 400).encode())
@example(TOML.replace("3", "9" * 5000).encode())
@example(TOML.replace("last 2", f"last {'9' * 5000}").encode())
@example(TOML.replace("10 min", f"{'9' * 400} steps").encode())
@example(b"a = " + b"[" * 100_000)
@example((TOML + "B = [\n[" + " " * 20_000 + "\n]]").encode())
def test_a_job_toml_is_read_or_refused(data: bytes) -> None:
    try:
        found = job_from_toml(data.decode(errors="replace"), "job.toml")
    except ConfigError as error:
        assert "job.toml" in str(error)
        return
    assert isinstance(found, JobSpec)


def signed(body: Any) -> bytes:
    """With the digest that belongs to it, so that what is checked is the content."""
    return json.dumps({"sha256": _digest(body), **body} if isinstance(body, dict) else body).encode()


def body_of(content: bytes) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(content)
    del body["sha256"]
    return body


MANIFEST = WHOLE.to_json()
NOTE = PartNote(WHOLE.files, "2026-01-01T00:00:00+00:00").to_json()


@given(
    mutated(st.just(MANIFEST)) | json_bytes() | documents(body_of(MANIFEST)).map(lambda data: signed(json.loads(data)))
)
@example(DEEP)
def test_a_manifest_is_read_or_named_as_damaged(data: bytes) -> None:
    try:
        found = Manifest.from_json(data)
    except CheckpointCorrupt:
        return
    assert Manifest.from_json(found.to_json()) == found
    assert found.name.step == found.moment.step and found.size >= 0


@given(mutated(st.just(NOTE)) | json_bytes() | documents(body_of(NOTE)).map(lambda data: signed(json.loads(data))))
@example(DEEP)
def test_a_note_of_a_part_is_read_or_named_as_damaged(data: bytes) -> None:
    try:
        found = PartNote.from_json(data)
    except CheckpointCorrupt:
        return
    assert PartNote.from_json(found.to_json()) == found


LINE = (
    b'{"t_mono_ns":5,"generation":1,"worker_id":"a.0.0","who":"a.0.0","event":"committed","kind":"loss","members":[]}'
)


@given(mutated(st.just(LINE)) | json_bytes() | documents(json.loads(LINE)))
@example(DEEP)
@example(b'{"t_mono_ns":5,"event":"member_lost"}')
def test_a_line_of_a_journal_is_read_or_left_out(data: bytes) -> None:
    line = journal.parse(data)
    if line is not None:
        assert isinstance(line["worker_id"], str) and isinstance(line["generation"], int)


RECORD = (
    b'{"step":0,"epoch":0,"generation":1,"world_size":1,"lr":[0.1],"scalars":{"loss":0.5},"samples":[[0,1]],"data":1}'
)


@given(mutated(st.just(RECORD)) | json_bytes() | documents(json.loads(RECORD)))
@example(DEEP)
@example(b'{"step":true}')
@example(b'{"step":' + b"9" * 5000 + b",}")
def test_a_line_of_a_ledger_is_read_or_named(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("ledger") / "steps.jsonl"
    path.write_bytes(data + b"\n" + RECORD.replace(b":0", b":1", 1) + b"\n")
    for read in (
        lambda: ledger.read(path),
        lambda: ledger.between(path, 0, 9),
        lambda: ledger.merged([path, path]),
        lambda: Ledger(path).close(),
        lambda: Ledger(path, whole=False).close(),
    ):
        try:
            read()
        except LedgerConflict as error:
            assert str(path) in str(error)


@given(json_bytes() | mutated(st.just(RECORD)))
@example(DEEP)
@example(b'{"step":-1}')
def test_a_record_of_a_worker_is_read_or_refused(data: bytes) -> None:
    try:
        line = ledger_writer.record(data.decode(errors="replace"))
    except codec.WireError:
        return
    assert line["step"] >= 0


@given(json_bytes())
@example(DEEP)
def test_a_pointer_is_read_or_is_none(data: bytes) -> None:
    try:
        Pointer.from_json(data)
    except CheckpointCorrupt:
        return
