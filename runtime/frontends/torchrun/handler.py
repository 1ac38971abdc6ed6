"""What torch finds under the entry point `torchrun.handlers`, and makes if `--rdzv-backend=elastic` is given.

torch imports this module with every start of torchrun, so nothing else is imported before it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Set to 1, each round has a TCPStore of its own, at an address that its first node chooses. Otherwise torch keeps the
first round's address for as long as a node lives, also when the node with that address is gone."""

DEFAULT_PORT = "2379"


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Called by torch."""
    return create


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """Make the handler that `--rdzv-endpoint` and `--rdzv-conf` describe. Nothing is sent to etcd yet. Raises
    ConfigError for options that cannot be meant; torchrun shows it."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    from elastic.errors import ConfigError
    from elastic.store.etcd import EtcdStore, Tls
    from runtime.frontends.torchrun.agent_store import AgentStore
    from runtime.frontends.torchrun.run_keys import RunKeys
    from runtime.frontends.torchrun.state_backend import StateBackend

    endpoints = [endpoint.strip() for endpoint in parameters.endpoint.split(",") if endpoint.strip()]
    if not endpoints:
        raise ConfigError("--rdzv-backend=elastic needs --rdzv-endpoint=HOST:2379[,HOST:2379...], the members of etcd")
    ca, *others = (parameters.get(name) for name in ("cacert", "cert", "key", "server_name"))
    if ca is None and any(others):
        raise ConfigError("--rdzv-conf: cert, key and server_name need cacert, the authority of etcd's certificates")
    tls = Tls(ca, *others) if ca is not None else None
    store = EtcdStore([one if ":" in one else f"{one}:{DEFAULT_PORT}" for one in endpoints], tls=tls)
    keys = RunKeys(store, parameters.run_id)
    os.environ[OWN_STORE] = "1"
    state = StateBackend(keys)
    return create_handler(AgentStore(keys, state), state, parameters)
