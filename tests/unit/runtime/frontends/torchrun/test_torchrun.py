"""The rendezvous of torchrun on a store in memory: the contract, and what a store that fails does to it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from elastic.errors import ConfigError, LeaseExpired, StoreRefused, StoreUnavailable
from elastic.store.base import TxnResult
from runtime.frontends.torchrun import handler, run_keys
from runtime.frontends.torchrun.run_keys import LEASE_S, RunKeys
from runtime.frontends.torchrun.state_backend import StateBackend
from tests.conformance.rendezvous_suite import RendezvousSuite, agent_store
from tests.memory_store import MemoryStore


class Shared(MemoryStore):
    """For several threads. fails: what the next transactions end with, once they have been done or before."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self.fails: list[tuple[Exception, bool]] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("get", "between", "put", "txn", "lease", "watch"):
            return found

        def alone(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return found(*args, **kwargs)

        return alone

    def txn(self, compares: Sequence[Any], puts: Sequence[Any], deletes: Any = (), *, timeout_s: float) -> TxnResult:
        if self.fails:
            error, done = self.fails.pop(0)
            if done:
                super().txn(compares, puts, deletes, timeout_s=timeout_s)
            raise error
        return super().txn(compares, puts, deletes, timeout_s=timeout_s)


@pytest.fixture
def store() -> Shared:
    return Shared()


@pytest.fixture
def keys(store: Shared) -> RunKeys:
    return RunKeys(store, "run")


class TestInMemory(RendezvousSuite):
    pass


@pytest.mark.parametrize("done", [True, False])
def test_a_write_of_which_nobody_knows_whether_it_happened_happens_once(
    store: Shared, keys: RunKeys, done: bool
) -> None:
    backend, agents = StateBackend(keys), agent_store(RunKeys(store, "another"))
    store.fails = [(StoreUnavailable("cut off", ambiguous=True), done)] * 2
    made = backend.set_state(b"x")
    assert made is not None and made[2], "it is ours, whichever attempt wrote it"
    store.fails = [(StoreUnavailable("cut off", ambiguous=True), done)]
    assert (agents.add("n", 1), agents.add("n", 1)) == (1, 2)


def test_who_was_overtaken_while_etcd_did_not_answer_is_told_so(store: Shared, keys: RunKeys) -> None:
    backend = StateBackend(keys)
    first = backend.set_state(b"x")
    assert first is not None
    real = store.txn

    def overtaken(*args: Any, **kwargs: Any) -> TxnResult:
        store.txn = real  # type: ignore[method-assign]
        StateBackend(RunKeys(store, "run")).set_state(b"other", first[1])
        raise StoreUnavailable("cut off", ambiguous=True)

    store.txn = overtaken  # type: ignore[method-assign]
    there = backend.set_state(b"y", first[1])
    assert there is not None and there[0] == b"other" and not there[2]


def test_what_was_added_is_added_once_though_others_add_before_the_lost_answer_is_asked_for(store: Shared) -> None:
    first, second = (agent_store(RunKeys(store, "run")) for _ in range(2))
    real = store.txn

    def overtaken(*args: Any, **kwargs: Any) -> TxnResult:
        store.txn = real  # type: ignore[method-assign]
        real(*args, **kwargs)
        assert second.add("n", 10) == 11
        raise StoreUnavailable("cut off", ambiguous=True)

    store.txn = overtaken  # type: ignore[method-assign]
    assert first.add("n", 1) == 1
    assert first.add("n", 1) == 12


def test_a_lease_that_etcd_has_lost_is_replaced(store: Shared, keys: RunKeys) -> None:
    backend = StateBackend(keys)
    first = backend.set_state(b"x")
    assert first is not None
    store.fails = [(LeaseExpired("gone"), False)]
    second = backend.set_state(b"y", first[1])
    assert second is not None and second[2]


def test_what_a_run_leaves_behind_is_gone_some_hours_later(store: Shared, keys: RunKeys) -> None:
    agent_store(keys).set("a", "1")
    StateBackend(keys).set_state(b"x")
    store.advance(LEASE_S / 2)
    assert len(store.prefix("", timeout_s=1.0).items) == 2
    store.advance(LEASE_S + 1.0)
    assert store.prefix("", timeout_s=1.0).items == ()


def test_a_store_that_does_not_answer_or_refuses_is_named(
    store: Shared, keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = agent_store(keys)
    monkeypatch.setattr(run_keys, "ANSWERED_S", 0.2)
    for error in (StoreUnavailable("nobody answers"), StoreRefused("no space")):
        store.fails = [(error, False)] * 1000
        with pytest.raises(RendezvousConnectionError, match=f"etcd: {error}"):
            StateBackend(keys).set_state(b"x")
        with pytest.raises(DistNetworkError, match=f"etcd: {error}"):
            agents.set("a", "x")


@pytest.mark.parametrize(
    ("endpoint", "run", "options", "said"),
    [
        ("", "run", {}, "needs --rdzv-endpoint"),
        (" , ", "run", {}, "needs --rdzv-endpoint"),
        ("127.0.0.1:2379", "a/b", {}, "'a/b' cannot be the name of a run"),
        ("127.0.0.1:2379", "run", {"cert": "c", "key": "k"}, "need cacert"),
        ("127.0.0.1:2379", "run", {"cacert": "/nowhere"}, "/nowhere is not a file"),
        ("one.example,two.example", "run", {}, "one.example"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(endpoint: str, run: str, options: Any, said: str) -> None:
    before = os.environ.get(handler.OWN_STORE)
    with pytest.raises(ConfigError, match=said):
        handler.create(RendezvousParameters("elastic", endpoint, run, 1, 1, **options))
    assert os.environ.get(handler.OWN_STORE) == before


def test_torch_finds_it_and_starts_of_torchrun_that_do_not_ask_import_nothing_of_it() -> None:
    program = (
        "import sys, os\n"
        "from torch.distributed.elastic.rendezvous.registry import _register_out_of_tree_handlers, handler_registry\n"
        "_register_out_of_tree_handlers()\n"
        "assert 'elastic' in handler_registry._registry, handler_registry._registry\n"
        "ours = [name for name in sys.modules if name.startswith(('elastic', 'runtime.'))]\n"
        "front = 'runtime.frontends'\n"
        "assert ours == [front, f'{front}.torchrun', f'{front}.torchrun.handler'], ours\n"
        f"assert {handler.OWN_STORE!r} not in os.environ\n"
    )
    done: Callable[..., Any] = subprocess.run
    assert done([sys.executable, "-c", program], capture_output=True, text=True, timeout=250).stderr == ""
