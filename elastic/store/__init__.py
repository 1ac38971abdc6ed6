"""Durable truth: a key-value store with leases and watches on etcd, and what both leaders make of it.

base.py             the Store, as its users see it
election.py         who leads a job, which generations are committed, how the job ended
lease.py            a term that a replica holds: a thread renews the lease
chunks.py           documents too large for one write
embedded.py         etcd for one machine, gone with the process that started it
etcd.py             the Store on etcd
etcd_connection.py  endpoints, certificates and options of the connection
etcd_requests.py    values as requests, answers as values, errors
etcd_watch.py       one watch on a prefix
etcd_messages.py    the only file that imports etcd3
"""
