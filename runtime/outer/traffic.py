"""How many bytes a round takes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.protocol.shard_advice import bytes_factor

_WIDTHS = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1}


def bytes_of(groups: Mapping[str, int]) -> int:
    """The bytes of tensors. groups: elements by dtype, as Harvest.groups has them."""
    return sum(_WIDTHS[name] * elements for name, elements in groups.items())


def summed_bytes(fragment: int, row: int, rows: int, buffers: int = 0) -> int:
    """The bytes that a round sums: the difference of the fragment that is due, the rows of replicas, and the
    merged buffers of the model. fragment, row, buffers: bytes of each. Some more bytes say which buffers have changed.

    A row has twice the parameters with AdamW and once with momentum, and once more if replicas have parameters of their
    own.
    """
    return fragment + rows * row + buffers


def sent_bytes(summed: float, replicas: int, workers: int) -> float:
    """Bytes that the worker which sends most sends for so many summed ones, headers aside; each worker is a machine of
    its own.

    A ring sends 2 (n - 1) / n of them (Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009). The exact sum sends as much, or more where replicas do not divide well among workers. That is
    not worked out for worlds of more than WORKERS_MAX, which takes seconds.
    """
    factor = bytes_factor(replicas, workers) if workers <= WORKERS_MAX else 1.0
    return 2 * (workers - 1) / workers * summed * factor


WORKERS_MAX = 256
