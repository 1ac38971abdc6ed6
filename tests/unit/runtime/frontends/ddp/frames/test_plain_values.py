"""Plain values in the frames of a script: what is undone, added and taken over, and what is left alone."""

from __future__ import annotations

import json
import runpy
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.frontends.ddp.frames.places import ScriptFrames
from runtime.frontends.ddp.frames.plain_values import LIST_MAX, FrameCounters, FrameValues
from runtime.frontends.ddp.rank_source import Position

HERE = ScriptFrames()


class Meter:
    def __init__(self) -> None:
        self.count = 0
        self.best: float | None = None
        self.seen: list[int] = []
        self.sums = torch.zeros(3)

    def update(self, value: float) -> None:
        self.count += 1
        self.best = value
        self.seen.append(self.count)
        self.sums += value


@dataclass(frozen=True)
class Frozen:
    step: int = 0


@dataclass(slots=True)
class Slotted:
    step: int = 0


@dataclass(slots=True)
class SlottedBelow(Slotted):
    best: float | None = None


class OwnOptimizer(torch.optim.Optimizer):
    """As a script writes it; it counts in an attribute that its state_dict() has not."""

    def __init__(self, weights: list[torch.nn.Parameter]) -> None:
        super().__init__(weights, {"lr": 0.5})
        self.calls = 0


def unknown(value: object) -> Any:
    """The type checker is to forget what it knows of a value that changes behind its back."""
    return value


