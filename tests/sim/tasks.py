"""Threads of a program under virtual time: one runs at a time, and what they wait for is an event of the clock.

So code with threads runs as it is, each run from a seed, and may be killed or stand still at any place where it waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.sim.clock import Clock


class Ended(BaseException):
    """The process in which this task runs is dead."""


class Task:
    """A thread of a process. Only `resume` is called from elsewhere."""

    def __init__(self, tasks: Tasks, process: str, act: Callable[[], object]) -> None:
        self._tasks, self.process, self._act = tasks, process, act
        self._go = threading.Semaphore(0)
        self._wait = 0
        self._woken = False
        self.over = False
        self._error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if self.process not in self._tasks.dead:
                self._act()
        except Ended:
            pass
        except BaseException as error:
            self._error = error
        self.over = True
        self._tasks.turn.release()

    def resume(self) -> None:
        """Let it run until it waits again."""
        tasks = self._tasks
        if self.over:
            return
        if (until_s := tasks.frozen.get(self.process, 0.0)) > tasks.clock.now_s and self.process not in tasks.dead:
            tasks.clock.at(until_s, self.resume)
            return
        tasks.current = self
        self._go.release()
        tasks.turn.acquire()
        tasks.current = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self, timeout_s: float | None) -> bool:
        """By the task itself: until it is woken, or the time is over. Returns whether it was woken."""
        self._wait += 1
        number, self._woken = self._wait, False
        if timeout_s is not None:
            self._tasks.clock.after(timeout_s, lambda: self._end_wait(number, woken=False))
        self._tasks.turn.release()
        self._go.acquire()
        if self.process in self._tasks.dead:
            raise Ended
        return self._woken

    def wake(self) -> None:
        number = self._wait
        self._tasks.clock.after(0.0, lambda: self._end_wait(number, woken=True))

    def _end_wait(self, number: int, *, woken: bool) -> None:
        if number == self._wait and not self.over:
            self._wait += 1
            self._woken = woken
            self.resume()


class Tasks:
    """All tasks of a world. dead: processes; frozen: process -> until when it stands still."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.turn = threading.Semaphore(0)
        self.current: Task | None = None
        self.dead: set[str] = set()
        self.frozen: dict[str, float] = {}
        self._all: list[Task] = []

    def start(self, process: str, act: Callable[[], object]) -> Task:
        task = Task(self, process, act)
        self._all.append(task)
        self.clock.after(0.0, task.resume)
        return task

    def kill(self, process: str) -> None:
        self.dead.add(process)
        for task in self._all:
            if task.process == process and not task.over and task is not self.current:
                self.clock.after(0.0, task.resume)

    def end(self) -> None:
        """The run is over: no thread is left."""
        self.dead.update(task.process for task in self._all)
        for task in self._all:
            task.resume()

    def me(self) -> Task:
        assert self.current is not None
        return self.current

    def check(self) -> None:
        """Raises Ended in a process that was killed since it began to run."""
        if self.current is not None and self.current.process in self.dead:
            raise Ended

    def sleep(self, seconds: float) -> None:
        self.me().wait(seconds)

    def as_threading(self) -> Any:
        """In place of the module."""
        return SimpleNamespace(Lock=lambda: Lock(self), Condition=lambda: Condition(self), Event=lambda: Event(self))


class Lock:
    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._holder: Task | None = None
        self._waiting: list[Task] = []

    def acquire(self, timeout: float = -1) -> bool:
        me = self._tasks.current
        while self._holder is not None:
            assert me is not None and me is not self._holder, "a deadlock"
            self._waiting.append(me)
            woken = me.wait(None if timeout < 0 else timeout)
            self._waiting.remove(me)
            if not woken:
                return False
        self._holder = me
        return True

    def release(self) -> None:
        self._holder = None
        if self._waiting:
            self._waiting[0].wake()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Condition(Lock):
    def __init__(self, tasks: Tasks) -> None:
        super().__init__(tasks)
        self._for: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        me = self._tasks.me()
        self.release()
        self._for.append(me)
        try:
            woken = me.wait(timeout)
        finally:
            self._for.remove(me)
        self.acquire()
        return woken

    def notify_all(self) -> None:
        for task in self._for:
            task.wake()


class Event:
    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._set = False
        self._for: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for task in self._for:
            task.wake()

    def wait(self, timeout: float | None = None) -> bool:
        if self._set:
            return True
        me = self._tasks.me()
        self._for.append(me)
        try:
            me.wait(timeout)
        finally:
            self._for.remove(me)
        return self._set
