"""The only translator between the frozen values of elastic/protocol/messages and what leaves the process.

Two outsides: protobuf (words and orders on the wire) and JSON (generations in the store, the job's specification
in its directory). Both are driven by the field types of the dataclasses, so a field exists in one place only; a
protobuf message has the name and the field names of its dataclass, and `_translators` refuses to start otherwise.

Everything that comes in is checked before it becomes a value: types, ranges, sizes, and the spelling of names,
because names become store keys and file names. WireError says which field was wrong.
"""

from __future__ import annotations

import json
import re
import types
import zlib
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError, Message

from elastic.config import JobSpec, is_text
from elastic.errors import ConfigError, ElasticError
from elastic.protocol.messages import Generation, Order, Publish, Word
from elastic.wire import MESSAGE_LIMIT as MESSAGE_LIMIT
from elastic.wire import elastic_pb2 as pb

IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,191}")
"""Worker ids, nodes, hosts. No slash and no leading dot: they are used in paths and keys."""

NUMBER_LIMIT = 2**53
"""Every number stays exact in JSON readers that know only doubles."""

ITEMS_LIMIT = 65_536
"""Members of a generation, units of an operation, roots of a report."""

TEXT_LIMIT = 65_536
"""Reasons and tracebacks, in characters; longer ones are cut when sent or stored."""

WORD_LIMIT = 8 * 2**20
"""The largest word that goes up, to an agent or the rendezvous: the longest lists and texts above fit several times."""

_names = IDENTIFIER.fullmatch
_IDENTIFIERS = frozenset({"worker_id", "node", "host"})
_OPTIONAL_IDENTIFIERS = frozenset({"source"})
_FROM_MINUS_ONE = frozenset({"kept", "copied", "copied_step", "op", "home"})
_ANY_SIGN = frozenset({"exit_code"})

_CUT = "(the beginning is cut)\n"

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class WireError(ElasticError):
    """Drop the message and the connection it came from; the other side does not speak this protocol."""


# ------------------------------------------------------------------------------------------------------- protobuf


def parsed(kind: type[M], document: bytes) -> M:
    """A message of protobuf. Raises WireError for what is none."""
    try:
        return kind.FromString(document)
    except DecodeError as error:
        raise WireError(f"no {kind.__name__.lower()}: {error}") from error


def word_to_wire(word: Word) -> pb.Word:
    """A word as protobuf. Raises WireError for a value that could not be read back."""
    return pb.Word(**_content(word, Word, "Word"))


def word_from_wire(message: pb.Word) -> Word:
    """The word in a message. Raises WireError when it is empty or a field is out of bounds."""
    return _open(message, Word, "Word")  # type: ignore[no-any-return]


def order_to_wire(order: Order) -> pb.Order:
    """An order as protobuf. Raises WireError for a value that could not be read back."""
    return pb.Order(**_content(order, Order, "Order"))


def order_from_bytes(document: bytes) -> Order:
    """Raises WireError for what is no order."""
    return order_from_wire(parsed(pb.Order, document))


def order_from_wire(message: pb.Order) -> Order:
    """The order in a message. Raises WireError when it is empty or a field is out of bounds."""
    order: Order = _open(message, Order, "Order")
    if isinstance(order, Publish):
        _whole(order.generation)
    return order


def value_to_wire(value: Any) -> Any:
    """Any dataclass that has a message of its name. Raises WireError for a value that could not be read back."""
    kind: Any = type(value)
    return _translators(kind).encode(value)


def value_from_wire(kind: Any, message: Message) -> Any:
    """The value in a message of its kind. Raises WireError when a field is out of bounds."""
    return _translators(kind).decode(message)


def packed(document: bytes) -> bytes:
    """For a long list, in which most of each entry is like the one before."""
    return zlib.compress(document, 1)


