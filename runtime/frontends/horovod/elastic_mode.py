"""hvd.elastic: the states of a script whose workers come and go, and the decorator of the function that trains.

With logical ranks, and in a script that was started alone, the world never changes: a commit saves, and that is all.
"""

from __future__ import annotations

import copy
import functools
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle, islice
from typing import Any, TypeVar

import torch
from torch.utils.data import Sampler

from runtime.frontends.horovod.current import here, init
from runtime.frontends.horovod.interrupts import HorovodInternalError, HostsUpdatedInterrupt
from runtime.frontends.horovod.member_world import MemberWorld
from runtime.frontends.horovod.objects import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from runtime.frontends.horovod.rank_world import RankWorld

R = TypeVar("R")


class ElasticSampler(Sampler[int]):
    """The samples of this rank among those of the epoch that were not processed yet: to be kept in a TorchState, which
    deals them anew when the workers change."""

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        """seed: of the order, together with the epoch; alike on all ranks."""
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        """Samples of this epoch that all ranks together have processed."""
        self.num_replicas = self.rank = self.num_samples = self.total_size = 0
        self.remaining_indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """To be called at the end of an epoch, with the number of the next: it begins with all samples."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """A batch of this size was processed, and one on each other rank. batch_idx: not looked at."""
        if not isinstance(here("elastic"), RankWorld):  # they always have their own samples; a turn may be for another
            self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal what is left to the ranks that there are now."""
        standing = here("elastic.ElasticSampler").standing
        self.rank, self.num_replicas = standing.rank, standing.size
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # Each rank gets equally many, also where fewer samples are left than there are ranks: some are dealt twice.
        return iter([*islice(cycle(self.remaining_indices), self.rank, self.total_size, self.num_replicas)])

    def __len__(self) -> int:
        return self.num_samples


