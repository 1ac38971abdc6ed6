"""How many bytes a round takes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.protocol.shard_advice import bytes_factor

_WIDTHS = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1}


def bytes_of(groups: Mapping[str, int]) -> int:
    """The bytes of tensors that are summed. groups: elements by dtype, as Harvest.groups has them."""
    return sum(_WIDTHS[name] * elements for name, elements in groups.items())


def summed_elements(fragment: int, row: int, replicas: int, buffers: int = 0) -> int:
    """Elements of these tensors: the difference of the fragment that is due, the rows of all replicas (twice the
    parameters with AdamW, and once more if replicas have parameters of their own), and the buffers of the model.
    fragment, row: elements of each. For each kind of buffer, of which the rows are one, there is a flag besides."""
    return fragment + replicas * row + buffers


def sent_bytes(summed: float, replicas: int, workers: int) -> float:
    """Bytes that the worker which sends most sends for `summed` bytes, headers aside; each worker is a machine of its
    own. A ring sends 2 (n - 1) / n of them (Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009), and the exact sum as much or more, depending on how shards divide among workers."""
    return 2 * (workers - 1) / workers * summed * bytes_factor(replicas, workers)
