"""What the agents of a round tell each other: the address of its first node, the ranks of their workers, barriers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError, DistStoreError

from elastic.errors import StoreError
from runtime.frontends.torchrun.run_keys import CorruptValue, RunKeys
from runtime.frontends.torchrun.state_backend import StateBackend


class AgentStore(Store):
    """A store of torch's for all agents of a run. torch puts the number of the round before each key. The methods are
    those of torch.distributed.Store; they raise DistNetworkError if etcd does not answer, DistStoreError if a key does
    not come in time. torch does not keep it alive: its maker has to."""

    def __init__(self, keys: RunKeys, state: StateBackend) -> None:
        """state: of the same agent; it knows which of the runs of this name is meant."""
        super().__init__()
        self._keys = keys
        self._state = state

    def set(self, key: str, value: str | bytes) -> None:
        with _asking():
            self._keys.write(self._name(key), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._read(key)[0]

    def add(self, key: str, amount: int) -> int:
        while True:
            value, revision = self._read(key)
            total = int(value or b"0") + amount
            with _asking():
                written = self._keys.write(self._name(key), b"%d" % total, if_revision=revision, overwritten=True)
            if written is not None:
                return total

    def check(self, keys: Sequence[str]) -> bool:
        with _asking():
            return self._keys.await_all([self._name(key) for key in keys], 0.0)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        within: timedelta = timeout or self.timeout  # type: ignore[attr-defined]  # torch's own, which it sets
        with _asking():
            there = self._keys.await_all([self._name(key) for key in keys], within.total_seconds())
        if not there:
            raise DistStoreError(f"not within {within.total_seconds():g} s: {', '.join(keys)}")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)
        return [self._read(key)[0] for key in keys]

    def _name(self, key: str) -> str:
        return f"store-{self._state.began}/{key}"

    def _read(self, key: str) -> tuple[bytes, int]:
        """Nothing and 0, of a key that is not there."""
        with _asking():
            there = self._keys.read(self._name(key))
        return (b"", 0) if there is None else (there.value, there.revision)


@contextmanager
def _asking() -> Iterator[None]:
    """Raise torch's errors in place of ours, which the block raises."""
    try:
        yield
    except CorruptValue as error:
        raise DistStoreError(str(error)) from error
    except StoreError as error:
        raise DistNetworkError(f"etcd: {error}") from error