class ElasticState:
    """What a script derives its own state from: save, restore and sync."""

    def __init__(self, **kwargs: Any) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Functions that are called when the workers have changed, on all of them, as for a learning rate by size()."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The workers have changed."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save, and let workers come and go. Raises HostsUpdatedInterrupt as check_host_updates() does."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Let workers come and go. All workers call it at one place. Raises HostsUpdatedInterrupt if the workers are
        other ones since the last call, or one that comes has copied the state in this one."""
        world = here("elastic.State.check_host_updates")
        if not isinstance(world, MemberWorld) or not world.running:
            return
        if world.next_step():
            self.sync_values()
            raise HostsUpdatedInterrupt(skip_sync=True)

    def save(self) -> None:
        """Keep the state of this moment in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what `save` kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take the state of rank 0."""
        raise NotImplementedError

    def sync_values(self) -> None:  # a state of tensors alone has none
        """Take what is not a tensor from rank 0: a newcomer may have counted on, beside the others."""

    def reset(self) -> None:
        """The workers have changed."""

    def registered(self) -> dict[str, Any]:
        """What newcomers copy, by name: objects with state_dict() and load_state_dict()."""
        raise NotImplementedError


State = ElasticState  # the name that scripts know


class ObjectState(ElasticState):
    """Plain values, by attribute: `ObjectState(epoch=0, batch=0)`. In an elastic job: numbers, strings, lists, tuples,
    dicts, tensors; raises NotCarried there for others. Horovod's first arguments, bcast_object and get_rank, are not
    used."""

    def __init__(self, bcast_object: object = None, get_rank: object = None, **kwargs: Any) -> None:
        self._saved_state = dict(kwargs)
        super().__init__()
        self._set_attributes()

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attributes()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = broadcast_object(self._saved_state, name="state")
            self._set_attributes()

    def sync_values(self) -> None:
        ObjectState.save(self)
        ObjectState.sync(self)

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)

    def registered(self) -> dict[str, Any]:
        return {"state": StateAttributes(self)}


class StateAttributes:
    """The attributes of an ObjectState, as something that is copied."""

    def __init__(self, state: ObjectState) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """Those of now."""
        return {name: getattr(self._state, name) for name in self._state._saved_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """They are also what is saved."""
        self._state._saved_state = dict(state)
        self._state._set_attributes()


class TorchState(ObjectState):
    """A model, an optimizer, plain values; also several of each, and samplers, by name: `TorchState(model=model,
    optimizer=optimizer, sampler=sampler, epoch=0)`."""

    _kept: dict[str, Any]
    """Name -> model, optimizer or sampler."""

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {**kwargs, "model": model, "optimizer": optimizer}
        object.__setattr__(self, "_kept", {name: value for name, value in given.items() if _is_kept(value)})
        self._saved = {name: _copied(value) for name, value in self._kept.items()}
        for name, value in self._kept.items():
            object.__setattr__(self, name, value)
        super().__init__(**{name: value for name, value in given.items() if name not in self._kept})
        if isinstance(here("elastic.TorchState"), RankWorld):
            # Its values are followed as those of an object of the script: undone behind silent turns, told newcomers.
            module = sys._getframe(1).f_globals.get("__name__", "__main__")
            self.__class__ = type("TorchState", (type(self),), {"__module__": module})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._kept and _is_kept(value):
            self._kept[name], self._saved[name] = value, _copied(value)
        object.__setattr__(self, name, value)

    def save(self) -> None:
        if not isinstance(here("elastic.TorchState"), RankWorld):  # which never goes back
            for name, value in self._kept.items():
                self._saved[name] = _copied_over(self._saved.get(name), value.state_dict())
        super().save()

    def restore(self) -> None:
        for name, value in self._kept.items():
            value.load_state_dict(copy.deepcopy(self._saved[name]))  # which an optimizer takes for its own
        super().restore()

    def sync(self) -> None:
        for name, value in self._kept.items():
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            else:
                value.load_state_dict(broadcast_object(value.state_dict(), name=name))
        self._saved = {name: _copied(value) for name, value in self._kept.items()}
        super().sync()

    def sync_values(self) -> None:
        for name, value in self._kept.items():
            if isinstance(value, ElasticSampler):
                value.load_state_dict(broadcast_object(value.state_dict(), name=name))
        super().sync_values()

    def reset(self) -> None:
        for value in self._kept.values():
            if isinstance(value, ElasticSampler):
                value.reset()

    def registered(self) -> dict[str, Any]:
        return {**self._kept, **super().registered()}


def _is_kept(value: object) -> bool:
    return isinstance(value, torch.nn.Module | torch.optim.Optimizer | ElasticSampler)


def _copied(value: Any) -> Any:
    return _copied_over(None, value.state_dict())


@torch.no_grad()
def _copied_over(before: Any, now: Any) -> Any:
    """A copy of `now`, in the memory of an earlier copy where that fits: fresh memory costs more than the copy. Each
    tensor has memory of its own, as weights that are tied today may be untied before the next copy."""
    if isinstance(now, torch.Tensor):
        alike = isinstance(before, torch.Tensor) and (before.shape, before.dtype) == (now.shape, now.dtype)
        return before.copy_(now.detach()) if alike and before.device == now.device else now.detach().clone()
    if isinstance(now, dict):
        kept = before if isinstance(before, Mapping) else {}
        found = copy.copy(now)  # with what a module's has besides: the versions of its parts
        found.update((key, _copied_over(kept.get(key), value)) for key, value in now.items())
        return found
    return copy.deepcopy(now)


def run(function: Callable[..., R]) -> Callable[..., R]:
    """Decorate a function of (state, ...) that trains: it is called again when the workers have changed, with the state
    where it was. Nothing is undone for a worker that was lost. If the function itself raises HorovodInternalError, on
    all workers, the state goes back to the last commit. In an elastic job it is called once: ConfigError."""

    @functools.wraps(function)
    def wrapper(state: ElasticState, *args: Any, **kwargs: Any) -> R:
        init()
        world = here("elastic.run")
        if isinstance(world, MemberWorld):
            world.check_first()
        _begin(state)
        while True:
            try:
                return function(state, *args, **kwargs)
            except HorovodInternalError:
                state.restore()
                state.on_reset()
                _begin(state)
            except HostsUpdatedInterrupt as interrupt:
                state.on_reset()
                if not interrupt.skip_sync:
                    _begin(state)

    return wrapper


def _begin(state: ElasticState) -> None:
    """Have the state of rank 0 on all workers."""
    world = here("elastic.run")
    if isinstance(world, RankWorld):
        return  # the loop begins alike
    if not isinstance(world, MemberWorld) or world.running:
        state.sync()
        return
    found = world.start(state.registered())
    if found.changed:
        state.sync_values()
    if found.resets:
        state.on_reset()  # as the others do when this worker comes
    state.save()
