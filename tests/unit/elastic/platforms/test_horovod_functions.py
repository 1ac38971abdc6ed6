"""What the arguments of horovod.run, horovod.spark.run and RayExecutor mean here."""

from __future__ import annotations

import re
from typing import Any

import pytest

from elastic.errors import ConfigError
from elastic.horovod.ray import ElasticRayExecutor, RayExecutor
from elastic.platforms.horovod.function_calls import call_of


def added(x: int, y: int = 0) -> int:
    return x + y


def test_without_numbers_to_come_and_go_a_function_is_called_again() -> None:
    call = call_of(added, (1,), {"y": 2}, {"np": 3})
    assert (call.wanted.least, call.wanted.most, call.wanted.restart) == (3, 3, True)
    assert call.function() == 3 and call.function.__name__ == "added"
    assert call.of_engine()["restart"] is True


def test_with_them_workers_come_and_go() -> None:
    call = call_of(added, (1,), None, {"num_proc": 2, "min_np": 1, "max_num_proc": 4, "elastic_timeout": 50})
    assert (call.wanted.least, call.wanted.workers, call.wanted.most, call.wanted.restart) == (1, 2, 4, False)
    wanted = {"workers": (1, 4), "timing": {"pause_limit_s": 50, "join_window_s": 30.0}}
    assert call.of_engine() == wanted
    assert not call_of(added, (1,), None, {"np": 1, "host_discovery_script": "./hosts"}).wanted.restart


def test_an_argument_that_means_nothing_here_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    call = call_of(added, (1,), None, {"np": 1, "use_mpi": True, "use_gloo": False, "verbose": None, "reset_limit": 3})
    said = capsys.readouterr().err
    assert "use_mpi= is not used" in said and "reset_limit= is not used" in said
    assert "use_gloo" not in said and not call.others


def test_places_are_for_hosts_and_not_for_engines() -> None:
    call = call_of(added, (1,), None, {"np": 2, "hosts": "a:1,b:1", "reset_limit": 3, "start_timeout": 5})
    hosts = call.hosts
    assert (hosts.hosts, hosts.reset_limit, hosts.start_timeout_s) == ("a:1,b:1", 3, 5)
    with pytest.raises(ConfigError, match="hosts= names hosts"):
        call.of_engine()
    with pytest.raises(ConfigError, match="-np 3, and the hosts have 2 slots"):
        call_of(added, (1,), None, {"np": 3, "hosts": "a:2"}).hosts.listed(3)


@pytest.mark.parametrize("wrong", [{}, {"num_workers": 2, "num_hosts": 1}])
def test_an_executor_wants_one_number_of_workers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"num_workers=, or num_hosts="):
        RayExecutor(RayExecutor.create_settings(), **wrong)


def test_what_wants_workers_between_two_calls_is_refused() -> None:
    executor = RayExecutor(num_workers=2, gpus_per_worker=2, use_gpu=True)
    for name in ("run_remote", "execute", "execute_single"):
        with pytest.raises(ConfigError, match=f"RayExecutor.{name}"):
            getattr(executor, name)(print)
    with pytest.raises(ConfigError, match="executable_cls"):
        executor.start(executable_cls=dict)
    executor.start()
    assert not hasattr(ElasticRayExecutor(RayExecutor.create_settings(min_num_proc=1, max_num_proc=2)), "nonsense")


def test_for_how_long_a_host_is_left_is_said_of_hosts_alone(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"np": 2, "cooldown_range": (10, 100)}
    assert call_of(added, (1,), None, {**options, "hosts": "a:1,b:1"}).hosts.cooldown_s == (10, 100)
    assert call_of(added, (1,), None, options).hosts.cooldown_s is None
    assert "cooldown_range= is not used: there are no hosts" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="blacklist-cooldown-range 9 1"):
        call_of(added, (1,), None, {"np": 1, "hosts": "a:1", "cooldown_range": (9, 1)}).hosts.listed(1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cooldown_range": 10}, "cooldown_range=10: give two numbers of seconds"),
        ({"cooldown_range": (1, "ten")}, "cooldown_range="),
        ({"np": "2"}, "num_proc='2': give a whole number of at least 1"),
        ({"num_proc": 0}, "num_proc=0"),
        ({"num_proc": True}, "num_proc=True"),
        ({"max_num_proc": 2.5}, "max_num_proc=2.5"),
        ({"hosts": ["a:1"]}, "hosts="),
        ({"host_discovery_script": " "}, "host_discovery_script="),
        ({"hostfile": 3}, "hostfile=3: give a path"),
        ({"slots": "two"}, "slots='two'"),
        ({"start_timeout": float("nan")}, "start_timeout=nan: give a number of seconds above 0"),
        ({"elastic_timeout": "90"}, "elastic_timeout='90'"),
        ({"reset_limit": -1}, "reset_limit=-1: give a whole number of at least 0"),
        ({"ssh_port": 70000}, "ssh_port=70000: give a port"),
    ],
)
def test_an_argument_of_another_kind_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        call_of(added, (1,), None, wrong)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "said"),
    [
        (3, (), None, "3 is no function"),
        (added, 5, None, "args=5: give a tuple"),
        (added, "ab", None, "args='ab'"),
        (added, (), 5, "kwargs=5: give a dict"),
        (added, (), {1: 2}, "kwargs={1: 2}"),
    ],
)
def test_what_is_to_be_called_with_what_is_checked(function: Any, args: Any, kwargs: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        call_of(function, args, kwargs, {})
