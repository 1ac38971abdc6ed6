"""Loops over what Accelerator.prepare() gives, under --restart --ranks: each step is kept in memory, without a line in
the script.

The loop is the script's own, so the next process comes through it anew. *Loops* are the outermost ones over prepared
DataLoaders, in training and evaluation alike, and each is known by its number. Of a loop that was over, the script gets
a single batch; behind it, its plain values (script_values.py) become what they were at the end of that loop. So code
between loops computes what it did. At the loop in which the step was kept, models and all else are filled, its batches
that are done are taken from the loader and dropped, and the script goes on behind them. What the single batches have
done to weights and random numbers is gone then. Meanwhile no process is the main one, and nothing is saved or logged.

A step is kept when the script asks for the batch behind it, so all that it does behind the step belongs to it.

Private names of accelerate, seen in the versions TESTED: Accelerator._models, _optimizers, _schedulers, _dataloaders
and _custom_objects.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from elastic.errors import ConfigError, NotCarried
from runtime.data.random_state import RandomNumbers
from runtime.frontends.ddp.frames.places import ScriptFrames
from runtime.frontends.frameworks.accelerate import REFUSED, counts_of, set_counts
from runtime.frontends.frameworks.accelerate_batches import sampler_within
from runtime.frontends.restart import script_values
from runtime.frontends.restart.kept_averages import KeptAverages
from runtime.frontends.restart.script_values import Told
from runtime.recovery.kept.keep import KeptScript, is_kept, keep, kept_before
from runtime.recovery.kept.place import KeptPlace
from runtime.script_end import exit_now
from runtime.script_files import is_library

TESTED = ("1.15",)
NAME = "accelerate"
"""The name under which elastic.keep has the KeptAccelerate."""
LISTS = ("_models", "_optimizers", "_schedulers", "_custom_objects")
VALUE_MAX = 64 << 10
"""Characters of a value at the end of a loop that was over: a longer one stays as the single batch has left it."""
ALL_MAX = 8 << 20
"""Characters of all values behind a step. If they are more, nothing is kept."""


def install(accelerate: Any) -> None:
    """accelerate: the package. Raises ConfigError."""
    place = KeptPlace.from_environment(os.environ)
    if place is None or not place.own:
        return
    kind = accelerate.Accelerator
    original = kind.__init__

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        refused = self.distributed_type.value in REFUSED and not _is_fsdp2(self)
        if refused or is_library(sys._getframe(1).f_code.co_filename):
            return  # that of a trainer, which has a loop of its own
        if missing := [name for name in (*LISTS, "_dataloaders") if not hasattr(self, name)]:
            raise ConfigError(
                f"accelerate.Accelerator has no {', '.join(missing)}: the state of version {accelerate.__version__} is "
                f"not kept in memory, that of {', '.join(TESTED)} is; start the script without --ranks"
            )
        if KeptAccelerate.first is None:
            KeptAccelerate.first = KeptAccelerate(place)
        KeptAccelerate.first.accelerators.append(self)

    kind.__init__ = made
    for name in ("save_state", "save_model", "log"):
        setattr(kind, name, _unless_passing(getattr(kind, name)))
    kind.load_state = _loaded(kind.load_state)
    for name in ("is_main_process", "is_local_main_process"):
        setattr(accelerate.PartialState, name, property(_main_unless_passing(getattr(accelerate.PartialState, name))))
    loaders = accelerate.data_loader
    loaders.DataLoaderShard.__iter__ = _iterated(loaders.DataLoaderShard.__iter__)
    loaders.DataLoaderDispatcher.__iter__ = _dispatched(loaders.DataLoaderDispatcher.__iter__)


def _is_fsdp2(accelerator: Any) -> bool:
    """Whether models are sharded by fully_shard(), in the place of which elastic.keep has their shards."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return accelerator.distributed_type.value == "FSDP" and plugin is not None and plugin.fsdp_version == 2


