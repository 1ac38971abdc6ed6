"""The Store on etcd, through the package etcd3.

Of etcd3 only the message classes, the stubs and the connection are used. Its watcher, its lock and its error handling
are not: docs/decisions/etcd3-behind-one-adapter.md says why.

    store.py       the Store                        connection.py  endpoints, certificates, options of the connection
    watch.py       one watch, on a thread           requests.py    values to requests, answers to values, errors
    messages.py    the only file that imports etcd3
"""

from elastic.etcd.connection import Tls
from elastic.etcd.store import EtcdStore, Health

__all__ = ["EtcdStore", "Health", "Tls"]
