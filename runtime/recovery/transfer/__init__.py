"""Copies of the state between workers, over connections of their own.

connection.py    messages with tensors over one connection
client.py        a worker's questions to other workers
multi_source.py  a copy from several members at once
parts.py         which member sends which part. Pure
result_log.py    results of past operations, for newcomers whose copy is older
checksum.py      the checksum of transferred bytes
"""
