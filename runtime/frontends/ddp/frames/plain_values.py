"""The plain values in the frames of a script: counters, running sums, the best accuracy so far.

A script counts turns where it means steps. So the changes that a silent turn has made to plain values are undone before
the next turn of the same pass. A newcomer gets the values that change from a member. Plain values are numbers, strings,
None, members of an Enum, short tensors, and the entries of lists and deques. A newcomer gets short tensors, and lists
of plain values and of tensors of one element, too.
"""

from __future__ import annotations

import enum
import itertools
import operator
import random
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from types import FrameType
from typing import Any, ClassVar, Self, TypeAlias, TypeGuard

import numpy as np
import torch

from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.frames.places import (
    CODE,
    DEPTH_MAX,
    KEYS,
    OBJECTS_MAX,
    ScriptFrames,
    ValuePlace,
    is_dict,
    is_whole,
)
from runtime.recovery.state.change_detection import version_of

Plain: TypeAlias = int | float | bool | str | enum.Enum | None
Held: TypeAlias = Plain | torch.Tensor | list[Plain | torch.Tensor]
"""What a newcomer gets."""

TEXT_MAX = 200
"""Characters of a string; a longer one is data."""
TENSOR_MAX = 64
"""Elements of a tensor; a larger one is data, or an average of the weights."""
LIST_MAX = 4096
"""Entries of a list that are kept, and that a newcomer gets; a longer one is data, and only made as short as it was."""
_ABSENT = object()
_KINDS = (int, float, bool, str, type(None))


