"""The search: asks Optuna for trials, begins their jobs, and tells Optuna what they gave.

What is decided is written to Optuna's storage before it is done: the words of a trial before its job begins, that it is
pruned before its job is stopped. So whoever goes on finds trials that have no job yet, jobs that run, and jobs that are
over, and needs to know nothing else.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from elastic.errors import ConfigError, ElasticError
from elastic.platforms.search.decisions import Deed, JobState, TrialJobView, decide
from elastic.platforms.search.study_file import StudyFile, command_of
from elastic.records.ledger import plain

POLL_S = 0.5

WORDS, PRUNED, INTERRUPTED, BECAUSE = "elastic_words", "elastic_pruned", "elastic_interrupted", "elastic_because"
"""Attributes of a trial in Optuna's storage."""


class TrialJobs(Protocol):
    """Where the jobs of trials run."""

    def name(self, trial: int) -> str: ...
    def begin(self, trial: int, words: Sequence[str]) -> None: ...
    def look(self, trial: int) -> TrialJobView: ...
    def stop(self, trial: int) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Active:
    """A trial that is not over. attempts: how often its job was begun in a row without a step more since `steps`."""

    trial: Any
    words: list[str]
    seen: TrialJobView
    reported: int = -1
    attempts: int = 0
    steps: int = -1


class Search:
    """A context manager. home: the directory of the search, which no other search may use meanwhile. Raises
    ConfigError."""

    def __init__(self, file: StudyFile, where: Path, home: Path, jobs: TrialJobs, trials: int, parallel: int) -> None:
        import optuna

        self._file = file
        self._where = where
        self._jobs = jobs
        self._trials = trials
        self._parallel = parallel
        self._exhausted = False
        self.active: dict[int, _Active] = {}
        self._lock = (home / "search.lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(f"another `elastic search` uses {home}; give this one another --dir") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(
            storage=f"sqlite:///{home / 'study.db'}",
            study_name="study",
            load_if_exists=True,
            direction=file.direction,
            pruner=file.pruner,
        )
        if (known := self.study.direction.name.lower()) != file.direction:
            self._lock.close()
            raise ConfigError(f"{where}: direction={file.direction!r}, but the study in {home} was begun to {known}")

    def close(self, *, interrupted: bool) -> None:
        """interrupted: stop the jobs, which go on when the search does."""
        try:
            if interrupted:
                for one in self.active.values():
                    one.trial.set_user_attr(INTERRUPTED, True)
                self._jobs.close()
        finally:
            self._lock.close()

    def run(self, ended: Callable[[Any, TrialJobView], None], looked: Callable[[], None]) -> None:
        """Until all trials are over. ended: called with each that ends now. looked: called after each look."""
        from optuna.trial import Trial, TrialState

        for frozen in self.study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            self._take(Trial(self.study, frozen._trial_id))
        while True:
            while len(self.active) < self._parallel and not self._exhausted and self._ask():
                pass
            if not self.active:
                return
            for number, one in list(self.active.items()):
                one.seen = self._jobs.look(number)
                self._report(one)
                if self._act(one):
                    del self.active[number]
                    ended(self.study.get_trials(deepcopy=False)[number], one.seen)
            looked()
            time.sleep(POLL_S)  # processes elsewhere: there is nothing to wait on

    def _ask(self) -> bool:
        """Whether there was another trial to begin."""
        number = len(self.study.get_trials(deepcopy=False))
        if number >= self._trials:
            return False
        self.study.sampler = self._file.sampler(number)
        # A grid gives points that have not ended once more, and says only when all have that it is exhausted.
        points = getattr(self.study.sampler, "_all_grids", None)
        if points is not None and number >= len(points):
            self._exhausted = True
            return False
        self._take(self.study.ask())
        return True

    def _take(self, trial: Any) -> None:
        """Make a trial active: a new one, or one of a search before, whose words may not have been written yet."""
        words = trial.user_attrs.get(WORDS)
        if words is None:
            self.study.sampler = self._file.sampler(trial.number)
            words = command_of(self._file.words(trial), self._where)
            trial.set_user_attr(WORDS, words)
        reported = max(self.study.get_trials(deepcopy=False)[trial.number].intermediate_values, default=-1)
        self.active[trial.number] = _Active(trial, list(words), TrialJobView(JobState.ABSENT), reported)

    def _report(self, one: _Active) -> None:
        """Tell Optuna of values between, and ask it whether the trial shall end before its job does."""
        if one.trial.user_attrs.get(PRUNED):
            return
        for step, value in sorted(one.seen.values.items()):
            if step > one.reported:
                one.trial.report(value, step)
                one.reported = step
                if one.seen.state is not JobState.ENDED and one.trial.should_prune():
                    one.trial.set_user_attr(PRUNED, True)
                    return

    def _act(self, one: _Active) -> bool:
        """Whether the trial is over."""
        from optuna.trial import TrialState

        attrs, number = one.trial.user_attrs, one.trial.number
        decision = decide(
            one.seen,
            self._file.metric,
            pruned=bool(attrs.get(PRUNED)),
            interrupted=bool(attrs.get(INTERRUPTED)),
            attempts=one.attempts,
        )
        match decision.deed:
            case Deed.BEGIN:
                if _tried(lambda: self._jobs.begin(number, one.words)):
                    steps = max(one.seen.values, default=-1)
                    one.attempts = one.attempts + 1 if steps == one.steps else 1
                    one.steps = steps
                    one.trial.set_user_attr(INTERRUPTED, False)
            case Deed.STOP:
                _tried(lambda: self._jobs.stop(number))
            case Deed.COMPLETE:
                return self._tell(one, TrialState.COMPLETE, decision.value)
            case Deed.PRUNED:
                return self._tell(one, TrialState.PRUNED)
            case Deed.FAIL:
                return self._tell(one, TrialState.FAIL, because=decision.because)
        return False

    def _tell(self, one: _Active, state: Any, value: float | None = None, because: str = "") -> bool:
        if because:
            one.trial.set_user_attr(BECAUSE, because)
        try:
            self.study.tell(one.trial, value, state=state)
        except RuntimeError:
            # Optuna's grid ends the loop of its own, which does not run here, when its last point has been told.
            if not self.study.get_trials(deepcopy=False)[one.trial.number].state.is_finished():
                raise
        return True


def _tried(call: Callable[[], None]) -> bool:
    """False if there is no leader at the moment: the next look tries again. Raises ConfigError, a mistake that all
    trials share."""
    try:
        call()
    except ConfigError:
        raise
    except ElasticError:
        return False
    return True


def entry(trial: Any, job: str) -> dict[str, Any]:
    """A trial that is over, as `--json` prints it. JSON has no infinite numbers: they are text, as in a ledger. trial:
    Optuna's FrozenTrial."""
    value = trial.value if trial.state.name == "COMPLETE" else None
    told = {
        "trial": trial.number,
        "state": trial.state.name.lower(),
        "value": value,
        "params": json.loads(json.dumps(trial.params, default=str)),
        "steps": max(trial.intermediate_values, default=-1) + 1,
        "job": job,
        "because": trial.user_attrs.get(BECAUSE, ""),
    }
    return plain(told)
