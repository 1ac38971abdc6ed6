"""Whatever one process says, the other reads the same; whatever is not of the protocol is refused by name."""

from __future__ import annotations

import types
from dataclasses import fields, replace
from enum import StrEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.config import JobSpec, Timing
from elastic.errors import ConfigError
from elastic.protocol.messages import Announce, Generation, Kind, Member, Order, Plan, Publish, Quiesce, Report, Word
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb

NAMES = st.from_regex(codec.IDENTIFIER, fullmatch=True)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
NODES = st.tuples(st.integers(0, 1000), st.integers(1, 1000)).map(lambda node: (node[0], node[0] + node[1]))


def values(hint: Any, name: str) -> st.SearchStrategy[Any]:
    """Every valid value of a field of that type and name."""
    if hint is int:
        highest = {"port": 65_535, "slack": 100}.get(name, codec.NUMBER_LIMIT)
        return st.integers(-1 if name in ("kept", "copied", "op", "exit_code") else 0, highest)
    if hint is str:
        return NAMES if name in ("worker_id", "node", "host") else st.just("") | NAMES if name == "source" else TEXT
    if hint is bool:
        return st.booleans()
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    if get_origin(hint) is tuple:
        if get_args(hint) == (int, int):
            return NODES
        return st.lists(values(get_args(hint)[0], name), max_size=3).map(tuple)
    if get_origin(hint) in (Union, types.UnionType):
        return st.none() | values(get_args(hint)[0], name)
    hints = get_type_hints(hint)
    built = st.builds(hint, **{field.name: values(hints[field.name], field.name) for field in fields(hint)})
    return built.map(_with_fitting_paces) if hint is Generation else built


def _with_fitting_paces(generation: Generation) -> Generation:
    """Of all members, or of none."""
    plan, size = generation.plan, len(generation.members)
    return replace(generation, plan=replace(plan, paces=(plan.paces + (0,) * size)[:size] if plan.paces else ()))


@pytest.mark.parametrize("kind", get_args(Word), ids=lambda kind: kind.__name__)
def test_every_word_is_read_as_it_was_said(kind: type) -> None:
    @settings(max_examples=15)
    @given(values(kind, ""))
    def round_trip(word: Word) -> None:
        wire = codec.word_to_wire(word).SerializeToString()
        assert codec.word_from_wire(pb.Word.FromString(wire)) == word

    round_trip()


@pytest.mark.parametrize("kind", get_args(Order), ids=lambda kind: kind.__name__)
def test_every_order_is_read_as_it_was_given(kind: type) -> None:
    @settings(max_examples=15)
    @given(values(kind, ""))
    def round_trip(order: Order) -> None:
        assert codec.order_from_bytes(codec.order_to_wire(order).SerializeToString()) == order

    round_trip()


@given(values(Generation, ""))
def test_a_generation_is_read_from_the_store_as_it_was_written(generation: Generation) -> None:
    document = codec.to_json(generation)
    assert codec.generation_from_json(document) == generation
    assert codec.generation_from_json(document).digest() == generation.digest()


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (pb.Word(), "empty"),
        (pb.Word(ready=pb.Ready(worker_id="../etc", generation=1)), "worker_id"),
        (pb.Word(ready=pb.Ready(worker_id=".hidden", generation=1)), "worker_id"),
        (pb.Word(ready=pb.Ready(worker_id="", generation=1)), "worker_id"),
        (pb.Word(ready=pb.Ready(worker_id="a" * 300, generation=1)), "worker_id"),
        (pb.Word(ready=pb.Ready(worker_id="a", generation=-1)), "generation"),
        (pb.Word(ready=pb.Ready(worker_id="a", generation=2**60)), "generation"),
        (pb.Word(announce=pb.Announce(worker_id="a", node="n", host="h", port=70_000)), "port"),
        (pb.Word(announce=pb.Announce(worker_id="a", node="n", host="h", port=1)), "ring"),
        (pb.Word(announce=pb.Announce(worker_id="a", node="n", host="h", ring=99)), "ring"),  # type: ignore[arg-type]
        (pb.Word(report=pb.Report(worker_id="a", roots=[pb.TreeNode(lo=4, hi=4)])), "roots"),
        (pb.Word(report=pb.Report(worker_id="a", kept=-2)), "kept"),
        (pb.Word(drain_wish=pb.DrainWish(worker_id="a", because="x" * 70_000)), "because"),
    ],
)
def test_a_word_out_of_bounds_is_refused_by_the_name_of_its_field(message: pb.Word, named: str) -> None:
    with pytest.raises(codec.WireError, match=named):
        codec.word_from_wire(message)