class Listed:
    """What was in a list or a deque at one moment. Equal to one with the same entries."""

    def __init__(self, values: list[Any] | deque[Any], length: int | None = None) -> None:
        """length: how many of the entries were there then; None: all."""
        self.values = values
        self.length = len(values) if length is None else length
        self.entries = list(values)[: self.length] if self.length <= LIST_MAX else None
        """None: too many."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Listed) and self.length == other.length and same(self.entries, other.entries)

    def put_back(self) -> None:
        if self.entries is None:
            while len(self.values) > self.length:
                self.values.pop()
        elif not same(self.entries, list(self.values)):
            self.values.clear()
            self.values.extend(self.entries)

    def rebase(self, others: list[Any], met: Listed) -> None:
        """Become what this would be if the list had had these entries when it had those of `met`: it has what was
        appended to it since then, and lacks what was not there yet. A list that was changed otherwise stays."""
        mine, there = self.entries, met.entries
        if mine is not None and there is not None and same(mine[: len(there)], there[: len(mine)]):
            self.entries = others[: max(0, len(others) + len(mine) - len(there))] + mine[len(there) :]
            self.length = len(self.entries)


def same(one: list[Any] | None, other: list[Any] | None) -> bool:
    """Whether the entries are the same objects; what they are is not looked at."""
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(map(operator.is_, one, other))


class FrameValues:
    """The plain values that there were at one moment. Made by `read`."""

    tensor_max: ClassVar = TENSOR_MAX

    def __init__(self, frames: ScriptFrames) -> None:
        self._frames = frames
        self._plain: dict[ValuePlace, Plain] = {}
        self._lists: dict[ValuePlace, Listed] = {}
        self._tensors: dict[ValuePlace, tuple[torch.Tensor, torch.Tensor]] = {}
        self._dicts: dict[ValuePlace, tuple[dict[Any, Any], set[Any]]] = {}
        """Short dicts, and the keys that they had."""
        self._attributes: dict[ValuePlace, tuple[dict[Any, Any], set[Any]]] = {}
        """Attributes of objects, and the names that they had."""
        self._other: dict[ValuePlace, weakref.ref[Any] | None] = {}
        """Where something else is, and what; None: a reference to it would keep it alive."""
        self._long: dict[ValuePlace, tuple[torch.Tensor, int]] = {}
        """Longer tensors, and their versions."""
        self._iterators: dict[ValuePlace, tuple[object, object]] = {}
        """Iterators and random generators, and how far they were."""

    @classmethod
    def read(cls, frames: ScriptFrames) -> Self:
        """The plain values in the frames that stand around this call."""
        found = cls(frames)
        for place, value in frames.values():
            if type(value) in CODE:
                found._other[place] = _reference(value)
            elif not _looked_at(value, cls.tensor_max):
                found._other[place] = _reference(value)
                if (progress := _progress(value)) is not None:
                    found._iterators[place] = (value, progress)
                if type(value) is torch.Tensor and not value.requires_grad:
                    found._long[place] = (value, version_of(value))
                if is_dict(value) and len(value) <= OBJECTS_MAX:
                    found._dicts[place] = (value, set(value))
                elif len(place.path) < DEPTH_MAX and frames.is_followed(value) and hasattr(value, "__dict__"):
                    found._attributes[place] = (vars(value), set(vars(value)))
            elif isinstance(value, list | deque):
                found._lists[place] = Listed(value)
            elif isinstance(value, torch.Tensor):
                found._tensors[place] = (value, value.detach().clone())
            else:
                found._plain[place] = value
        return found

    def plain(self) -> dict[str, Plain]:
        """Numbers, strings and None, by the text of their place."""
        return {place.text: value for place, value in self._plain.items()}

    def moment(self) -> dict[str, object]:
        """As `plain`; for each tensor itself and its version, which no device is asked for, and for each list its
        entries. Called when the values are those of this moment."""
        tensors = {place.text: (tensor, version_of(tensor)) for place, (tensor, _) in self._tensors.items()}
        return {**self.plain(), **tensors, **{place.text: listed for place, listed in self._lists.items()}}

    def held(self, names: Collection[str], earlier: FrameValues) -> dict[str, Held]:
        """What is at these places, for a newcomer. A tensor or a list that has come to its place since `earlier`, when
        the batch was handed out, is the batch itself, or made of it: each worker has its own. Where a frame has stood
        only then, as that of a generator has, which waits now, its numbers are those of then."""
        known = {**earlier.plain(), **self.plain()}
        found: dict[str, Held] = {name: item(value) for name, value in known.items() if name in names}
        for place, (tensor, before) in self._tensors.items():
            if place.text in names and earlier._tensors.get(place, (None,))[0] is tensor:
                found[place.text] = before
        for place, listed in self._lists.items():
            entries, met = listed.entries, earlier._lists.get(place)
            stays = met is not None and met.values is listed.values
            if place.text in names and stays and entries is not None and all(map(_is_small, entries)):
                found[place.text] = entries
        return found

    def put_back(self, *, objects: bool) -> None:
        """Put every value back as it was then. Names that have come since stay, but for plain values in dicts,
        and in attributes.

        objects: also where an object has come in the place of a number, a string or None; one object in the place of
        another, and both were there then, as where two names swap their objects; and as far as attributes have come.
        """
        now = FrameValues.read(self._frames)
        wanted: dict[ValuePlace, object] = {
            place: value
            for place, value in self._plain.items()
            if (objects and place in now._other) or _differs(now._at(place), value)
        }
        if objects:
            wanted |= self._swapped(now)
        for place, listed in self._lists.items():
            listed.put_back()
            here = now._at(place)
            if (objects and place in now._other) or (here is not listed.values and here is not _ABSENT):
                wanted[place] = listed.values
        for owner, keys in self._dicts.values():
            for key in [key for key, value in born(owner, keys) if _looked_at(value)]:
                del owner[key]
        for owner, keys in self._attributes.values() if objects else ():
            come = born(owner, keys)
            # Behind `if not hasattr(self, "file"):` others may come, which are not made anew if the object stays.
            if all(_looked_at(value) or isinstance(value, torch.Tensor | dict | tuple) for _, value in come):
                for key in [key for key, value in come if _looked_at(value)]:
                    del owner[key]
        for place, (tensor, before) in self._tensors.items():
            if not torch.equal(tensor, before):
                fill(tensor, before)
            here = now._at(place)
            if here is not tensor and here is not _ABSENT:
                wanted[place] = tensor
        self._frames.write(wanted)

    def _swapped(self, now: FrameValues) -> dict[ValuePlace, object]:
        """What was where another object is now that was elsewhere then."""
        before = {place: value for place, there in self._other.items() if there and (value := there()) is not None}
        known = set(map(id, before.values()))
        here = {place: there() for place, there in now._other.items() if there}
        return {
            place: value
            for place, value in before.items()
            if here.get(place, value) is not value and id(here[place]) in known
        }

    def check_iterators(self) -> None:
        """Raise NotInPlace if an iterator or a random generator of the script has gone on since: that cannot be undone
        in a silent turn."""
        now = FrameValues.read(self._frames)._iterators if self._iterators else {}
        for place, (iterator, progress) in self._iterators.items():
            here, further = now.get(place, (None, None))
            if here is iterator and further != progress:
                raise mistakes.goes_on(place.spelling, type(iterator).__name__)

    def _at(self, place: ValuePlace) -> object:
        """The value there, or _ABSENT."""
        if place in self._plain:
            return self._plain[place]
        if place in self._lists:
            return self._lists[place].values
        return self._tensors[place][0] if place in self._tensors else _ABSENT

    def become(self, others: Mapping[str, Held]) -> None:
        """Take over the values that a member had when it was here. A whole number keeps what this worker has added to
        its own since then, and a list what was appended to it, as the member has done too; every other value that it
        has changed since stays. Dicts get keys that they had not."""
        self._bear(others)
        now = FrameValues.read(self._frames)
        wanted: dict[ValuePlace, object] = {}
        for place, before in self._plain.items():
            if place.text not in others or place not in now._plain:
                continue
            there, here = others[place.text], now._plain[place]
            if type(there) is int and type(here) is int and type(before) is int:
                there = there + here - before
            elif type(here) is not type(before) or here != before:
                continue
            if isinstance(here, np.number) and is_number(there):
                there = here.dtype.type(there)
            if isinstance(there, torch.Tensor | list) or _differs(here, there):
                wanted[place] = there
        for place, (tensor, was) in self._tensors.items():
            there = others.get(place.text, tensor)
            if there is tensor or now._at(place) is not tensor or not torch.equal(tensor, was):
                continue
            if isinstance(there, torch.Tensor) and (there.shape, there.dtype) == (was.shape, was.dtype):
                fill(tensor, there)
            else:
                wanted[place] = there
        for place, listed in self._lists.items():
            there = others.get(place.text)
            if isinstance(there, list) and now._at(place) is listed.values and len(listed.values) >= listed.length:
                now._lists[place].rebase(there, listed)
                now._lists[place].put_back()
        self._frames.write(wanted)

    def _bear(self, others: Mapping[str, Held]) -> None:
        """A member's dicts have had keys here that those of this worker get later, or have got since, and its objects
        attributes."""
        for place, (owner, keys) in {**self._dicts, **self._attributes}.items():
            for name in others:
                text, value = name.removeprefix(f"{place.text}."), others[name]
                key = _key(text)
                if text == name or "." in text or key in keys or isinstance(value, torch.Tensor):
                    continue
                keys.add(key)
                if isinstance(value, list):
                    self._lists[place.under(key)] = Listed(owner.setdefault(key, []), 0)
                else:
                    self._plain[place.under(key)] = 0 if is_number(value) else value
                    owner.setdefault(key, self._plain[place.under(key)])

    def rebase(self, others: Mapping[str, Held], met: FrameValues) -> None:
        """These values become what they would have been if this worker had had those of a member from the beginning of
        the turn on. met: those of this worker where the member had its own, as in `become`."""
        self._bear(others)
        for place, value in self._plain.items():
            there, met_here = others.get(place.text, value), met._plain.get(place, _ABSENT)
            if type(there) is int and type(value) is int and type(met_here) is int:
                self._plain[place] = there + value - met_here
            elif met_here in (value, _ABSENT) and not isinstance(there, torch.Tensor | list):
                self._plain[place] = there
        for place, (tensor, was) in self._tensors.items():
            copied, met_was = others.get(place.text), met._tensors.get(place, (tensor, was))[1]
            if not isinstance(copied, torch.Tensor) or (copied.shape, copied.dtype) != (was.shape, was.dtype):
                continue
            if torch.equal(was, met_was):
                self._tensors[place] = tensor, copied.to(was.device)
        for place, listed in self._lists.items():
            if isinstance(entries := others.get(place.text), list):
                listed.rebase(entries, met._lists.get(place, listed))

    def predicted(self, at_forward: FrameValues, earlier: Mapping[str, int]) -> dict[tuple[FrameType, str], object]:
        """The whole numbers of local names as they will be at the end of the turn: those that the script had changed
        when the model ran stay, the others grow as they did in the step before, earlier, or by 1."""
        standing = self._frames.standing()
        found: dict[tuple[FrameType, str], object] = {}
        for place, here in at_forward._plain.items():
            if type(here) is int and not place.path and 0 <= place.frame < len(standing):
                before = self._plain.get(place)
                if type(before) is int and here == before:
                    here = before + before - earlier.get(place.text, before - 1)
                found[standing[place.frame], place.name] = here
        return found

    def become_earlier(self, earlier: Mapping[str, int], counters: Collection[str], *, certain: bool = True) -> None:
        """Whole numbers become what they would be now in a step that had begun with earlier. A local name among
        counters that is not in earlier becomes 1 less than it is. certain: False leaves a number as it is where it
        would become one that it has had in no step, as before the first step of the job or of an epoch: scripts divide
        by the number of steps."""
        wanted: dict[ValuePlace, Plain] = {}
        for place, here in FrameValues.read(self._frames)._plain.items():
            before = self._plain.get(place, here)
            local = place.frame >= 0 and not place.path
            counts = place.text in earlier or here != before or (local and place.name in counters)
            if type(here) is int and type(before) is int and counts:
                was = earlier.get(place.text, before - 1 if certain else before)
                grown = before - earlier.get(place.text, before - 1)
                if here - before not in (0, grown) or grown < -1:
                    grown = 1  # it began anew: by the head of the loop, or before the loop
                if certain or min(was, before, here) <= here - grown <= max(was, before, here):
                    wanted[place] = here - grown
        self._frames.write(wanted)


class FrameCounters:
    """Which plain values a script changes from step to step, and what the whole numbers among them were."""

    def __init__(self) -> None:
        self._before: dict[str, object] | None = None
        self._changing: set[str] = set()
        self.earlier: dict[str, int] = {}
        """The whole numbers that change, by the text of their place, as they were when the step before began."""

    def of(self, values: FrameValues, earlier: FrameValues) -> dict[str, Held]:
        """The values that have changed from one step to another, by the text of their place. earlier: as for `held`."""
        return values.held(self._changing, earlier)

    def step(self, values: FrameValues) -> None:
        """The first batch of a step is handed out, and these are the values."""
        now, before = values.moment(), self._before
        if before is not None:
            self._changing |= {
                name for name, value in now.items() if name not in before or _changed(before[name], value)
            }
        self.earlier = {
            name: value for name, value in (before or {}).items() if name in self._changing and type(value) is int
        }
        self._before = now

    @property
    def parts(self) -> frozenset[str]:
        """The attributes and keys among the places of those values."""
        return frozenset(name.rpartition(".")[2] for name in self._changing)

    def told(self, names: Mapping[str, Held]) -> None:
        """A member has seen the values of these places change."""
        self._changing |= names.keys()


def _reference(value: object) -> weakref.ref[Any] | None:
    """None for tensors, too: what is computed from batch to batch has come to its name in this turn."""
    return weakref.ref(value) if type(value).__weakrefoffset__ and not isinstance(value, torch.Tensor) else None


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor these values."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():  # such a tensor cannot be changed outside
        tensor.copy_(values)


def born(owner: dict[Any, Any], keys: set[Any]) -> list[tuple[str | int, Any]]:
    return [(key, value) for key, value in owner.items() if type(key) in KEYS and key not in keys]


def _key(text: str) -> str | int:
    """The key in the text of a place."""
    whole = text.strip("'")
    if not is_whole(whole):
        return text
    return int(text) if whole == text else whole


def is_number(value: object) -> TypeGuard[float]:
    return type(value) in (int, float) or isinstance(value, np.floating | np.integer)


def item(value: Any) -> Any:
    """A number of numpy as one of Python."""
    return value.item() if isinstance(value, np.number) else value


def _progress(value: object) -> object:
    """How far an iterator is, or the state of a random generator; None: it is none, or nobody can say."""
    match value:
        case itertools.count():
            return repr(value)
        case random.Random():
            return value.getstate()
        case np.random.Generator():
            return repr(value.bit_generator.state)
        case np.random.RandomState():
            return repr(value.get_state(legacy=False))
        case torch.Generator() if value is not torch.default_generator:
            return bytes(value.get_state().numpy())
        case Iterator() if hasattr(value, "__length_hint__"):
            return operator.length_hint(value)
    return getattr(value, "_num_yielded", None) if isinstance(value, Iterator) else None


def _is_small(entry: object) -> bool:
    """Whether a newcomer gets this entry of a list."""
    return type(entry) in _KINDS or (type(entry) is torch.Tensor and entry.numel() == 1 and not entry.requires_grad)


def _differs(here: object, value: Plain) -> bool:
    return here is not _ABSENT and (type(here) is not type(value) or here != value)


def _changed(one: object, other: object) -> bool:
    """Whether what `moment` has of a place differs."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[0] is not other[0] or one[1] != other[1]
    return isinstance(one, tuple) or isinstance(other, tuple) or one != other


def _looked_at(value: object, tensor_max: int = TENSOR_MAX) -> bool:
    if type(value) in _KINDS or isinstance(value, np.number | enum.Enum):
        return not isinstance(value, str) or len(value) <= TEXT_MAX
    if type(value) is torch.Tensor:
        return value.numel() <= tensor_max and not value.requires_grad and value.layout == torch.strided
    return type(value) in (list, deque)
