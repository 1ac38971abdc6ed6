"""What the chaos harness reads from outside: traces and scenarios. The answer is a value or a ConfigError, soon."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from chaos_tests.scenario.scenario import Scenario, scenario_from_toml
from chaos_tests.scenario.schedule import plan_of_trace
from chaos_tests.scenario.traces import as_csv, generate, read_trace
from elastic.errors import ConfigError
from tests.unit.broken import DEEP, documents, json_bytes, mutated
from tests.unit.chaos_tests.run.test_request import FAULTS

LINES = as_csv(generate(1, 4, 3600.0)).encode()
LISTED = {"metadata": {"gap_seconds": 600, "device": "v100"}, "data": [8, 7, 7, 2, 0, 8]}


@given(
    mutated(st.sampled_from([LINES, b"0,3\n60000,1\n90000,4\n", json.dumps(LISTED).encode()]))
    | documents(LISTED)
    | json_bytes()
    | st.binary(max_size=60)
)
@example(DEEP)
@example(b"[1e400, 0]")
@example(b"[" + b"9" * 5000 + b", 0]")
@example(b"0," + b"9" * 5000 + b"\n")
@example(b"9" * 5000 + b",add,a\n")
def test_a_trace_is_read_or_refused(data: bytes) -> None:
    try:
        trace = read_trace(data.decode(errors="replace"), "trace.csv")
    except ConfigError as error:
        assert "trace.csv" in str(error)
        return
    assert all(one.at_s >= 0 and one.slot in range(3) for one in plan_of_trace(trace, 3, 20.0))


@given(mutated(st.just((FAULTS + 'trace = "a"\nduration = "2m"\n').encode())) | st.binary(max_size=60))
@example(b"seed = " + b"9" * 5000)
@example(b"a = " + b"[" * 100_000)
@example(b"duration = 1" + b"0" * 400)
@example(b'trace = "a"\nspeed = nan')
def test_a_scenario_is_read_or_refused(data: bytes) -> None:
    try:
        found = scenario_from_toml(data.decode(errors="replace"), "s.toml")
    except ConfigError as error:
        assert "s.toml" in str(error)
        return
    assert isinstance(found, Scenario)