def unpacked(document: bytes) -> bytes:
    """Raises WireError for what packed() has not made of at most MESSAGE_LIMIT bytes."""
    unpacking = zlib.decompressobj()
    try:
        content = unpacking.decompress(document, MESSAGE_LIMIT)
    except zlib.error as error:
        raise WireError(f"not packed: {error}") from error
    if not unpacking.eof:
        raise WireError(f"cut short, or longer than {MESSAGE_LIMIT} bytes")
    return content


def identifier(what: str, text: str) -> str:
    """The text itself if it can name a worker, node or host. Raises WireError otherwise."""
    if not IDENTIFIER.fullmatch(text):
        raise WireError(f"{what}={text[:64]!r} is not a name")
    return text


def cut(text: str) -> str:
    """At most TEXT_LIMIT characters of it. The end of a traceback says what happened, so the end is kept."""
    return text if len(text) <= TEXT_LIMIT else _CUT + text[len(_CUT) - TEXT_LIMIT :]


@dataclass(frozen=True, slots=True)
class _Translator:
    """Both directions for one dataclass."""

    encode: Callable[[Any], Message]
    decode: Callable[[Any], Any]


def _content(value: Any, union: Any, wire_name: str) -> dict[str, Any]:
    name, translator = _oneof(union, wire_name)[type(value)]
    return {name: translator.encode(value)}


def _open(message: Any, union: Any, wire_name: str) -> Any:
    name = message.WhichOneof("content")
    if (decode := _decoders(union, wire_name).get(name)) is None:
        raise WireError(f"an empty or unknown {wire_name}")
    return decode(getattr(message, name))


@cache
def _oneof(union: Any, wire_name: str) -> dict[type, tuple[str, _Translator]]:
    """Dataclass -> its field in the oneof `content` and its translator, for each member of the union."""
    wire_type: Any = getattr(pb, wire_name)
    by_message = {field.message_type.name: field.name for field in wire_type.DESCRIPTOR.fields}
    return {member: (by_message[_wire_name(member)], _translators(member)) for member in get_args(union)}


@cache
def _decoders(union: Any, wire_name: str) -> dict[str, Callable[[Any], Any]]:
    """Field in the oneof `content` -> what makes a value of its message."""
    return {name: translator.decode for name, translator in _oneof(union, wire_name).values()}


def _wire_name(kind: type) -> str:
    """The name of the message for these values. Two have another name here, which an exception bears there."""
    return {"RingBrokenReport": "RingBroken", "BuildFailedReport": "BuildFailed"}.get(kind.__name__, kind.__name__)


@cache
def _translators(kind: type) -> _Translator:
    wire_type = getattr(pb, _wire_name(kind))
    hints = get_type_hints(kind)
    here, there = {field.name for field in fields(kind)}, {field.name for field in wire_type.DESCRIPTOR.fields}
    if here != there:
        raise AssertionError(f"{kind.__name__} and its message differ in {sorted(here ^ there)}")
    columns = [(name, *_column(hints[name], name, wire_type)) for name in hints]
    may_lack = [
        (place, name) for place, name in enumerate(hints) if wire_type.DESCRIPTOR.fields_by_name[name].has_presence
    ]
    readers = [into for _, _, into in columns]
    read = _field_values(tuple(hints))

    def encode(value: Any) -> Message:
        try:
            return wire_type(**{name: out(getattr(value, name)) for name, out, _ in columns})  # type: ignore[no-any-return]
        except (TypeError, ValueError) as error:
            raise WireError(f"{kind.__name__} cannot be sent: {error}") from error

    def decode(message: Any) -> Any:
        values = list(read(message))
        for place, name in may_lack:
            if not message.HasField(name):
                values[place] = None
        return kind(*[into(value) for into, value in zip(readers, values, strict=True)])

    return _Translator(encode, decode)


def _field_values(names: tuple[str, ...]) -> Callable[[Any], Iterable[Any]]:
    """Reads all these fields of a message. attrgetter returns no tuple for a single one."""
    if len(names) == 1:
        return lambda message: (getattr(message, names[0]),)
    return attrgetter(*names)