def test_of_an_optimizer_of_the_script_what_the_job_keeps_is_left_alone() -> None:
    """A copy of its parameter groups would have other parameters than the model."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = OwnOptimizer([weight])
    values = FrameValues.read(HERE)
    optimizer.calls += 1
    optimizer.param_groups[0]["lr"] = 0.1
    values.put_back(objects=True)
    assert (optimizer.calls, optimizer.param_groups[0]["lr"]) == (0, 0.1)
    assert optimizer.param_groups[0]["params"][0] is weight
    followed = {place.path[0] for place, _ in HERE.values() if place.name == "optimizer" and place.path}
    assert "calls" in followed and not followed & {"param_groups", "state", "defaults"}


def test_numbers_texts_and_none_are_put_back() -> None:
    whole, part, flag, text, best = unknown(1), unknown(0.5), unknown(True), unknown("a"), unknown(None)
    values = FrameValues.read(HERE)
    whole, part, flag, text, best = 2, 1.5, False, "b", unknown(0.25)
    values.put_back(objects=True)
    assert (whole, part, flag, text, best) == (1, 0.5, True, "a", None)


def test_a_flag_that_equals_a_number_is_put_back_as_what_it_was() -> None:
    flag, number = unknown(True), unknown(0)
    values = FrameValues.read(HERE)
    flag, number = unknown(1), unknown(False)
    values.put_back(objects=True)
    assert (type(flag), type(number)) == (bool, int)


def test_names_that_came_later_stay() -> None:
    values = FrameValues.read(HERE)
    later = 3
    values.put_back(objects=True)
    assert later == 3


def test_a_name_that_is_deleted_stays_deleted() -> None:
    gone = 1
    values = FrameValues.read(HERE)
    del gone
    values.put_back(objects=True)
    assert "gone" not in locals()


def test_a_variable_of_a_closure_is_put_back_from_either_frame() -> None:
    count = 0

    def counted() -> FrameValues:
        nonlocal count
        found = FrameValues.read(HERE)
        count += 1
        return found

    def undone(found: FrameValues) -> None:
        found.put_back(objects=True)

    values = FrameValues.read(HERE)
    counted()
    values.put_back(objects=True)
    assert count == 0

    def inside() -> int:
        nonlocal count
        found = FrameValues.read(HERE)
        count += 5
        found.put_back(objects=True)
        return count

    assert inside() == 0
    assert count == 0
    undone(values)
    assert count == 0


def test_what_other_frames_hold_is_not_mixed_up_by_name() -> None:
    count = 1

    def inner() -> int:
        count = 10
        values = FrameValues.read(HERE)
        count += 5
        values.put_back(objects=True)
        return count

    assert (inner(), count) == (10, 1)


def test_globals_of_the_script_are_put_back(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from runtime.frontends.ddp.frames.places import ScriptFrames\n"
        "from runtime.frontends.ddp.frames.plain_values import FrameValues\n"
        "step, seen, __version__ = 0, [], 1\n"
        "def work():\n    global step, __version__\n    step += 1\n    __version__ += 1\n    seen.append(step)\n"
        "values = FrameValues.read(ScriptFrames())\nwork()\nvalues.put_back(objects=True)\n"
    )
    found = runpy.run_path(str(script))
    assert (found["step"], found["seen"], found["__version__"]) == (0, [], 2)


def test_globals_of_a_module_that_the_script_imports_are_put_back(tmp_path: Path) -> None:
    """The frame of an imported module does not stand any more when one of its functions runs the training loop."""
    script = tmp_path / "engine.py"
    script.write_text(
        "from types import SimpleNamespace\n"
        "from runtime.frontends.ddp.frames.places import ScriptFrames\n"
        "from runtime.frontends.ddp.frames.plain_values import FrameValues\n"
        "step, seen, state, __version__ = 0, [], SimpleNamespace(best=1.0), 1\n"
        "def work():\n    global step, __version__\n    step += 1\n    __version__ += 1\n"
        "    seen.append(step)\n    state.best = 0.5\n"
        "def train():\n    values = FrameValues.read(ScriptFrames())\n    work()\n    values.put_back(objects=True)\n"
        "    return step, seen, state.best, __version__\n"
    )
    assert runpy.run_path(str(script))["train"]() == (0, [], 1.0, 2)


def test_attributes_of_the_scripts_own_objects_are_put_back() -> None:
    meter = Meter()
    meter.update(1.0)
    values = FrameValues.read(HERE)
    meter.update(2.0)
    values.put_back(objects=True)
    assert (meter.count, meter.best, meter.seen, meter.sums.tolist()) == (1, 1.0, [1], [1.0, 1.0, 1.0])


def test_tensors_of_inference_mode_are_put_back() -> None:
    """Torch counts no versions of what an evaluation has given, and lets nobody change it outside of that mode."""
    with torch.inference_mode():
        mean, total = unknown(torch.tensor(0.5)), unknown(torch.zeros(2))
    values = FrameValues.read(HERE)
    assert {"mean", "total"} <= {name.rpartition(" ")[2] for name in values.moment()}
    with torch.inference_mode():
        mean = unknown(torch.tensor(0.25))
        total.add_(1.0)
    values.put_back(objects=True)
    assert (mean.item(), total.tolist()) == (0.5, [0.0, 0.0])


class Progress:
    step = 0
    best: float | None = None


def test_attributes_of_the_scripts_own_classes_are_put_back() -> None:
    known = Progress
    values = FrameValues.read(HERE)
    known.step, known.best = 1, 0.5
    values.put_back(objects=True)
    assert (Progress.step, Progress.best) == (0, None)


def test_slots_of_the_scripts_own_objects_are_put_back() -> None:
    state = SlottedBelow()
    values = FrameValues.read(HERE)
    state.step, state.best = 1, 0.5
    values.put_back(objects=True)
    assert state == SlottedBelow()


def test_dicts_of_collections_are_put_back() -> None:
    sums, counts, order = defaultdict[str, float](float), Counter(batches=1), OrderedDict(step=0)
    sums["loss"] += 1.0
    values = FrameValues.read(HERE)
    sums["loss"] += 0.5
    counts["batches"] += 1
    order["step"] += 1
    values.put_back(objects=True)
    assert (sums, counts, order) == ({"loss": 1.0}, {"batches": 1}, {"step": 0})


def test_plain_values_that_have_come_to_a_dict_are_taken_out() -> None:
    counts, history, state = Counter[str](), defaultdict[str, list[int]](list), dict[str, Any](step=0)
    values = FrameValues.read(HERE)
    counts["batches"] += 1
    history["loss"].append(1)
    state["seen"], state["model"] = state.get("seen", 0) + 1, Meter()
    values.put_back(objects=True)
    assert (counts, history, list(state)) == ({}, {}, ["step", "model"])


def test_a_newcomer_gets_what_has_come_to_a_dict() -> None:
    counts, history, others = Counter[str](), dict[str, list[int]](), dict[str, Any]()
    handed_out = FrameValues.read(HERE)
    counts["micro"] += 1
    met = FrameValues.read(HERE)
    for name in ("steps", "micro"):
        others[f"0 {test_a_newcomer_gets_what_has_come_to_a_dict.__name__} counts.{name}"] = 7
    others[f"0 {test_a_newcomer_gets_what_has_come_to_a_dict.__name__} history.loss"] = [5, 6]
    number = next(place.frame for place in met._dicts if place.name == "counts")
    others = {name.replace("0", str(number), 1): value for name, value in others.items()}
    counts["micro"] += 1
    history["loss"] = [8]
    met.become(others)
    handed_out.rebase(others, met)
    assert (counts, history) == ({"steps": 7, "micro": 8}, {"loss": [5, 6, 8]})
    handed_out.put_back(objects=True)
    assert (counts, history) == ({"steps": 7, "micro": 6}, {"loss": [5, 6]})


class Late:
    """Makes its attributes when they are needed first."""

    def update(self) -> None:
        if not hasattr(self, "count"):
            self.count, self.seen, self.batch = 0, list[int](), (torch.zeros(100),)
        self.count += 1
        self.seen.append(self.count)


def test_plain_values_that_have_come_as_attributes_are_taken_out() -> None:
    late, other, opened = Late(), Late(), unknown(Late())
    other.update()
    values = FrameValues.read(HERE)
    late.update()
    other.update()
    opened.file, opened.length = Meter(), 3
    values.put_back(objects=False)
    assert (late.count, other.count) == (1, 1)
    values.put_back(objects=True)
    assert list(vars(late)) == ["batch"]
    assert list(vars(opened)) == ["file", "length"]
    assert (other.count, other.seen) == (1, [1])


def test_a_newcomer_gets_what_has_come_as_an_attribute() -> None:
    late, others = Late(), dict[str, Any]()
    handed_out = FrameValues.read(HERE)
    at = next(place for place in handed_out._attributes if place.name == "late")
    others.update({at.under("count").text: 7, at.under("seen").text: [6, 7]})
    met = FrameValues.read(HERE)
    late.update()
    met.become(others)
    handed_out.rebase(others, met)
    assert (late.count, late.seen) == (8, [6, 7, 1])
    handed_out.put_back(objects=True)
    assert (late.count, late.seen) == (7, [6, 7])


def test_whole_numbers_are_keys_too() -> None:
    """And a text of digits is another key."""
    seen, texts, state = {1: 5}, dict[str, int](), dict[int, Any]()
    handed_out = FrameValues.read(HERE)
    seen[1] += 1
    seen[-2] = texts["3"] = 1
    state[4] = {"a": 1}
    handed_out.put_back(objects=True)
    assert (seen, texts, state) == ({1: 5}, {}, {4: {"a": 1}})

    others: dict[str, Any] = {}
    for name, keys in (("seen", (1, 3)), ("texts", ("3", "a")), ("state", (7,))):
        at = next(place for place in handed_out._dicts if place.name == name)
        others.update({at.under(key).text: 9 for key in keys})
    handed_out.become(json.loads(json.dumps(others)))
    assert (seen, texts, state) == ({1: 9, 3: 9}, {"3": 9, "a": 9}, {4: {"a": 1}, 7: 9})


def test_modules_and_objects_of_libraries_are_left_alone() -> None:
    layer, path = torch.nn.Linear(2, 2), unknown(Path("a"))
    values = FrameValues.read(HERE)
    layer.training, layer.in_features = False, 3
    values.put_back(objects=True)
    assert (layer.training, layer.in_features, path) == (False, 3, Path("a"))


def test_a_meter_of_a_library_is_put_back_as_its_attributes_are_numbers_alone() -> None:
    kind = type("AverageMeter", (), {"__module__": "torch"})
    meter, other = unknown(kind()), unknown(kind())
    meter.total, meter.number = 0.5, 1
    other.total, other.parts = 0.5, ()
    values = FrameValues.read(HERE)
    meter.total, meter.number, other.total = 2.0, 2, 2.0
    values.put_back(objects=True)
    assert vars(meter) == {"total": 0.5, "number": 1}
    assert other.total == 2.0


def test_lists_and_deques_have_again_the_entries_that_they_had() -> None:
    grown, counts, window, bound = [1, 2], [0, 0], deque([1, 2], maxlen=2), unknown([1])
    alias = bound
    values = FrameValues.read(HERE)
    grown.append(3)
    counts[0] += 1
    window.append(3)
    bound = [*bound[-10:], 2]
    values.put_back(objects=True)
    assert (grown, counts, list(window), window.maxlen) == ([1, 2], [0, 0], [1, 2], 2)
    assert bound is alias == [1]


def test_a_sliding_window_is_put_back() -> None:
    window, tensors = [1, 2, 3], [torch.zeros(2), torch.zeros(2)]
    values = FrameValues.read(HERE)
    window.append(4)
    window.pop(0)
    tensors[:] = [torch.ones(2)]
    values.put_back(objects=True)
    assert (window, [tensor.sum().item() for tensor in tensors]) == ([1, 2, 3], [0.0, 0.0])


def test_a_list_of_too_many_entries_loses_only_what_was_appended() -> None:
    long, ring = list(range(LIST_MAX + 1)), deque(range(LIST_MAX + 1))
    values = FrameValues.read(HERE)
    long[0] = ring[0] = 7
    long.append(1)
    ring.append(1)
    values.put_back(objects=True)
    assert (len(long), len(ring), long[0], ring[0]) == (LIST_MAX + 1, LIST_MAX + 1, 7, 7)


def test_a_newcomer_gets_a_window_whose_length_stays() -> None:
    counters, window, counts = FrameCounters(), deque([1, 2], maxlen=2), [0]
    counters.step(FrameValues.read(HERE))
    window.append(3)
    counts[0] += 1
    counters.step(handed_out := FrameValues.read(HERE))
    there = counters.of(handed_out, handed_out)
    assert {"window": [2, 3], "counts": [1]}.items() <= {n.rpartition(" ")[2]: v for n, v in there.items()}.items()

    window, counts = deque([8, 9], maxlen=2), [9]
    values = FrameValues.read(HERE)
    values.become(there)
    assert (list(window), counts) == ([2, 3], [1])


def test_what_is_undone_of_a_list_after_a_newcomer_has_taken_over() -> None:
    """It has what the script has appended since, and lacks what the script had not appended yet."""
    seen = unknown([1])
    handed_out = FrameValues.read(HERE)
    seen.append(2)  # at the top of the turn
    met = FrameValues.read(HERE)
    there: dict[str, Any] = {name: [5, 6, 7] for name in met.moment() if name.endswith(" seen")}
    seen.append(3)
    behind = FrameValues.read(HERE)
    for values in (handed_out, behind):
        values.rebase(there, met)
    behind.put_back(objects=True)
    assert seen == [5, 6, 7, 3]
    handed_out.put_back(objects=True)
    assert seen == [5, 6]


def test_short_tensors_are_put_back_in_place_and_long_ones_are_data() -> None:
    short, long = torch.zeros(64), torch.zeros(65)
    weight = torch.zeros(2, requires_grad=True)
    held = short
    values = FrameValues.read(HERE)
    short += 1
    long += 1
    with torch.no_grad():
        weight += 1
    values.put_back(objects=True)
    assert held is short
    assert (short.sum().item(), long.sum().item(), weight.sum().item()) == (0, 65, 2)


def test_the_frame_of_a_generator_is_one_as_long_as_it_runs() -> None:
    def turns() -> Iterator[int]:
        turn = 0
        while True:
            values = FrameValues.read(HERE)
            turn += 1
            values.put_back(objects=True)
            yield turn
            turn += 1

    consumed = 0
    generator = turns()
    for expected in (0, 1, 2):
        consumed += 1
        assert next(generator) == expected
        values = FrameValues.read(HERE)
        consumed += 1
        values.put_back(objects=True)
    assert consumed == 3


def test_a_generator_that_waits_keeps_its_values() -> None:
    found: list[FrameValues] = []

    def numbers() -> Iterator[int]:
        number = 0
        while True:
            if not found:
                found.append(FrameValues.read(HERE))
            yield number
            number += 1

    generator = numbers()
    assert [next(generator) for _ in range(3)] == [0, 1, 2]
    found[0].put_back(objects=True)
    assert next(generator) == 3


def test_a_number_that_became_a_tensor_is_put_back() -> None:
    total = unknown(0.0)
    values = FrameValues.read(HERE)
    total += torch.tensor(2.0)
    values.put_back(objects=True)
    assert total == 0.0


def test_numbers_of_numpy_are_put_back_and_given_to_newcomers() -> None:
    counters, mean, steps, best = FrameCounters(), unknown(np.float64(1.0)), unknown(np.int64(0)), unknown(0.0)
    counters.step(values := FrameValues.read(HERE))
    mean, steps, best = mean * 0.5, steps + 1, unknown(np.float32(0.25))
    values.put_back(objects=True)
    assert (mean, steps, best) == (1.0, 0, 0.0)
    mean, steps, best = mean * 0.5, steps + 1, np.float32(0.25)
    counters.step(offered := FrameValues.read(HERE))
    there = json.loads(json.dumps(counters.of(offered, offered)))
    mean, steps, best = unknown(np.float64(1.0)), unknown(np.int64(0)), 0.0
    FrameValues.read(HERE).become(there)
    assert (mean, steps, best, type(mean), type(steps)) == (0.5, 1, 0.25, np.float64, np.int64)


def test_a_sum_of_tensors_that_is_bound_anew_is_put_back() -> None:
    total = torch.zeros(())
    values = FrameValues.read(HERE)
    total = total + 2.0
    values.put_back(objects=True)
    assert total.item() == 0.0


def test_a_frozen_object_that_was_replaced_does_not_stop_the_script() -> None:
    state = Frozen()
    values = FrameValues.read(HERE)
    state = replace(state, step=state.step + 1)
    values.put_back(objects=True)
    assert state.step in (0, 1)


def test_what_the_script_deletes_is_freed() -> None:
    big = torch.zeros(1000)
    there = weakref.ref(big)
    FrameValues.read(HERE)
    del big
    assert there() is None


def test_a_newcomer_takes_over_and_keeps_what_it_has_added_since() -> None:
    step, lr, epoch, flag, best = unknown(0), unknown(0.1), unknown(0), unknown(False), unknown(None)
    values = FrameValues.read(HERE)
    there = {
        name: {"step": 7, "lr": 0.01, "epoch": 2, "flag": True, "best": 0.5}[name.rpartition(" ")[2]]
        for name in values.plain()
        if name.rpartition(" ")[2] in ("step", "lr", "epoch", "flag", "best")
    }
    step, lr = step + 1, 0.2
    values.become(there)
    assert (step, lr, epoch, flag, best) == (8, 0.2, 2, True, 0.5)


def test_what_is_undone_after_a_newcomer_has_taken_over_are_the_values_of_the_others() -> None:
    step, best, centre, seen = unknown(0), unknown(None), torch.zeros(2), [1]
    handed_out = FrameValues.read(HERE)
    step += 1  # at the top of the turn
    met = FrameValues.read(HERE)
    wanted: dict[str, Any] = {"step": 8, "best": 0.5, "centre": torch.full((2,), 3.0), "seen": [5, 6, 7]}
    there = {name: wanted[word] for name in met.moment() if (word := name.rpartition(" ")[2]) in wanted}
    step += 1
    seen.append(2)
    met.become(there)
    handed_out.rebase(there, met)
    met.rebase(there, met)
    assert (step, seen) == (9, [5, 6, 7, 2])
    handed_out.put_back(objects=True)
    assert (step, best, centre.tolist(), seen) == (7, 0.5, [3.0, 3.0], [5, 6, 7])
    met.put_back(objects=True)
    assert step == 8


def test_a_flag_is_no_number_to_be_added_to() -> None:
    flag, number = unknown(False), unknown(3)
    values = FrameValues.read(HERE)
    flag = True
    values.become({name: 5 for name in values.plain() if name.endswith((" flag", " number"))})
    assert (flag, number) == (True, 5)


def test_values_of_unknown_names_are_ignored() -> None:
    step = unknown(0)
    values = FrameValues.read(HERE)
    values.become({"0 main elsewhere": 4})
    values.become_earlier({"0 main elsewhere": 4}, ())
    assert step == 0


def test_whole_numbers_are_those_of_the_step_before_in_a_silent_turn() -> None:
    step, part, flag = unknown(5), unknown(0.5), unknown(True)
    values = FrameValues.read(HERE)
    earlier = {name: 4 for name in values.plain() if name.endswith((" step", " part", " flag"))}
    step, part = step + 1, part + 1
    values.become_earlier(earlier, ())
    assert (step, part, flag) == (5, 1.5, True)


def last_names(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name.rpartition(" ")[2]: value for name, value in values.items() if name.endswith((" step", " lr", " same"))
    }


def test_counters_are_what_changed_from_step_to_step() -> None:
    counters = FrameCounters()
    step, lr, same = unknown(3), unknown(0.5), unknown(9)
    counters.step(FrameValues.read(HERE))
    values = FrameValues.read(HERE)
    assert counters.of(values, values) == counters.earlier == {}
    step, lr = step + 1, lr / 2
    counters.step(values := FrameValues.read(HERE))
    assert last_names(counters.of(values, values)) == {"step": 4, "lr": 0.25}
    assert last_names(counters.earlier) == {"step": 3}
    step += 1
    counters.step(values := FrameValues.read(HERE))
    assert last_names(counters.of(values, values)) == {"step": 5, "lr": 0.25}
    assert last_names(counters.earlier) == {"step": 4}
    assert same == 9


def test_a_newcomer_is_told_which_values_are_counters() -> None:
    counters = FrameCounters()
    same = unknown(9)
    values = FrameValues.read(HERE)
    counters.told({name: 1 for name in values.plain() if name.endswith(" same")})
    assert last_names(counters.of(values, values)) == {"same": 9}
    counters.step(values)
    counters.step(FrameValues.read(HERE))
    assert last_names(counters.earlier) == {"same": 9}
    assert same == 9


def test_a_newcomer_takes_over_short_tensors_and_lists_but_no_batch() -> None:
    centre, bound, seen, words, counts = torch.zeros(2), unknown(torch.zeros(2)), [0.5], ["a"], torch.zeros(3)
    counters, batch, total = FrameCounters(), unknown(torch.zeros(2)), unknown(0)
    counters.step(FrameValues.read(HERE))
    centre += 1
    bound, total = bound + 2, torch.ones(())
    seen.append(1.5)
    batch = torch.ones(2)
    counters.step(offered := FrameValues.read(HERE))
    batch = torch.full((2,), 2.0)
    there = counters.of(FrameValues.read(HERE), offered)

    centre, bound, seen, total, batch = torch.zeros(2), torch.zeros(2), [7.5, 8.5, 9.5], 0, torch.full((2,), 9.0)
    alias, values = centre, FrameValues.read(HERE)
    seen.append(2.5)
    position = Position()
    position.values = there
    copied = Position()
    copied.load_state_dict(json.loads(json.dumps(position.state_dict())))
    values.become(copied.values)
    assert (alias.tolist(), bound.tolist(), seen) == ([1.0, 1.0], [2.0, 2.0], [0.5, 1.5, 2.5])
    assert (float(total), batch.tolist(), words, counts.tolist()) == (1.0, [9.0, 9.0], ["a"], [0.0, 0.0, 0.0])


def test_a_newcomer_keeps_a_tensor_that_it_has_changed_since() -> None:
    centre, seen = torch.zeros(2), [1]
    values = FrameValues.read(HERE)
    there: dict[str, Any] = {name: torch.full((2,), 5.0) for name in values.moment() if name.endswith(" centre")}
    there |= {name: [1, 2, 3] for name in values.moment() if name.endswith(" seen")}
    centre += 1
    seen.clear()
    values.become(there)
    assert (centre.tolist(), seen) == ([1.0, 1.0], [])
