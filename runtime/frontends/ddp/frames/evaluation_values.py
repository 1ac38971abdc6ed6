"""What an evaluation over a DistributedSampler changes in the frames of a script: each rank's part, and what all ranks
have together.

A worker runs the loop once for each of its ranks. Behind it, each value is what one rank would have on the average: the
sum over all ranks, divided by their number. So it is the same on every worker, and a sum over the ranks is that of all
batches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.frames.places import MODELS, ScriptFrames, ValuePlace
from runtime.frontends.ddp.frames.plain_values import TENSOR_MAX, FrameValues, Listed, born, is_number, item, same
from runtime.recovery.state.change_detection import version_of

SUM_MAX = 1 << 14
"""Elements of a tensor in which an evaluation adds up: as many as dist.all_reduce takes."""
LOWEST, HIGHEST = "lowest ", "highest "
_ENTRY = re.compile(r"(\d+)-th (\w+)/?(\d*) in (.*)", re.DOTALL)


class EvaluationValues(FrameValues):
    """The plain values when an evaluation began, also longer tensors."""

    tensor_max = SUM_MAX

    def __init__(self, frames: ScriptFrames) -> None:
        super().__init__(frames)
        self._grown: dict[str, torch.dtype | np.dtype[Any]] = {}
        """Numbers that have become tensors, or numbers of numpy: place -> dtype."""
        self.summed: set[int] = set()
        """Addresses of the tensors to which the evaluation has added something."""

    def added(self, rank: int, batches: int) -> dict[str, float]:
        """What a rank has changed in this many batches, by name. Values with the same name are added up over the ranks.

        - place -> what was added to a number, or to an element of a tensor;
        - `lowest` or `highest`, rank and place -> the new value of a number that was infinite. The name has the rank,
          so that it is not added to the values of other ranks;
          A number that has come in the place of None is both, as all ranks must have the same;
        - place -> 1 for a flag, or for an element of a tensor of flags, that was changed;
        - index, kind and place -> an entry of a list that has got a number for each batch.

        A number may have become a tensor. Raises NotInPlace for values that cannot be added up
        in this way: other lists, and tensors that are too long.
        """
        now = FrameValues.read(self._frames)
        self._bear_anew()
        return {**self._numbers(now, rank), **self._elements(now), **self._entries(now, batches)}

    def _bear_anew(self) -> None:
        """What has come to a dict, and a number that has come as an attribute, is as if it had been there before."""
        for place, (owner, keys) in {**self._dicts, **self._attributes}.items():
            for key, value in born(owner, keys):
                if is_number(value):
                    self._plain[place.under(key)] = 0
                elif place in self._attributes:
                    continue
                elif type(value) is list:
                    self._lists[place.under(key)] = Listed(value, 0)
                elif type(value) is torch.Tensor and value.numel() <= TENSOR_MAX:
                    self._tensors[place.under(key)] = value, torch.zeros_like(value)
                else:
                    continue
                keys.add(key)

    def _numbers(self, now: FrameValues, rank: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for place, was in self._plain.items():
            here = now._at(place)
            if type(was) is bool:
                if _flag(here) is not was and _flag(here) is not None:
                    found[place.text] = 1.0
                continue
            if was is None:
                # In a model it is left alone: forward() keeps a loss there.
                if place.frame != MODELS and (is_number(here) or (not place.path and _is_one_number(here))):
                    found |= {f"{extreme}{rank} {place.text}": float(item(here)) for extreme in (LOWEST, HIGHEST)}
                continue
            scalar = isinstance(here, torch.Tensor) and here.numel() == 1
            if is_number(was) and isinstance(here, torch.Tensor | np.number) and (scalar or is_number(here)):
                self._grown[place.text] = here.dtype
                here = here.item()
            was = item(was)
            if not (is_number(was) and is_number(here)) or here == was:
                continue
            if math.isinf(was) and math.isfinite(here):
                found[f"{LOWEST if was > 0 else HIGHEST}{rank} {place.text}"] = float(here)
            elif math.isfinite(was) or (math.isinf(was) and math.isnan(here)):
                found[place.text] = float(here - was)
        return found

    def _elements(self, now: FrameValues) -> dict[str, float]:
        found: dict[str, float] = {}
        seen: set[int] = set()
        for place, (tensor, before) in self._tensors.items():
            # A longer one that has come under the same name is a batch, or made of it.
            here = now._at(place) if tensor.numel() <= TENSOR_MAX else tensor
            if not isinstance(here, torch.Tensor) or here.shape != before.shape:
                continue
            if id(tensor) not in seen and not torch.equal(here, before):
                differences = (here.double() - before.double()).reshape(-1).tolist()
                for number, (was, value) in enumerate(zip(before.reshape(-1).tolist(), differences, strict=True)):
                    if math.isfinite(was) and value != 0:
                        found[f"{place.text} {number}"] = value
                self.summed.add(here.data_ptr())
            seen.add(id(tensor))
        for place, (tensor, version) in self._long.items():
            if version_of(tensor) != version:
                raise mistakes.collected(f"{place.spelling}, a tensor of more than {SUM_MAX:,} elements that changes")
        return found

    def _entries(self, now: FrameValues, batches: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for place, listed in self._lists.items():
            entries = list(listed.values)
            gained = entries[listed.length :]
            if now._at(place) is not listed.values or not gained or not same(listed.entries, entries[: listed.length]):
                continue
            if len(gained) != batches or not all(map(_is_one_number, gained)):
                raise mistakes.collected(f"{place.spelling}, a list that gets other things than one number a batch")
            for index, entry in enumerate(gained):
                kind = "whole" if type(item(entry)) is int else "number"
                if isinstance(entry, torch.Tensor):
                    kind = f"{str(entry.dtype)[6:]}/{entry.dim()}"
                found[f"{index}-th {kind} in {place.text}"] = float(entry)
        return found

    def check_longer(self) -> None:
        """Raise NotInPlace for a tensor that had no elements and has got some: each worker has others there."""
        empty = [place for place, (_, before) in self._tensors.items() if before.numel() == 0]
        now = FrameValues.read(self._frames) if empty else self
        for place in empty:
            here = now._long.get(place, (now._at(place),))[0]
            if isinstance(here, torch.Tensor) and here.numel() > 0:
                raise mistakes.collected(f"{place.spelling}, a tensor that gets longer")

    def add(self, totals: Mapping[str, float], ranks: int) -> None:
        """Add to each number, tensor and list what all ranks have added to it, divided by the number of ranks; a number
        that was infinite becomes the lowest or highest of the ranks. Called when the values are those of this moment.

        A whole number becomes a fraction if need be, and a tensor of whole numbers another tensor. Raises NotInPlace
        for a number that has come in the place of None, if the ranks have different ones.
        """
        self._frames.write({**self._added_numbers(totals, ranks), **self._added_tensors(totals, ranks)})
        lists: dict[str, dict[int, Any]] = {}
        for name, total in totals.items():
            if (parts := _ENTRY.fullmatch(name)) is not None:
                mean = _share(total, ranks, whole=parts[2] == "whole")
                made = torch.full((1,) * int(parts[3]), mean, dtype=getattr(torch, parts[2])) if parts[3] else mean
                lists.setdefault(parts[4], {})[int(parts[1])] = made
        for place, listed in self._lists.items():
            gained = lists.get(place.text, {})
            listed.values.extend(gained[index] for index in sorted(gained))

    def _added_numbers(self, totals: Mapping[str, float], ranks: int) -> dict[ValuePlace, object]:
        wanted: dict[ValuePlace, object] = {}
        for place, here in self._plain.items():
            if isinstance(here, np.number):
                self._grown.setdefault(place.text, here.dtype)
                here = here.item()
            if here is None and (lowest := totals.get(LOWEST + place.text)) is not None:
                if lowest != totals.get(HIGHEST + place.text):
                    raise mistakes.collected(f"{place.spelling}, None that becomes a number of a rank's batches")
                wanted[place] = int(lowest) if lowest.is_integer() else lowest
            if type(here) is bool and totals.get(place.text):
                wanted[place] = not here
            if type(here) is bool or not isinstance(here, int | float):
                continue
            kind = self._grown.get(place.text)
            for extreme in (LOWEST, HIGHEST):
                if (limit := totals.get(extreme + place.text)) is not None:
                    wanted[place] = _as(kind, limit)
            if place.text in totals:
                total = totals[place.text]
                value = here + _share(total, ranks, whole=type(here) is int)
                wanted[place] = _as(kind, value, whole=total % ranks == 0)
        return wanted

    def _added_tensors(self, totals: Mapping[str, float], ranks: int) -> dict[ValuePlace, object]:
        fractions: dict[int, torch.Tensor] = {}
        for place, (tensor, _) in self._tensors.items():
            found = [totals.get(f"{place.text} {number}", 0.0) for number in range(tensor.numel())]
            shares = (torch.tensor(found, dtype=torch.float64) / ranks).reshape(tensor.shape).to(tensor.device)
            if shares.any() and tensor.dtype == torch.bool:
                tensor.logical_xor_(shares != 0)
            elif shares.any() and not tensor.is_floating_point() and (shares != shares.round()).any():
                fractions[id(tensor)] = tensor + shares
            elif shares.any():
                with torch.no_grad():
                    tensor += shares.to(tensor.dtype)
        places = self._tensors.items()
        return {place: fractions[id(tensor)] for place, (tensor, _) in places if id(tensor) in fractions}


def total(found: list[dict[str, float]]) -> dict[str, float]:
    """What all ranks have added together, or the lowest or highest that they have found. found: of each rank, or sums
    over ranks, as `EvaluationValues.added` gives it."""
    totals: dict[str, float] = {}
    for added in found:
        for name, value in added.items():
            if name.startswith((LOWEST, HIGHEST)):
                extreme, _, text = name.split(" ", 2)
                name = f"{extreme} {text}"
                value = (min if name.startswith(LOWEST) else max)(value, totals.get(name, value))
            else:
                value += totals.get(name, 0)
            totals[name] = value
    return totals


def _share(total: float, ranks: int, *, whole: bool) -> float:
    """A rank's part of a sum. whole: of whole numbers; it is a whole number itself, if it can be."""
    return int(total) // ranks if whole and total % ranks == 0 else total / ranks


def _is_one_number(entry: object) -> bool:
    return is_number(entry) or (type(entry) is torch.Tensor and entry.numel() == 1 and entry.dtype != torch.bool)


def _flag(here: object) -> bool | None:
    """None: it is none."""
    if isinstance(here, torch.Tensor) and here.dtype == torch.bool and here.numel() == 1:
        return bool(here.item())
    return here if isinstance(here, bool) else None


def _as(kind: torch.dtype | np.dtype[Any] | None, value: Any, *, whole: bool = True) -> Any:
    """A number as what it was in the script. whole: what was a whole number has not become a fraction."""
    if isinstance(kind, torch.dtype):
        return torch.tensor(value, dtype=kind if whole else torch.float64)
    return value if kind is None else (kind if whole else np.dtype(float)).type(value)