def _column(hint: Any, name: str, wire_type: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """How one field goes out and comes in."""
    if hint in (int, str, bool):
        return cut if hint is str else _same, _scalar_reader(hint, name)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        enum = wire_type.DESCRIPTOR.fields_by_name[name].enum_type
        numbers = {hint(label.lower()): value.number for label, value in enum.values_by_name.items() if value.number}
        labels = {number: member for member, number in numbers.items()}
        return numbers.__getitem__, lambda value: _known(labels, value, name)
    if _is_node(hint):
        return _node_out, lambda value: _node_in(name, value)
    if get_origin(hint) is tuple:
        out, into = _column(get_args(hint)[0], name, wire_type)
        return lambda values: [out(value) for value in values], lambda values: _items(name, values, into)
    if get_origin(hint) in (Union, types.UnionType):
        _, into = _column(next(arg for arg in get_args(hint) if arg is not type(None)), name, wire_type)
        return _same, lambda value: None if value is None else into(value)
    inner = _translators(hint)
    return inner.encode, lambda value: inner.decode(_present(name, value))


def _same(value: Any) -> Any:
    return value


def _known(labels: dict[int, Any], value: int, name: str) -> Any:
    if value not in labels:
        raise WireError(f"{name}: unknown value {value}")
    return labels[value]


def _present(name: str, value: Any) -> Any:
    if value is None:
        raise WireError(f"{name} is missing")
    return value


def _items(name: str, values: Any, into: Callable[[Any], Any]) -> tuple[Any, ...]:
    if len(values) > ITEMS_LIMIT:
        raise WireError(f"{name}: {len(values)} items are more than {ITEMS_LIMIT}")
    return tuple(into(value) for value in values)


def _is_node(hint: Any) -> bool:
    return get_origin(hint) is tuple and get_args(hint) == (int, int)


def _node_out(node: tuple[int, int]) -> Message:
    return pb.TreeNode(lo=node[0], hi=node[1])


def _node_in(name: str, node: Any) -> tuple[int, int]:
    lo, hi = node.lo, node.hi
    return (lo, hi) if 0 <= lo < hi <= NUMBER_LIMIT else _node(name, (lo, hi))


def _node(name: str, node: tuple[Any, ...]) -> tuple[int, int]:
    lo, hi = (_scalar(int, name, end) for end in node)
    if lo >= hi:
        raise WireError(f"{name}: [{lo}, {hi}) holds no leaf")
    return lo, hi


def _scalar_reader(hint: Any, name: str) -> Callable[[Any], Any]:
    """`_scalar` for one field. Nearly all is in order, and told with one comparison: a leader of thousands of agents
    reads tens of thousands of fields for each loss."""
    if hint is bool:
        return lambda value: value if value is True or value is False else _scalar(hint, name, value)
    if hint is str:
        if name in _IDENTIFIERS:
            return lambda value: value if type(value) is str and _names(value) else _scalar(hint, name, value)
        return lambda value: value if value == "" else _scalar(hint, name, value)
    lowest, highest = _bounds(name)

    def read(value: Any) -> Any:
        return value if type(value) is int and lowest <= value <= highest else _scalar(hint, name, value)

    return read


def _bounds(name: str) -> tuple[int, int]:
    """Least and largest value of a number in a field of that name."""
    lowest = -NUMBER_LIMIT if name in _ANY_SIGN else -1 if name in _FROM_MINUS_ONE else 0
    return lowest, 65_535 if name == "port" else NUMBER_LIMIT


def _scalar(hint: Any, name: str, value: Any) -> Any:
    """The value if its type is exact and it lies within the bounds of a field of that name."""
    if type(value) is not hint:
        raise WireError(f"{name} is of type {type(value).__name__}, not {hint.__name__}")
    if hint is int:
        lowest, highest = _bounds(name)
        if not lowest <= value <= highest:
            raise WireError(f"{name}={value} is outside {lowest}..{highest}")
    elif hint is str:
        if name in _IDENTIFIERS or (name in _OPTIONAL_IDENTIFIERS and value):
            return identifier(name, value)
        if len(value) > TEXT_LIMIT:
            raise WireError(f"{name}: {len(value)} characters are more than {TEXT_LIMIT}")
    return value


# ----------------------------------------------------------------------------------------------------------- JSON


def generation_from_json(document: bytes) -> Generation:
    """Raises WireError for anything but a whole, valid generation."""
    return _whole(from_json(Generation, document))


def _whole(generation: Generation) -> Generation:
    """One with all of its members: a delta's has none. Raises WireError if its plan is not for them."""
    paces, members = len(generation.plan.paces), len(generation.members)
    if paces not in (0, members):
        raise WireError(f"plan: {paces} paces for {members} members")
    if not 0 <= generation.plan.slack <= 100:
        raise WireError(f"plan: a slack of {generation.plan.slack} percent")
    return generation


def job_from_json(document: bytes, where: str) -> JobSpec:
    """where: the file's name, for messages. Raises ConfigError naming the field."""
    try:
        return from_json(JobSpec, document)
    except (WireError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from error


def to_json(value: Any) -> bytes:
    """A dataclass of plain values, tuples and such dataclasses as one JSON object, keys sorted: a generation in the
    store, a job's specification in its directory."""
    return json.dumps(value, default=_object, sort_keys=True).encode()


def _object(value: Any) -> dict[str, Any]:
    if not is_dataclass(value):
        raise TypeError(f"{type(value).__name__} is no value of JSON")
    return {name: getattr(value, name) for name in _field_names(type(value))}


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def from_json(kind: type[T], document: bytes) -> T:
    """What to_json made of a value of that kind. Raises WireError, and what the kind raises for values it refuses."""
    try:
        value = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a JSON document: {error}") from error
    hint: Any = kind
    return _reader(hint, kind.__name__)(value)  # type: ignore[no-any-return]


@cache
def _reader(hint: Any, name: str) -> Callable[[Any], Any]:
    """Makes of a JSON value one of the annotated type. Kept, because a list of thousands has each member's fields."""
    if is_dataclass(hint):
        return _object_reader(hint, name)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return lambda value: _read_enum(hint, name, value)
    if get_origin(hint) is tuple:
        if _is_node(hint):
            return lambda value: _node(name, tuple(ends) if len(ends := _list(name, value)) == 2 else (0, 0))
        into = _reader(get_args(hint)[0], name)
        return lambda value: _items(name, _list(name, value), into)
    if get_origin(hint) in (Union, types.UnionType):
        other = _reader(get_args(hint)[0], name)
        return lambda value: None if value is None else other(value)
    return lambda value: _read_scalar(hint, name, value)


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise WireError(f"{name} is no list")
    return value


def _read_enum(kind: type[StrEnum], name: str, value: Any) -> StrEnum:
    if value not in list(kind):
        raise WireError(f"{name}={value!r:.64} is none of {', '.join(kind)}")
    return kind(value)


def _read_scalar(hint: Any, name: str, value: Any) -> Any:
    if hint is float and type(value) is int and abs(value) <= NUMBER_LIMIT:
        return float(value)
    if isinstance(value, str) and not is_text(value):
        raise WireError(f"{name} is no text that can be sent")
    return _scalar(hint, name, value)


def _object_reader(kind: type, name: str) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    readers = {key: _reader(hint, key) for key, hint in hints.items()}
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise WireError(f"{name} is no object")
        if unknown := sorted(value.keys() - readers.keys()):
            raise WireError(f"{name}: unknown field {unknown[0]!r:.64}")
        for field in needed:
            if field not in value:
                raise WireError(f"{name}: {field} is missing")
        return kind(**{key: readers[key](item) for key, item in value.items()})

    return read