class KeptAccelerate:
    """What is kept of a script's accelerators, and where its loops are."""

    first: ClassVar[KeptAccelerate | None] = None
    """The only one of this process; None: the script has made no Accelerator."""

    def __init__(self, place: KeptPlace) -> None:
        self.accelerators: list[Any] = []
        self._place = place
        self._kept: KeptScript | None = None
        self._off = False
        before = kept_before(NAME)
        self._ended: list[dict[str, Told]] = []
        """The values that the script had changed by the end of each loop that is over."""
        self._wanted: list[dict[str, Told]] | None = before["ended"] if before else None
        """The same of an earlier round, until its last loop has begun here."""
        self._found: dict[str, Any] | None = None
        self._loop: weakref.ref[_Loop] | None = None
        """The outermost loop that runs."""
        self._frames = ScriptFrames()
        self._averages: KeptAverages | None = None
        """None: the first loop is still to come, or the model is sharded."""
        self._base: dict[str, Told] = {}
        """The values when the first loop began here."""
        self._changing: set[str] = set()
        """Those of `_base` that have been others since."""
        self._stepped = False
        self._batch = 0
        self._values: dict[str, Told] = {}
        self._first_batches: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """Loader -> a batch of it, for loops that were over."""
        self._objects = 0
        """How many are kept."""
        self._goes_on = before is not None
        if before:
            builtins.enumerate = _Counted  # type: ignore[misc]
            atexit.register(self._check_reached)

    @property
    def passing(self) -> bool:
        """Whether the script is in a part that an earlier round has behind it."""
        return self._wanted is not None and bool(self._ended or self._loop)

    @property
    def goes_on(self) -> bool:
        """Whether the loop of an earlier round is still to come."""
        return self._wanted is not None

    def stop(self, because: str) -> None:
        """Keep nothing any more, and load nothing."""
        if not self._off:
            (self._kept or KeptScript({}, self._place)).turn_off(because)
        self._off, self._kept, self._wanted = True, None, None

    # ------------------------------------------------------------------------------------------------ what is kept

    def state_dict(self) -> dict[str, Any]:
        loop = self._current()
        if self._kept is None or loop is None:
            return {}  # keep() asks before it fills it
        if self._averages is not None:
            self._averages.note()
        return {
            "ended": self._ended,
            "batch": self._batch,
            "values": self._values,
            "counts": list(map(counts_of, self.accelerators)),
            "generators": [generator.get_state() for generator in self._generators()],
            "begun": loop.begun,
            "fetched": loop.fetched,
            "averages": None if self._averages is None else self._averages.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._found = state

    def _generators(self) -> list[torch.Generator]:
        """Those of the prepared loaders."""
        found = {}
        for loader in self._loaders():
            sampler = sampler_within(loader)
            for owner, name in ((loader, "generator"), (loader, "synchronized_generator"), (sampler, "generator")):
                if isinstance(generator := getattr(owner, name, None), torch.Generator):
                    found[id(generator)] = generator
        return list(found.values())

    def _loaders(self) -> list[Any]:
        return [loader for accelerator in self.accelerators for loader in accelerator._dataloaders]

    # ------------------------------------------------------------------------------------------------ loops

    def iterate(self, loader: Any, original: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """A loop begins."""
        if self._current() is not None:
            return original(loader) if not self.passing else self._one_batch(loader, original)
        if self._kept is None and is_kept():  # by three lines of its own
            self._off = True
        if self._off or not any(accelerator._optimizers for accelerator in self.accelerators):
            return original(loader)
        if self._averages is None and not any(map(_is_fsdp2, self.accelerators)):
            models = [model for accelerator in self.accelerators for model in accelerator._models]
            registered = [one for accelerator in self.accelerators for one in accelerator._custom_objects]
            self._averages = KeptAverages(self._frames, models, registered)
        wanted, number = self._wanted, len(self._ended)
        values = script_values.read(self._frames)
        self._base = self._base or values
        if wanted is not None and number < len(wanted):
            loop = _Loop(self, self._one_batch(loader, original), values, self._begun())
        elif wanted is not None:
            loop = self._go_on(loader, original, values)
        else:
            if self._kept is None:
                self._begin()
            begun = self._begun()
            loop = _Loop(self, original(loader), values, begun)
        self._loop = weakref.ref(loop)
        return loop

    def _begun(self) -> dict[str, Any]:
        """What the batches of the loop that begins now depend on."""
        return {
            "random": RandomNumbers().state_dict(),
            "generators": [generator.get_state() for generator in self._generators()],
            "iterations": [loader.iteration for loader in self._loaders()],
        }

    def _set(self, random: Mapping[str, Any], generators: Iterable[torch.Tensor]) -> None:
        RandomNumbers().load_state_dict(random)
        for generator, state in zip(self._generators(), generators, strict=True):
            generator.set_state(state)

    def _begin(self) -> None:
        """All that is prepared is kept from now on, and filled if an earlier round has kept it."""
        objects = self._prepared()
        scalers = [accelerator.scaler for accelerator in self.accelerators if accelerator.scaler is not None]
        self._kept, self._objects = keep(*objects, *scalers, accelerate=self), len(objects)
        for accelerator in self.accelerators:
            for one in accelerator._optimizers:
                one.optimizer.register_step_post_hook(self._has_stepped)

    def _prepared(self) -> list[Any]:
        return [one for accelerator in self.accelerators for name in LISTS for one in getattr(accelerator, name)]

    def _has_stepped(self, *_: object) -> None:
        self._stepped = True

    def _go_on(self, loader: Any, original: Callable[[Any], Iterator[Any]], values: dict[str, Told]) -> _Loop:
        """The loop in which an earlier round was."""
        self._begin()
        found, random = self._found, RandomNumbers().state_dict()
        assert found is not None, "keep() has filled it"
        begun = found["begun"]
        for one, iteration in zip(self._loaders(), begun["iterations"], strict=True):
            one.iteration = iteration
        self._set(begun["random"], begun["generators"])
        batches = original(loader)
        for left in range(found["batch"], 0, -1):
            if left == 1:  # accelerate takes the batch behind it, too
                RandomNumbers().load_state_dict(found["fetched"])
            next(batches)
        self._set(random, found["generators"])
        for accelerator, counts in zip(self.accelerators, found["counts"], strict=True):
            set_counts(accelerator, counts)
        if self._averages is not None and (averages := found.get("averages")):  # an older version has kept none
            self._averages.load_state_dict(averages)
        self._wanted, self._found = None, None
        self._first_batches.clear()
        return _Loop(self, batches, values, begun, found["batch"], found["values"])

    def _one_batch(self, loader: Any, original: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """The only batch of a loop that was over; the last one of its epoch, so that its gradients are not only added
        up."""
        if loader not in self._first_batches:
            self._first_batches[loader] = next(original(loader), None)
            loader.end()
        loader.begin()
        loader.end_of_dataloader = True
        if (batch := self._first_batches[loader]) is not None:
            yield batch
        loader.end()

    def before_batch(self, loop: _Loop) -> None:
        """The script asks for its next batch. Behind the last step of a planned end of a round it does not return."""
        if (put := loop.put) is not None:
            loop.put = None
            self._put(put)
            if self._averages is not None:
                self._averages.put_late()
        if not self._stepped or self._kept is None:
            return
        self._stepped = False
        self._batch, self._values = loop.batch, self._changed(loop)
        try:
            if sum(map(_size, self._values.values())) > ALL_MAX:
                self.stop(f"what the script counts has more than {ALL_MAX >> 20} MiB")
            elif len(self._prepared()) != self._objects:
                self.stop("the script has prepared more behind the beginning of its first loop")
            else:
                self._kept.done()
        except NotCarried as error:
            self.stop(str(error))

    def end(self, loop: _Loop) -> None:
        """A loop is over, or the script has left it."""
        self._loop = None
        wanted = self._wanted
        if wanted is not None and len(self._ended) < len(wanted):
            self._ended.append(wanted[len(self._ended)])
            self._put(self._ended[-1])
        elif wanted is None and not self._off:
            values = self._changed(loop)
            self._ended.append({text: told for text, told in values.items() if _size(told) <= VALUE_MAX})

    def _changed(self, loop: _Loop) -> dict[str, Told]:
        """The values that are not what they were: when the first loop began, or, of names that have come later, when
        this one began. What the script has set before is that of each process: it may name its GPU."""
        now = script_values.read(self._frames)
        of_base = {text: told for text, told in now.items() if text in self._base}
        self._changing |= script_values.changed(of_base, self._base).keys()
        found = {text: told for text, told in of_base.items() if text in self._changing}
        later = {text: told for text, told in now.items() if text not in self._base}
        return found | script_values.changed(later, loop.values)

    def _put(self, values: Mapping[str, Told]) -> None:
        self._changing |= values.keys() & self._base.keys()
        script_values.write(self._frames, {**self._base, **values})

    def _current(self) -> _Loop | None:
        return None if self._loop is None else self._loop()

    # ------------------------------------------------------------------------------------------------ the script's end

    def numbered(self, iterable: Iterable[Any], start: int) -> Iterator[tuple[int, Any]]:
        """enumerate(), with the numbers behind those of the batches that are dropped."""
        dropped: int | None = None
        for item in iterable:
            if dropped is None:
                loop = self._current()
                dropped = 0 if loop is None else loop.dropped
            yield start + dropped, item
            start += 1

    def clear_checkpoint(self, accelerator: Any) -> None:
        """A save that has a name from accelerate and is done again: what is there is of a step that was lost."""
        if self._goes_on and accelerator.project_configuration.automatic_checkpoint_naming:
            path = Path(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")
            if accelerator.is_local_main_process:
                shutil.rmtree(path, ignore_errors=True)
            accelerator.wait_for_everyone()

    def _check_reached(self) -> None:
        if self._wanted is not None and self._ended:
            print(
                f"elastic: the script has ended after {len(self._ended)} loops over what accelerate has prepared, and "
                f"its state was kept in loop {len(self._wanted)}: it has not gone through them as before. Decide by "
                "numbers and not by objects of libraries when to leave a loop, or use elastic.keep",
                file=sys.stderr,
                flush=True,
            )
            exit_now(1)


class _Loop(Iterator[Any]):
    """The batches of an outermost loop. A class and not a generator, as one that is left by `break` is over, too."""

    def __init__(
        self,
        kept: KeptAccelerate,
        batches: Iterator[Any],
        values: dict[str, Told],
        begun: dict[str, Any],
        dropped: int = 0,
        put: dict[str, Told] | None = None,
    ) -> None:
        """values: of the script, when the loop began. put: what they are to be at its first batch."""
        self.values, self.begun, self.dropped, self.put = values, begun, dropped, put
        self.fetched: dict[str, Any] = begun["random"]
        """The random numbers before its newest batch was asked for."""
        self.batch = dropped
        """How many of its batches the script has had, with those that were dropped."""
        self._kept, self._batches, self._over = kept, batches, False

    def __next__(self) -> Any:
        self._kept.before_batch(self)
        self.fetched = RandomNumbers().state_dict()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._end()
            raise
        self.batch += 1
        return batch

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._kept.end(self)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._end()


class _Counted(enumerate):  # type: ignore[type-arg]  # generic for the type checker only
    """enumerate(), of which batches of a prepared loader, also in tqdm(), are counted with those that are dropped."""

    def __new__(cls, iterable: Iterable[Any], start: int = 0) -> Any:
        kept = KeptAccelerate.first
        if kept is not None and kept.goes_on and isinstance(getattr(iterable, "iterable", iterable), DataLoader):
            return kept.numbered(iterable, start)
        return super().__new__(cls, iterable, start)


def _size(told: Told) -> int:
    return len(told[0]) if isinstance(told, list) else 0


def _iterated(original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(original)
    def begin(loader: Any) -> Iterator[Any]:
        kept = KeptAccelerate.first
        return original(loader) if kept is None else kept.iterate(loader, original)

    return begin


def _dispatched(original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    @functools.wraps(original)
    def begin(loader: Any) -> Iterator[Any]:
        if (kept := KeptAccelerate.first) is not None:
            kept.stop(f"rank 0 hands out the batches of a {type(loader.dataset).__name__}")
        return original(loader)

    return begin


def _unless_passing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = KeptAccelerate.first
        if kept is not None and self in kept.accelerators:
            if kept.passing:
                return None
            if original.__name__ == "save_state":
                kept.clear_checkpoint(self)
        return original(self, *args, **kwargs)

    return called


def _loaded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (kept := KeptAccelerate.first) is not None and kept.goes_on:
            kept.stop("the script goes on from a snapshot of its own, by load_state()")
        return original(self, *args, **kwargs)

    return load_state


def _main_unless_passing(own: Any) -> Callable[[Any], bool]:
    def is_main(self: Any) -> bool:
        kept = KeptAccelerate.first
        return bool(own.fget(self)) and not (kept is not None and kept.passing)

    return is_main
