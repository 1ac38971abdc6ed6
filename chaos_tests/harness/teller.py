"""What the harness says of its faults: to the journal, for the checkers, and to the person who watches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from chaos_tests.harness.catalogue import CATALOGUE
from chaos_tests.harness.faults import lethal, noted_s
from chaos_tests.harness.schedule import Planned
from elastic.journal import Journal


class Teller:
    """say: for people. See history.py for the lines of the journal."""

    def __init__(self, journal: Journal, say: Callable[[str], None]) -> None:
        self._journal, self._say = journal, say

    def injected(self, planned: Planned, workers: Mapping[str, int], begun_ns: int, **fields: object) -> None:
        """Written once it is known to be possible, with the time at which it was begun. workers: with their pids."""
        fault = CATALOGUE[planned.kind].fault
        about: dict[str, object] = {
            "t_mono_ns": begun_ns,
            "number": planned.number,
            "fault": planned.kind,
            "place": planned.place,
            "lethal": lethal(fault),
            **({"noted_s": within_s} if (within_s := noted_s(fault)) is not None else {}),
            **fields,
        }
        for worker, pid in workers.items():
            self._journal.write("fault_injected", 0, **{**about, "worker_id": worker, "pid": pid})
        if not workers:
            self._journal.write("fault_injected", 0, **about)

    def held(self, planned: Planned, worker: str, begun_ns: int) -> None:
        self._journal.write("fault_held", t_mono_ns=begun_ns, number=planned.number, worker_id=worker)

    def seen(self, planned: Planned, because: str) -> None:
        self._journal.write("fault_seen", number=planned.number, because=because)

    def ended(self, planned: Planned) -> None:
        self._journal.write("fault_ended", number=planned.number)

    def skipped(self, planned: Planned, because: str) -> None:
        self._journal.write("fault_skipped", number=planned.number, fault=planned.kind, because=because)
        self.told(planned, f"skipped: {because}")

    def told(self, planned: Planned, text: str) -> None:
        self._say(f"#{planned.number} {planned.kind}: {text}")
