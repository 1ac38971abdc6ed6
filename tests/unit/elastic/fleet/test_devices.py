"""Jobs that share a node do not share its accelerators."""

from __future__ import annotations

from pathlib import Path

from elastic.fleet.node.job_environment import choose, of_node


def test_the_devices_of_a_node_are_those_of_the_driver(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert of_node({}, tmp_path) == ("0", "2", "10")
    assert of_node({}, tmp_path / "absent") == ()


def test_what_the_daemon_was_given_is_all_it_uses(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert of_node({"CUDA_VISIBLE_DEVICES": "3, GPU-8932f937,5"}, tmp_path) == ("3", "GPU-8932f937", "5")
    assert of_node({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()


def test_a_job_gets_devices_that_no_other_job_has() -> None:
    assert choose(("0", "1", "2", "3"), ("1",), 2) == ("0", "2")
    assert choose(("0", "1"), ("1",), 2) == ("0",)
    assert choose((), (), 2) == ()
