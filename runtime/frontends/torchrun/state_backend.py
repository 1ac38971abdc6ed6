"""The state of a rendezvous of torchrun, in one key: torch's handler decides, and keeps it there.

What is stored is torch's own, which reads it with pickle: a client that may write to these keys may run programs in
the agents. docs/torchrun.md says how to keep others out.
"""

from __future__ import annotations

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from elastic.errors import StoreError
from runtime.frontends.torchrun.run_keys import CorruptValue, RunKeys

STATE = "state"


class StateBackend(RendezvousBackend):
    """A token is the revision that wrote the state."""

    def __init__(self, keys: RunKeys) -> None:
        self._keys = keys
        self.began = 0
        """The revision in which the run began, as far as this agent knows. A later run of the same name has another."""

    @property
    def name(self) -> str:
        return "elastic"

    def get_state(self) -> tuple[bytes, Token] | None:
        try:
            there = self._keys.read(STATE)
        except CorruptValue as error:
            raise RendezvousStateError(str(error)) from error
        except StoreError as error:
            raise RendezvousConnectionError(f"etcd: {error}") from error
        if there is None:
            return None
        self.began = there.created
        return there.value, there.revision

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        if token is None or isinstance(token, int):
            try:
                revision = self._keys.write(STATE, state, if_revision=token or 0)
            except StoreError as error:
                raise RendezvousConnectionError(f"etcd: {error}") from error
            if revision is not None:
                self.began = self.began if token else revision
                return state, revision, True
        there = self.get_state()
        return None if there is None else (*there, False)
