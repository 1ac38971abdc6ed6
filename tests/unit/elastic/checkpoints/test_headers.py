"""What checkpoints, snapshots and the answers of members say of themselves is a claim, also with a right digest."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from elastic.checkpoints import description
from elastic.checkpoints.description import (
    BYTES_MAX,
    DIMENSIONS_MAX,
    FACTORIES,
    ITEM_BYTES,
    described_tensors,
    is_dense,
    sizes,
    unique_names,
)
from elastic.checkpoints.export import export
from elastic.checkpoints.layout import DTYPES, LENGTH, header_bytes, pieces
from elastic.checkpoints.manifest import FileEntry, Manifest, PartNote, _digest
from elastic.checkpoints.naming import MANIFEST
from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import LocalStorage
from elastic.cli.job.checkpoints import LATEST, _find
from elastic.errors import CheckpointCorrupt, CheckpointError, ConfigError
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.recovery.checkpoint import reader
from runtime.recovery.state import encoding
from runtime.recovery.transfer.client import parse_meta, parse_results, parse_state
from runtime.recovery.transfer.connection import CopyFailed
from runtime.recovery.transfer.multi_source import MultiSourceCopy
from runtime.session import Op, OpKind
from runtime.worker.donor import op_json, result_json
from tests.unit.broken import DEEP, documents
from tests.unit.jobs import Setup, make_job, set_up, train

Body = dict[str, Any]


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Series, Setup]:
    """Checkpoints of steps 4 and 8, and what has taken them. Memory of the machine is read by the same code."""
    root = tmp_path_factory.mktemp("checkpoints")
    about = Settings(root=str(root), job="train", job_id="feed", every="4 steps", keep="last 9")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in about.to_environment().items():
            patch.setenv(name, value)
        setup = set_up(make_job())
        setup.model.register_buffer("queue", torch.ones(3), persistent=False)
        setup.job.state.table = {1: torch.ones(2), "1": (0.5, torch.zeros(3, dtype=torch.complex64))}
        setup.job.state.counts = defaultdict(int, {"a": 1})
        setup.job.state.ordered = OrderedDict(b=2)
        setup.job.state.raw = b"\x00raw"
        train(setup, epochs=3, body=lambda setup: setup.job._training.checkpoints.finish())
        setup.job._training.checkpoints.finish()
        setup.job._detach()
    return Series(LocalStorage(str(root))), setup


def body_of(series: Series) -> tuple[Path, Body]:
    """Of the newest manifest, without its digest."""
    path = Path(series.storage.url) / series.path(series.names()[-1], MANIFEST)
    body: Body = json.loads(path.read_bytes())
    del body["sha256"]
    return path, body


def signed(body: Any) -> bytes:
    return json.dumps({"sha256": _digest(body), **body} if isinstance(body, dict) else body).encode()


def set_in(*keys: Any, to: Any) -> Callable[[Body], object]:
    def change(body: Body) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = to

    return change


FIRST = ("header", "tensors", 0)
SHORT = {"dtype": "float32", "shape": [2], "strides": [1], "device": "cpu", "bytes": "AAAA"}
CHANGES: dict[str, Callable[[Body], object]] = {
    "a file outside": set_in("files", 0, "name", to="../../../../etc/passwd"),
    "an absolute file": set_in("files", 0, "name", to="/etc/passwd"),
    "a file named twice": lambda body: body["files"].append(body["files"][0]),
    "a file of no size": set_in("files", 0, "size", to="1"),
    "a huge file": set_in("files", 0, "size", to=1 << 60),
    "a file larger than a number": set_in("files", 0, "size", to=10**400),
    "no files": set_in("files", to=[]),
    "no header": lambda body: body.pop("header"),
    "a header of another format": set_in("header", "format", to=2),
    "an object with something more": lambda body: next(iter(body["header"]["objects"].values())).update(more=1),
    "no tensors": lambda body: body["header"].pop("tensors"),
    "tensors that are no list": set_in("header", "tensors", to={}),
    "a tensor too little": lambda body: body["header"]["tensors"].pop(),
    "a tensor twice": lambda body: body["header"]["tensors"].append(body["header"]["tensors"][0]),
    "a tensor that is none": set_in(*FIRST, to=None),
    "a tensor without a device": lambda body: body["header"]["tensors"][0].pop("device"),
    "nbytes 2**62": set_in(*FIRST, "nbytes", to=1 << 62),
    "nbytes 2**45": set_in(*FIRST, "nbytes", to=1 << 45),
    "nbytes -1": set_in(*FIRST, "nbytes", to=-1),
    "nbytes 'x'": set_in(*FIRST, "nbytes", to="x"),
    "a huge tensor": lambda body: body["header"]["tensors"][0].update(shape=[1 << 43], nbytes=1 << 45),
    "a huge tensor in huge files": lambda body: (
        body["header"]["tensors"][0].update(shape=[1 << 43], nbytes=1 << 45),
        body["files"][0].update(size=1 << 46),
    ),
    "a shape of other rows": set_in(*FIRST, "shape", to=[6, 8]),
    "strides with gaps": set_in(*FIRST, "strides", to=[1 << 40, 1]),
    "strides that overlap": set_in(*FIRST, "strides", to=[1, 1]),
    "strides of other dimensions": set_in(*FIRST, "strides", to=[1]),
    "strides that are none": set_in(*FIRST, "strides", to=[True, "1"]),
    "a shape of negative rows": set_in(*FIRST, "shape", to=[-8, -6]),
    "a shape of many dimensions": set_in(*FIRST, "shape", to=[1] * 10_000),
    "another dtype": set_in(*FIRST, "dtype", to="int32"),
    "a dtype that is none": set_in(*FIRST, "dtype", to="Tensor"),
    "another name": set_in(*FIRST, "name", to="model.other"),
    "half a character": set_in(*FIRST, "name", to="model.\ud800"),
    "an object without state": set_in("header", "objects", "model", to={}),
    "an object that is a list": set_in("header", "objects", "model", to=[]),
    "modules that are no names": set_in("header", "objects", "model", "evaluating", to=[1]),
    "a reference to no tensor": set_in("header", "objects", "model", "state", "0.weight", to={"__tensor__": 9999}),
    "a reference twice": set_in("header", "objects", "model", "state", "0.weight", to={"__tensor__": 1}),
    "a marker that nobody knows": set_in("header", "state", "seen", to={"__bomb__": []}),
    "a marker among keys": set_in("header", "state", "seen", to={"a": 1, "__tuple__": []}),
    "a buffer that is no tensor": set_in("header", "objects", "model", "nonpersistent", to={"queue": [1]}),
    "a default that nobody can make": set_in("header", "state", "counts", "__default__", 0, to="exec"),
    "bytes that are none": set_in("header", "state", "raw", to={"__bytes__": "AAA"}),
    "a bare infinity": set_in("header", "state", "seen", to=float("inf")),
    "state that is a list": set_in("header", "state", to=[]),
    "a job that is a number": set_in("job", to=5),
    "a series elsewhere": set_in("series", to="../x"),
    "a moment that is none": set_in("moment", to=[]),
    "values of an epoch that are none": set_in("moment", "values", to=[]),
    "a value of an epoch that nobody knows": set_in("moment", "values", to={"p": {"__bomb__": []}}),
    "a value of an epoch without its tensor": set_in("moment", "values", to={"p": {"__tensor__": 0}}),
    "a tensor of an epoch that is too short": set_in(
        "moment", "values", to={"p": {"__packed__": {"value": {"__tensor__": 0}, "tensors": [SHORT]}}}
    ),
    "a step that is none": set_in("moment", "step", to=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_header_with_a_right_digest_is_skipped_for_the_one_before(
    change: str, taken: tuple[Series, Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    series, _ = taken
    path, body = body_of(series)
    whole = path.read_bytes()
    CHANGES[change](body)
    path.write_bytes(signed(body))
    largest = max(Path(series.storage.url).rglob("*.safetensors"), key=lambda file: file.stat().st_size).stat().st_size
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **how: bounded(empty(*size, **how), largest))
    try:
        found, skipped = series.newest("feed")
        assert found is not None and found.manifest is not None and found.name == series.names()[-2]
        assert [one.name for one in skipped] == [series.names()[-1]]
        with pytest.raises(CheckpointCorrupt):
            reader.read(series, Manifest.from_json(signed(body)))
        assert reader.read(series, found.manifest)
    finally:
        path.write_bytes(whole)


def bounded(tensor: torch.Tensor, largest: int) -> torch.Tensor:
    assert tensor.is_meta or tensor.nbytes <= largest, "memory by what is claimed"
    return tensor


def sound_or_skipped(series: Series, setup: Setup, content: bytes, output: Path) -> None:
    """Whatever a manifest says: it is skipped, or everything that can be done with a checkpoint can be done with it."""
    path = Path(series.storage.url) / series.path(series.names()[-1], MANIFEST)
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        found, skipped = series.newest("feed")
        assert found is not None and found.manifest is not None
        if found.name != series.names()[-1]:
            assert skipped and skipped[0].problem
            return
        blobs = reader.read(series, found.manifest)
        try:
            setup.job._training.carrier.load(found.manifest.header, blobs)
        except ConfigError as error:
            assert "state" in str(error)  # whole, and of another script: names of objects, of tensors in them
        assert _find(series.storage, "feed", LATEST)
        try:
            export(series, found.manifest, output)
        except CheckpointError as error:
            assert "name of a file" in str(error)
    finally:
        path.write_bytes(whole)


def test_an_object_that_refuses_its_state_is_named(
    taken: tuple[Series, Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(scheduler: object, state: Body) -> None:
        raise KeyError("last_epoch")

    setup = taken[1]
    monkeypatch.setattr(type(setup.scheduler), "load_state_dict", refuse)
    with pytest.raises(ConfigError, match="scheduler refuses the state that is to be loaded"):
        setup.job._training.carrier.load(*setup.job._training.carrier.capture())


@pytest.fixture(scope="module")
def documented(taken: tuple[Series, Setup]) -> Body:
    return body_of(taken[0])[1]


@given(data=st.data(), part=st.sampled_from(["header", "tensors", "objects", "state", "files", "moment", ""]))
def test_any_manifest_is_sound_or_skipped(
    data: st.DataObject,
    part: str,
    taken: tuple[Series, Setup],
    documented: Body,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    body = json.loads(json.dumps(documented))
    holder = body["header"] if part in ("tensors", "objects", "state") else body
    if part:
        holder[part] = {"x": holder[part]}
        holder[part] = json.loads(data.draw(documents(holder[part]))).get("x")
    else:
        body = json.loads(data.draw(documents(body)))
    sound_or_skipped(*taken, signed(body), tmp_path_factory.mktemp("out") / "new" / "export")


def test_tables_of_dtypes_are_those_of_torch() -> None:
    assert {name: dtype.itemsize for name, dtype in encoding._DTYPES.items()} == ITEM_BYTES
    assert set(ITEM_BYTES) - set(DTYPES) == {"complex64", "complex128"}
    assert set(encoding._FACTORIES) == set(FACTORIES)


@given(st.lists(st.sampled_from(["a", "b", "a#1", "a#2", "a#1#1"])))
def test_names_in_files_are_unique_and_only_doubles_are_changed(names: list[str]) -> None:
    found = unique_names(names)
    assert len(set(found)) == len(names)
    for number, (name, unique) in enumerate(zip(names, found, strict=True)):
        assert unique == name if name not in names[:number] else unique.startswith(f"{name}#")


def test_a_name_that_is_there_already_gets_the_next_number_that_is_free() -> None:
    assert unique_names(["a", "a", "a#1", "a", "b"]) == ["a", "a#2", "a#1", "a#3", "b"]


@pytest.mark.parametrize(
    ("around", "levels"),
    [
        (lambda inner: [inner], 1),
        (lambda inner: {"key": inner}, 1),
        (lambda inner: {"__tuple__": [inner]}, 2),
        (lambda inner: {"__dict__": [["key", inner]]}, 2),
        (lambda inner: {"__default__": [None, [["key", inner]]]}, 2),
    ],
    ids=["list", "object", "tuple", "dict", "default"],
)
def test_what_is_nested_too_deeply_is_refused_before_python_cannot_follow(
    around: Callable[[Any], Any], levels: int
) -> None:
    def nested(times: int) -> Any:
        value: Any = 1
        for _ in range(times):
            value = around(value)
        return value

    most = (description.DEPTH_MAX - 1) // levels
    description._walk(nested(most), "state", [], description.DEPTH_MAX)
    with pytest.raises(ValueError, match="nested too deeply"):
        description._walk(nested(most + 1), "state", [], description.DEPTH_MAX)


# ------------------------------------------------------------------------------------------------- data files


@given(data=st.data())
@example(data=None)
def test_the_header_of_a_data_file_is_read_or_named_as_damaged(data: Any, taken: tuple[Series, Setup]) -> None:
    _, body = body_of(taken[0])
    file = FileEntry(**body["files"][0])
    content = (Path(taken[0].storage.url) / taken[0].path(body["entry"], file.name)).read_bytes()
    encoded = content[LENGTH.size : LENGTH.size + LENGTH.unpack(content[: LENGTH.size])[0]]
    if data is None:
        assert pieces(file, encoded)
        longer = json.loads(encoded)
        next(said for name, said in longer.items() if name != "__metadata__")["data_offsets"][1] += 1
        for damaged in (DEEP, json.dumps(longer).encode()):
            with pytest.raises(CheckpointCorrupt):
                pieces(file, damaged)
        return
    try:
        found = pieces(file, data.draw(documents(json.loads(encoded))))
    except CheckpointCorrupt:
        return
    assert sum(piece.end - piece.begin for piece in found) <= file.size


def test_a_note_that_names_a_file_twice_is_damaged() -> None:
    file = FileEntry("part-00000-of-00001.safetensors", 12, "a" * 64)
    with pytest.raises(CheckpointCorrupt, match="twice"):
        PartNote.from_json(PartNote((file, file), "now").to_json())


# ---------------------------------------------------------------------------------------- what a donor describes


@given(data=st.data())
@example(data=None)
def test_what_a_donor_describes_fits_is_refused_or_fails(data: Any, taken: tuple[Series, Setup]) -> None:
    """Before there is memory for it."""
    carrier = taken[1].job._training.carrier
    header, _ = carrier.capture()
    changed = json.loads(json.dumps(header) if data is None else data.draw(documents(header)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.recovery.transfer.multi_source.room_for", lambda sizes: bounded_room(changed, sizes))
        try:
            carrier.check(changed)
            MultiSourceCopy(4, changed)
        except (ConfigError, CopyFailed):
            assert data is not None
            return
    assert described_tensors(changed)


def bounded_room(header: Body, sizes: list[int]) -> list[torch.Tensor]:
    assert sizes == [entry["nbytes"] for entry in header["tensors"]]
    return []


OP = Op(OpKind.SYNC, 4, 1, 7, label="x")
RESULT = result_json(Partial(0, 4, {"float32": torch.ones(3)}, 5, 2.0, {"loss": ("mean", 0.5, 2.0)}, [1]))
ANSWER: Body = {
    "op": 3,
    "about": op_json(OP),
    "state": {},
    "values": {},
    "early": {},
    "stop": "enough",
    "results": [{"about": op_json(OP), "fingerprint": {"a": "b"}, **RESULT[0]}],
}


@given(documents(ANSWER))
@example(json.dumps(ANSWER).encode())
def test_what_a_member_answers_is_read_or_fails(encoded: bytes) -> None:
    answer = json.loads(encoded)
    for read in (lambda: parse_state(answer), lambda: parse_results(3, answer, RESULT[1])):
        try:
            read()
        except CopyFailed:
            assert answer != ANSWER


META: Body = {"epoch": 1, "step": 7, "epoch_start": 5, "state": {"a": 1}, "once": {}, "shared": {}, "data": None}


@given(documents(META))
def test_where_the_job_stands_is_read_or_fails(encoded: bytes) -> None:
    try:
        meta = parse_meta(json.loads(encoded))
    except CopyFailed:
        return
    assert meta.step >= 0 and isinstance(meta.state, dict)


def test_a_tensor_may_have_as_many_dimensions_as_there_may_be_and_no_more() -> None:
    assert sizes([1] * DIMENSIONS_MAX, "shape") == (1,) * DIMENSIONS_MAX
    with pytest.raises(ValueError, match="shape cannot be"):
        sizes([1] * (DIMENSIONS_MAX + 1), "shape")


def test_a_tensor_is_no_larger_than_the_largest_number_of_bytes() -> None:
    assert sizes([BYTES_MAX], "shape") == (BYTES_MAX,)
    with pytest.raises(ValueError, match="shape is larger than any memory"):
        sizes([BYTES_MAX, 2], "shape")


@pytest.mark.parametrize("size", [True, 1.0, "1", None, -1, BYTES_MAX + 1])
def test_a_dimension_is_a_number_of_elements(size: object) -> None:
    with pytest.raises(ValueError, match="shape cannot be"):
        sizes([size], "shape")


def test_a_dimension_of_one_element_may_have_any_stride() -> None:
    assert is_dense((1, 3), (7, 1)) and not is_dense((2, 3), (7, 1))


@pytest.mark.parametrize("stride", [True, 1.0, "1", None, -1, BYTES_MAX + 1])
def test_a_stride_is_a_number_of_elements(stride: object) -> None:
    entry = {"name": "w", "device": "cpu", "dtype": "float32", "shape": [1], "strides": [1], "nbytes": 4}
    assert description._tensor(entry).nbytes == 4
    with pytest.raises(ValueError, match="w cannot lie in memory"):
        description._tensor({**entry, "strides": [stride]})


def test_a_name_with_half_a_character_is_no_text() -> None:
    entry = {"name": "w\ud800", "device": "cpu", "dtype": "float32", "shape": [1], "strides": [1], "nbytes": 4}
    with pytest.raises(ValueError, match="surrogates not allowed"):
        description._tensor(entry)


def test_a_header_ends_with_its_file_at_the_latest() -> None:
    file = FileEntry("data", LENGTH.size + 5, "")
    assert header_bytes(file, LENGTH.pack(5)) == 5
    with pytest.raises(CheckpointCorrupt, match="its header would have 6 bytes"):
        header_bytes(file, LENGTH.pack(6))
