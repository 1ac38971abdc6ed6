"""The run with faults: the job is followed, broken as planned, and looked after when it has ended."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from chaos_tests.cluster.cluster_job import NodesJob
from chaos_tests.cluster.job_handle import Followed, JobFailed
from chaos_tests.failpoints.orders import FailpointOrders
from chaos_tests.nemesis.membership_view import MembershipView
from chaos_tests.nemesis.nemesis import Nemesis
from chaos_tests.nemesis.scene import Scene, Teller, Victims
from chaos_tests.run.campaign import START_S, Campaign, ground, on_one_machine, planned, specification
from chaos_tests.run.checkpoint_audit import Auditor
from chaos_tests.run.narrator import Narrator
from chaos_tests.run.recorder import Embedded, Recorder, RecordSource
from chaos_tests.run.script_audit import ScriptAudit
from chaos_tests.scenario.faults import Ground
from chaos_tests.support import processes, resources
from elastic.platforms.local.job_run import NODE
from elastic.records import temp_dirs
from elastic.records.files import read_job

OWN_PREFIX = "chaos-"
"""With this begins the name of the directory of a run's temporary files. A later run removes the directory if this
process is killed."""
STALL_CHECK_S = 1.0
STALLED_S = 90.0
"""A run with faults in which no step was applied for so long is stopped; the checkers say what that means."""


def faulty_run(campaign: Campaign, quiet_s: float, environment: Mapping[str, str] | None = None) -> Campaign:
    """The same with faults. Returns the campaign with its plan. Judging is another matter: see checkers.

    environment: of this run only. Raises JobFailed if the job has left nothing to judge, not even a directory.
    """
    campaign = planned(campaign, quiet_s)
    directory = temp_dirs.in_tmp(OWN_PREFIX)
    try:
        # etcd's socket lies below, and the path of a socket is short.
        temporary = directory.path / "t"
        temporary.mkdir()
        # torch keeps a cache among the temporary files for the next process, on purpose.
        own = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(directory.path / "torch")}
        orders = FailpointOrders(directory.path / "failpoints")
        own |= orders.environment((environment or os.environ).get("PYTHONPATH", ""))
        _Faulty(campaign, quiet_s, temporary, orders, {**(environment or {}), **own}).run()
    finally:
        directory.remove()
    return campaign


class _Faulty:
    def __init__(
        self, campaign: Campaign, quiet_s: float, temporary: Path, orders: FailpointOrders, environment: dict[str, str]
    ) -> None:
        self._campaign = campaign
        self._orders = orders
        steps = campaign.home / "quiet" / "steps.jsonl"
        self._quiet_steps = len(steps.read_bytes().splitlines()) if steps.exists() else 0
        self._quiet_s = quiet_s
        self._dir = campaign.home / "faulty"
        self._temporary, self._environment = temporary, environment
        self._narrator = Narrator()
        self._world = MembershipView()
        self._recorder: Recorder | None = None
        self._auditor: Auditor | None = None
        self._breaker: Nemesis | None = None
        self._before = resources.Before.now(temporary)
        self._daemons: Callable[[], frozenset[int]] = frozenset
        self._ports: set[resources.OpenPort] = set()
        self._looked_s = 0.0
        self._stepped_s = math.inf
        """When the ledger grew last, or a script was started."""
        self._stalled_s = STALLED_S
        self._scripts: ScriptAudit | None = None
        self._steps = 0

    def run(self) -> None:
        where = ground(self._campaign)
        if where is Ground.MACHINE:
            self._on_one_machine()
        else:
            self._on_nodes(cuttable=where is Ground.NETWORK)

    def _on_one_machine(self) -> None:
        with on_one_machine(self._campaign, self._dir, self._turn, self._environment) as job:
            job.until("the job has a directory", (self._dir / "job.json").exists, START_S)
            workers = [f"{NODE}.{slot}.0" for slot in range(self._campaign.workers)]
            self._follow(job, Embedded(job.mark), workers, {NODE: self._dir}, None)

    def _on_nodes(self, *, cuttable: bool) -> None:
        spec = specification(self._campaign)
        slots = self._campaign.slots or 1
        with NodesJob(self._dir, spec, self._turn, self._environment, cuttable=cuttable, slots=slots) as job:
            self._before = resources.Before.now(self._temporary)
            self._daemons = lambda: job.daemons
            job.submit()
            places = {node: job.place(node) for node in job.nodes}
            self._follow(job, job.cluster.etcd, job.first_workers, places, job)
            job.gather()

    def _follow(
        self,
        job: Followed,
        etcd: RecordSource,
        workers: Sequence[str],
        places: Mapping[str, Path],
        nodes: NodesJob | None,
    ) -> None:
        """workers: the first ones. places: the job's directory on each node. nodes: the job, if it has several."""
        spec = read_job(self._dir)
        with Recorder(self._dir, spec.name, etcd) as self._recorder:
            self._auditor = Auditor(places, self._recorder.journal)
            self._scripts = ScriptAudit(self._recorder.journal)
            if spec.restart:  # what a script does between its start and its end is its own matter
                self._stalled_s += self._quiet_s * spec.workers
            scene = Scene(
                world=self._world,
                victims=Victims(self._world, self._campaign.seed),
                teller=Teller(self._recorder.journal, self._narrator.say),
                orders=self._orders,
                directory=self._dir,
                mark=job.mark,
                spec=spec,
                steps=self._quiet_steps,
                nodes=nodes,
            )
            self._breaker = Nemesis(self._campaign.plan, scene)
            try:
                self._break(job, self._breaker, workers)
            finally:
                self._breaker.heal("the run is over")
            self._auditor.look_at_all()
            self._scripts.look([])
            left = resources.left(job.mark, self._ports, self._temporary, self._before, self._daemons())
            self._recorder.journal.write("left_behind", left=list(left))

    def _break(self, job: Followed, breaker: Nemesis, workers: Sequence[str]) -> None:
        """Until the job has ended."""
        breaker.prepare(workers)
        try:
            job.until("a first step was applied, or a first round has begun", job.has_begun, START_S)
        except JobFailed as failed:  # also by a fault in the first step: the checkers say what that means
            self._narrator.say(str(failed))
            job.stop()
        else:
            breaker.begin()
        while job.ended(STALL_CHECK_S) is None:
            if time.monotonic() - self._stepped_s > self._stalled_s:
                what = f"no step was applied and no round began for {self._stalled_s:.0f} s"
                self._narrator.say(f"{what}, so the job is stopped")
                job.stop()

    def _turn(self, job: Followed) -> None:
        lines, steps = list(job.new_events()), job.steps()
        self._world.feed(lines)
        self._narrator.hear(lines, steps)
        if len(steps) > self._steps or any(line["event"] == "script_started" for line in lines):
            self._steps, self._stepped_s = len(steps), time.monotonic()
        if self._recorder is not None:
            self._recorder.look(len(steps))
        if self._auditor is not None:
            self._auditor.look(lines)
        if self._breaker is not None:
            self._breaker.poll(lines, len(steps))
        if self._scripts is not None:
            self._scripts.look(lines)
        if time.monotonic() - self._looked_s > 1.0:
            self._looked_s = time.monotonic()
            segments, own = resources.shared_memory() - self._before.segments, processes.living(job.mark)
            self._ports |= resources.open_ports(own - self._daemons())
            self._before = self._before.beside(resources.in_use(segments, but_by=own))
