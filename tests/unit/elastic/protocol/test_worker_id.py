import pytest

from elastic.protocol.worker_id import node_of


@pytest.mark.parametrize(
    ("worker_id", "node"), [("a.0.0", "a"), ("gpu-node-7.3.12", "gpu-node-7"), ("n1.example.org.0.2", "n1.example.org")]
)
def test_a_worker_is_on_the_node_that_its_id_begins_with(worker_id: str, node: str) -> None:
    assert node_of(worker_id) == node
