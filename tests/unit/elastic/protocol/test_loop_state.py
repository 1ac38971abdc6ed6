"""The life of a script in one worker: traces in scenarios/loop_state/, and a script of chance."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from elastic.protocol import loop_state
from elastic.protocol.loop_state import (
    Admitted,
    AskEarly,
    Called,
    CalledEarly,
    Collect,
    CopiedAnew,
    CopyAnew,
    CopyArrived,
    CopyOffered,
    EndSteps,
    EpochBegun,
    EpochOver,
    GoAstray,
    HandedOut,
    HandOut,
    Join,
    JoinOver,
    LoadAgain,
    LoopBegun,
    LoopEntered,
    LoopKind,
    LoopOver,
    LoopState,
    MembersLost,
    Miss,
    Move,
    NextStep,
    PassBegun,
    PassRepeated,
    Proceed,
    RecallEarly,
    RecallReply,
    Reduced,
    Refuse,
    RehearsalOver,
    ResultHeld,
    ResultTaken,
    RunTogether,
    ScriptEvent,
    ScriptStage,
    SharedCalled,
    Standing,
    StepLeft,
    StepsBegun,
    StepsOver,
    StepWithdrawn,
    WentAstray,
)
from elastic.protocol.loop_state.state import ARCS, STANDINGS
from tests.unit.trace import arguments, check

SCENARIOS = sorted((Path(__file__).parent / "scenarios" / "loop_state").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    check(path, ScriptTrace(), rewrite=request.config.getoption("--rewrite"))


class ScriptTrace:
    """One script. `newcomer` comes first, if it is one; several events may stand in a line, `steps; next`."""

    def __init__(self) -> None:
        self.s = LoopState()

    def feed(self, line: str) -> list[str]:
        return [told for part in line.split(";") if (told := self._feed(part.split()))]

    def _feed(self, words: list[str]) -> str:
        if words == ["newcomer"]:
            self.s = LoopState(standing=Standing.NEWCOMER)
            return ""
        self.s, move = loop_state.step(self.s, event(words))
        return tell(move)

    def show(self) -> list[str]:
        return [describe(self.s)]


PLAIN: dict[str, ScriptEvent] = {
    "steps": StepsBegun(),
    "rehearsed": RehearsalOver(),
    "repeated": PassRepeated(),
    "held": ResultHeld(),
    "reduced": Reduced(),
    "left": StepLeft(),
    "steps-over": StepsOver(),
    "epoch-over": EpochOver(),
    "loop-over": LoopOver(),
    "shared": SharedCalled(),
    "call": Called(),
    "called-early": CalledEarly(),
    "astray": WentAstray(),
    "taken": ResultTaken(),
    "admitted": Admitted(),
    "members-lost": MembersLost(),
}


def event(words: list[str]) -> ScriptEvent:
    name, *rest = words
    numbers = [int(word) for word in rest if word.isdigit()]
    match name:
        case "loop":
            return LoopBegun(LoopKind(rest[0]))
        case "entered":
            start = int(arguments(rest).get("start", 0))
            return LoopEntered(numbers[0], numbers[1], start, resumed="resumed" in rest)
        case "epoch":
            return EpochBegun(numbers[0])
        case "next":
            return NextStep("over" in rest)
        case "hand-out":
            return HandedOut(*numbers)
        case "pass":
            return PassBegun(numbers[0], numbers[1], read="read" in rest, drew="drew" in rest)
        case "offered":
            return CopyOffered(numbers[0])
        case "copy":
            return CopyArrived(numbers[0], called="called" in rest, waited_for="waited-for" in rest)
        case "join-over":
            return JoinOver(numbers[0], numbers[1], result="result" in rest)
        case "anew":
            return CopiedAnew(numbers[0])
        case _:
            return PLAIN[name]


def describe(s: LoopState) -> str:
    loop = f" epoch={s.epoch} step={s.step} pass={s.pass_no} start={s.epoch_start}" if s.entered else ""
    marks = [name for name in ("resumed", "bound", "loads_again") if getattr(s, name)]
    early = [f"early={s.early_calls}"] if s.early_calls else []
    return " ".join([f"{s.standing}, {s.stage}{loop}", *early, *marks])


def tell(move: Move) -> str:
    """ "": nothing is to be done."""
    match move:
        case Proceed():
            return ""
        case Miss(because):
            return f"miss: {because}"
        case Refuse(mistake):
            return f"refuse: {mistake}"
        case RunTogether(keep, early):
            return "run together" + ", keep the reply" * keep + ", early" * early
        case _:
            name = type(move).__name__
            return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()


@pytest.mark.parametrize(
    ("lines", "because"),
    [
        ("loop steps; entered 0 0; steps; loop-over; next", "a step of a loop that is over"),
        ("loop steps; entered 0 0; steps; hand-out 0 0; pass 0 0; pass 0 1", "inside a pass"),
        ("loop steps; entered 0 0; steps; hand-out 0 0; pass 0 0; left", "inside a pass"),
        ("loop steps; entered 0 0; steps; hand-out 0 0; left", "without a pass"),
        ("loop steps; entered 0 0; steps; hand-out 0 0; pass 0 0; call", "inside a pass"),
        ("loop steps; entered 0 0; steps; hand-out 0 0; pass 1 0", "of a step that is over"),
        ("loop steps; entered 0 0; steps; hand-out 0 0; pass 0 0; shared", "inside a pass"),
        ("call", "before the loop"),
        ("loop steps; entered 0 0; shared", "inside the loop"),
    ],
)
def test_a_mistake_of_the_script_is_refused_and_changes_nothing(lines: str, because: str) -> None:
    trace = ScriptTrace()
    before = None
    for line in lines.split("; "):
        before = trace.s
        answers = trace.feed(line)
    assert because in answers[0] and trace.s == before


@pytest.mark.parametrize(
    "lines",
    [
        "loop steps; entered 0 0; hand-out 0 0; reduced",
        "loop steps; entered 0 0; steps; hand-out 0 0; pass 0 0; rehearsed; taken",
        "loop steps; entered 0 0; steps; called-early",
        "newcomer; loop steps; entered 0 0; steps; astray",
        "newcomer; loop steps; entered 0 0; steps; admitted",
        "loop steps; entered 0 0; steps; loop-over; epoch 1",
    ],
)
def test_what_cannot_happen_is_asserted(lines: str) -> None:
    trace = ScriptTrace()
    *before, last = lines.split("; ")
    for line in before:
        trace.feed(line)
    with pytest.raises(AssertionError):
        trace.feed(last)


# ------------------------------------------------------------------------------------------ a script of chance


WITH_STATE = (ScriptStage.COLLECTING, ScriptStage.TRYING, ScriptStage.REDUCED)


class Driver:
    """A worker whose script, and whose members, do what is drawn."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.arcs = set[tuple[str, str]]()
        self.s = LoopState(standing=Standing.NEWCOMER if self.chance() else Standing.MEMBER)
        self.over = False
        self.known = 0
        """The members' step, at least."""

    def chance(self) -> bool:
        return self.random.random() < 0.5

    def post(self, event: ScriptEvent) -> Move:
        before = self.s
        self.s, move = loop_state.step(before, event)
        assert not isinstance(move, Refuse), f"{event} in {before}"
        assert not (
            self.s.joining and self.s.stage in (ScriptStage.COLLECTING, ScriptStage.TRYING, ScriptStage.REDUCED)
        )
        self.arcs |= {(before.stage, self.s.stage), (before.standing, self.s.standing)}
        self.over = self.over or isinstance(move, Miss)
        return move

    def run(self) -> None:
        epochs = self.chance()
        if self.chance():
            self.post(SharedCalled())
        self.post(LoopBegun(LoopKind.EPOCHS if epochs else LoopKind.BARE))
        self.post(LoopEntered(1, 4, 4, resumed=not self.s.joining and self.chance()))
        self.known = 4
        for number in range(1, 3 if epochs else 2):
            if epochs and not self.over:
                self.post(EpochBegun(number))
                self.call()
            self.steps()
            if epochs and not self.over:
                self.post(StepsOver())
                if not self.s.joining:
                    self.call()
                self.post(EpochOver())
        if not self.over:
            self.post(LoopOver())
            self.call()

    def call(self) -> None:
        if not self.over and self.chance():
            move = self.post(Called())
            if self.s.joining and not self.over:
                assert isinstance(move, AskEarly if self.s.early else RecallReply)
            if self.s.early and not self.over:
                assert isinstance(move, RunTogether | AskEarly | RecallEarly)
                self.post(CalledEarly())

    def steps(self) -> None:
        if self.over:
            return
        self.post(StepsBegun())
        assert not self.s.resumed
        while not self.over:
            match self.post(NextStep(self.chance())):
                case CopyAnew():
                    self.known = max(self.known, self.s.step)
                    self.post(MembersLost() if self.chance() else CopiedAnew(self.known))
                    if not self.over:
                        assert self.s.behind and self.s.loads_again
                        self.step()
                case HandOut():
                    self.step()
                case EndSteps():
                    return

    def step(self) -> None:
        again = self.s.loads_again
        self.post(HandedOut(self.s.step, self.s.epoch))
        self.call()
        if self.over:
            return
        if self.random.random() < 0.1:
            self.post(StepWithdrawn())
            return
        first = True
        while first or self.chance():
            move = self.post(PassBegun(self.s.step, self.s.pass_no, read=self.chance(), drew=self.chance()))
            assert isinstance(move, LoadAgain) == (again and first)
            first = False
            match self.post(RehearsalOver()):
                case Join():
                    self.join()
                case Collect():
                    self.collect()
            if self.over:
                return
            self.post(Reduced())
        self.post(StepLeft())

    def collect(self) -> None:
        if self.s.behind:
            self.post(ResultTaken())
        if self.chance():
            self.post(PassRepeated())
        if self.chance():
            self.post(ResultHeld())

    def join(self) -> None:
        here = self.s.step
        if self.s.standing is Standing.NEWCOMER or self.chance():
            self.known = max(self.known, here) + self.chance()
            self.post(CopyOffered(self.s.shared_epoch if self.random.random() < 0.95 else 99))
            if self.over:
                return
            if isinstance(self.post(CopyArrived(self.known, self.chance(), self.chance())), GoAstray):
                assert self.known != here
                self.post(WentAstray())
                self.post(ResultTaken())
                self.post(JoinOver(self.known, self.s.epoch, result=True))
                return
            here = self.known
        if self.over:
            return
        result = True
        if self.chance():
            self.post(Admitted())
            result = self.chance()
        else:
            self.post(ResultTaken())
        self.post(JoinOver(here, self.s.epoch, result=result))
        if self.chance():
            self.post(PassRepeated())


def test_scripts_of_chance_keep_to_the_arcs_and_take_all_of_them() -> None:
    taken = set[tuple[str, str]]()
    for seed in range(1500):
        driver = Driver(Random(seed))
        driver.run()
        taken |= driver.arcs
    wanted = {(before, after) for arcs in (ARCS, STANDINGS) for before, stages in arcs.items() for after in stages}
    by_break = {(ScriptStage.BEFORE_STEPS, ScriptStage.AFTER_STEPS), (ScriptStage.BEFORE_STEPS, ScriptStage.OVER)}
    missed = {(before, after) for before, after in taken if after is ScriptStage.MISSED}
    assert {arc for arc in taken if arc[0] != arc[1]} - missed == wanted - by_break
    assert len(missed) >= 4


def test_every_stage_can_be_reached_and_only_the_ends_are_final() -> None:
    reached = {ScriptStage.SETUP, ScriptStage.MISSED, *(after for stages in ARCS.values() for after in stages)}
    assert reached == set(ScriptStage) == ARCS.keys()
    assert {stage for stage, after in ARCS.items() if not after} == {ScriptStage.OVER, ScriptStage.MISSED}
