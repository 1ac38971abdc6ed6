"""What torch expects of the place where a rendezvous keeps its state, and of the store of its agents, as tests.

torch states the first part in a mixin of its own tests; here it is said again. A module that subclasses RendezvousSuite
and gives the fixture `keys`, those of a run that nobody else has, runs them.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.utils import store as torch_barriers

from elastic.store.base import Store
from runtime.frontends.torchrun.agent_store import AgentStore
from runtime.frontends.torchrun.run_keys import RunKeys
from runtime.frontends.torchrun.state_backend import STATE, StateBackend
from tests.memory_store import delete_key, write_key

CALL_S = 60.0
SHORT = timedelta(seconds=0.2)


def agent_store(keys: RunKeys) -> AgentStore:
    """Of an agent that has read the state of the run."""
    state = StateBackend(keys)
    state.set_state(b"")
    return AgentStore(keys, state)


class RendezvousSuite:
    @pytest.fixture
    def backend(self, keys: RunKeys) -> StateBackend:
        return StateBackend(keys)

    def test_there_is_no_state_before_one_is_set(self, backend: StateBackend) -> None:
        assert backend.get_state() is None

    def test_a_state_that_was_set_is_read_with_its_token(self, backend: StateBackend) -> None:
        made = backend.set_state(b"x")
        assert made is not None and made[0] == b"x" and made[2]
        assert backend.get_state() == made[:2]

    def test_without_a_token_only_the_first_state_is_set(self, backend: StateBackend) -> None:
        first = backend.set_state(b"x")
        second = backend.set_state(b"y")
        assert first is not None and second == (b"x", first[1], False)

    def test_with_the_newest_token_a_state_is_replaced_and_has_another_token(self, backend: StateBackend) -> None:
        first = backend.set_state(b"x")
        assert first is not None
        second = backend.set_state(b"y", first[1])
        assert second is not None and (second[0], second[2]) == (b"y", True) and second[1] != first[1]
        assert backend.get_state() == second[:2]

    def test_with_an_older_token_the_state_stays(self, backend: StateBackend) -> None:
        first = backend.set_state(b"x")
        assert first is not None
        second = backend.set_state(b"y", first[1])
        assert second is not None and backend.set_state(b"z", first[1]) == (b"y", second[1], False)

    def test_with_what_is_no_token_the_state_stays(self, backend: StateBackend) -> None:
        first = backend.set_state(b"x")
        assert first is not None and backend.set_state(b"y", "no token") == (b"x", first[1], False)

    def test_with_a_token_of_another_state_nothing_is_set_where_there_is_none(self, backend: StateBackend) -> None:
        assert backend.set_state(b"x", 3) is None and backend.set_state(b"x", "no token") is None
        assert backend.get_state() is None

    def test_what_somebody_else_has_written_there_is_no_state(self, keys: RunKeys, store: Store) -> None:
        backend = StateBackend(keys)
        for strange in (b"", b"strange", b"etr1" + bytes(40)):
            write_key(store, keys.path(STATE), strange, timeout_s=CALL_S)
            with pytest.raises(RendezvousStateError, match=keys.path(STATE)):
                backend.get_state()

    # ------------------------------------------------------------------------------------------ the agents' store

    def test_a_key_is_read_by_another_agent(self, keys: RunKeys) -> None:
        stores = [agent_store(keys) for _ in range(2)]  # torch keeps them no longer than Python does
        one, other = (PrefixStore("round-1", store) for store in stores)
        one.set("a", "text")
        assert other.get("a") == b"text" and other.check(["a"]) and not other.check(["a", "b"])
        assert PrefixStore("round-2", stores[0]).check(["a"]) is False, "each round begins with nothing"

    def test_who_asks_for_a_key_waits_until_it_comes(self, keys: RunKeys) -> None:
        one, other = agent_store(keys), agent_store(keys)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(other.get, "late")
            one.set("early", b"1")
            one.set("late", b"2")
            assert asked.result(CALL_S) == b"2"

    def test_a_key_that_does_not_come_is_waited_for_as_long_as_was_said(self, keys: RunKeys) -> None:
        own = agent_store(keys)
        store = PrefixStore("round-1", own)
        with pytest.raises(DistStoreError, match="never"):
            store.wait(["never"], SHORT)
        store.set_timeout(SHORT)
        with pytest.raises(DistStoreError, match="never"):
            store.get("never")

    def test_nothing_of_an_earlier_run_of_the_same_name_is_there(self, keys: RunKeys, store: Store) -> None:
        agent_store(keys).set("a", b"1")
        delete_key(store, keys.path(STATE), timeout_s=CALL_S)
        assert not agent_store(keys).check(["a"])

    def test_all_that_is_added_at_one_time_counts(self, keys: RunKeys) -> None:
        stores = [agent_store(keys) for _ in range(4)]
        begin = threading.Barrier(len(stores))

        def add(store: AgentStore) -> list[int]:
            begin.wait(CALL_S)
            return [store.add("n", 1) for _ in range(5)]

        with ThreadPoolExecutor(len(stores)) as pool:
            totals = [total for found in pool.map(add, stores) for total in found]
        assert sorted(totals) == list(range(1, 21)) and stores[0].get("n") == b"20"

    def test_torchs_own_barrier_and_exchange_work_on_it(self, keys: RunKeys) -> None:
        def agent(rank: int) -> list[bytes]:
            own = agent_store(keys)
            store = PrefixStore("round-1", own)
            told: list[bytes] = torch_barriers.synchronize(store, f"of {rank}".encode(), rank, 3, "role/")
            torch_barriers.barrier(store, 3, "end", barrier_timeout=CALL_S)
            return told

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(agent, range(3))) == [[b"of 0", b"of 1", b"of 2"]] * 3