def test_a_publish_without_its_generation_is_refused() -> None:
    with pytest.raises(codec.WireError, match="generation is missing"):
        codec.order_from_wire(pb.Order(publish=pb.Publish(term=1)))


def test_a_long_traceback_is_cut_when_sent_and_not_refused_when_read() -> None:
    word = codec.word_from_wire(codec.word_to_wire(_announce("x" * 200_000 + " the cause")))
    assert isinstance(word, Announce)
    assert len(word.numerics) == codec.TEXT_LIMIT
    assert word.numerics.endswith("xxx the cause")


def test_a_value_of_the_wrong_type_is_refused_before_it_is_sent() -> None:
    with pytest.raises(codec.WireError, match="Quiesce"):
        codec.order_to_wire(Quiesce(term="one", round=1, up_to=1))  # type: ignore[arg-type]


def test_zero_running_is_not_none_running() -> None:
    """A unit 0 in progress must not look like no unit in progress."""
    report = Report("a", round=1, promise=1, entered=1, has_state=True, reduced=1, running=0)
    for running in (0, None):
        said = replace(report, running=running)
        assert codec.word_from_wire(codec.word_to_wire(said)) == said


@pytest.mark.parametrize(
    ("document", "named"),
    [
        (b"", "JSON"),
        (b"[]", "no object"),
        (b"{}", "missing"),
        (b'{"surprise": 1}', "surprise"),
        (b'{"number": true, "kind": "form", "base": 1, "members": [], "plan": {}, "because": ""}', "number"),
        (b'{"number": 1, "kind": "why", "base": 1, "members": [], "plan": {}, "because": ""}', "kind"),
        (b'{"number": 1, "kind": "form", "base": 1, "members": 7, "plan": {}, "because": ""}', "members"),
        (b'{"number": 1.5, "kind": "form", "base": 1, "members": [], "plan": {}, "because": ""}', "number"),
    ],
)
def test_a_torn_or_foreign_record_is_refused(document: bytes, named: str) -> None:
    with pytest.raises(codec.WireError, match=named):
        codec.generation_from_json(document)


@pytest.mark.parametrize(("members", "paces"), [(2, 1), (1, 2), (0, 1)])
def test_a_plan_with_paces_for_other_members_is_refused(members: int, paces: int) -> None:
    listed = tuple(Member(f"w{i}", "n", "h", 1, 0) for i in range(members))
    generation = Generation(3, Kind.LOSS, 3, listed, Plan(paces=(5,) * paces), "b lost", token="t")
    for read in (
        lambda: codec.generation_from_json(codec.to_json(generation)),
        lambda: codec.order_from_bytes(codec.order_to_wire(Publish(7, generation)).SerializeToString()),
    ):
        with pytest.raises(codec.WireError, match=f"{paces} paces for {members} members"):
            read()


def test_a_job_survives_its_file_and_a_broken_one_names_file_and_field() -> None:
    spec = JobSpec(name="job", command=("python", "train.py"), workers=3, max_workers=4, timing=Timing(beat_s=0.1))
    assert codec.job_from_json(codec.to_json(spec), "job.json") == spec
    with pytest.raises(ConfigError, match=r"job\.json.*workers"):
        codec.job_from_json(b'{"name": "job", "command": ["x"], "workers": "3"}', "job.json")
    with pytest.raises(ConfigError, match=r"job\.json.*workers=0"):
        codec.job_from_json(b'{"name": "job", "command": ["x"], "workers": 0}', "job.json")


def test_an_order_keeps_its_whole_plan() -> None:
    generation = Generation(3, Kind.LOSS, 3, (Member("a", "n", "h", 1, 0),), Plan(op=2), "b lost", token="t")
    order = Publish(7, generation)
    assert codec.order_from_wire(codec.order_to_wire(order)) == order


def _announce(numerics: str) -> Announce:
    return Announce("a", "n", 0, 1, "h", 1, numerics)
