"""A replica's answers to the daemons of nodes and to operators. Only the fleet's leader answers; others name it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from elastic.config import check_name, check_pairs
from elastic.errors import CompareFailed, ConfigError, StoreError, StoreRefused
from elastic.fleet import registry
from elastic.fleet.documents import FleetJob, FleetState, Submission, check_for_fleet
from elastic.fleet.probes import ReachProbes
from elastic.fleet.replica.leader import FleetLeader, NodeSession
from elastic.protocol.worker_id import node_of
from elastic.records import job_files
from elastic.records.journal import Journal
from elastic.rendezvous.served_stream import serve
from elastic.rendezvous.service import RendezvousService, first
from elastic.security.expiry import SeenCertificates
from elastic.security.interceptor import caller_of
from elastic.security.roles import Caller
from elastic.store.election import LeadershipLost
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb

SLOTS_LIMIT = 1024
"""Most slots of one node; more is a mistake."""

QUOTA_LIMIT = 1_000_000
"""Most slots of one owner; more is a mistake."""


class QuestionRefused(Exception):
    """A question that is refused, with the reason for the operator."""


class FleetService:
    """service: this replica's part in all jobs. shown: the certificates it has seen. directory: the replica's own.
    look: finds the facts about this replica."""

    def __init__(
        self,
        service: RendezvousService,
        journal: Journal,
        shown: SeenCertificates,
        directory: Path,
        look: Callable[[], object],
    ) -> None:
        self._shown = shown
        self._service = service
        self._journal = journal
        self._directory = directory
        self._look = look
        self._crossings = ReachProbes()
        self.fleet_leader: FleetLeader | None = None
        self.leader = ""
        """The address of the fleet's leader as far as this replica knows, or ""."""

    # ------------------------------------------------------------------------------------------------ nodes

    async def Attend(self, words: AsyncIterator[pb.NodeWord], context: Any) -> None:
        leader = self.fleet_leader
        if leader is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.leader)
            return
        try:
            session = leader.attach(await _hello(words))
        except codec.WireError as error:
            self._journal.write("node_refused", because=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        hearing = self._listen(leader, session, words)
        node = session.hello.node
        await serve(context, session, hearing, lambda: leader.detach(session), self._journal, node=node)

    async def _listen(self, leader: FleetLeader, session: NodeSession, words: AsyncIterator[pb.NodeWord]) -> None:
        async for word in words:
            if word.WhichOneof("content") == "goodbye":
                return
            leader.heard(session, word)

    # -------------------------------------------------------------------------------------------- operators

    async def Ask(self, request: pb.Question, context: Any) -> pb.Answer:
        answer, leader = pb.Answer(leading=True, leader=self.leader), self.fleet_leader
        try:
            if _is_of_this_replica(request):
                answer.document = json.dumps(await self._answer_here(request))
            elif leader is None or not leader.ready.is_set():
                return pb.Answer(leading=False, leader="" if leader else self.leader)
            else:
                answer.document = json.dumps(await self._answer(leader, request, caller_of(context)))
        except (QuestionRefused, ConfigError, codec.WireError) as error:
            answer.refused = str(error)
        except OSError as error:
            answer.refused = f"this replica cannot read that: {error}"
        except (LeadershipLost, StoreError) as error:
            self._journal.write("question_failed", because=str(error))
            if isinstance(error, StoreRefused):  # no other leader could do better, so no election is waited for
                answer.refused = f"etcd refuses this: {error}"
            else:
                answer.leading = False
        return answer

    async def _answer(self, leader: FleetLeader, request: pb.Question, caller: Caller) -> object:
        match request.WhichOneof("content"):
            case "submit" | "stop" | "scale" | "cordon" | "allow" | "end_agent" as change:
                return await getattr(self, f"_{change}")(leader, getattr(request, change), caller)
            case "overview":
                return self._overview(leader)
            case "log":
                return await self._log(leader, request.log)
            case "examine":
                found = await leader.examine(request.examine.node)
                return {"away": True} if found is None else json.loads(found)
            case "ports":
                return await self._crossings.look(leader.sessions)
        raise QuestionRefused("an empty question")

    def _note(self, event: str, caller: Caller, **fields: Any) -> None:
        self._journal.write(event, caller=str(caller), peer=caller.address, **fields)

    async def _answer_here(self, request: pb.Question) -> object:
        if request.WhichOneof("content") == "examine":
            return await asyncio.to_thread(self._look)
        ask = request.log
        jobs = self._directory / "jobs" if ask.job else self._directory
        piece = await asyncio.to_thread(job_files.read, jobs, ask.job, ask.log, ask.offset)
        return {"text": piece.text.decode("latin-1"), "end": piece.end, "size": piece.size}

    async def _submit(self, leader: FleetLeader, submit: pb.Submit, caller: Caller) -> object:
        spec = codec.job_from_json(submit.document.encode(), "the job")
        check_for_fleet(spec)
        before: Submission | None = None
        name, _, entry = submit.resume.partition("@")
        if name:
            before = (job := _find(leader, name)).submission
            if before.spec.checkpoint_dir != spec.checkpoint_dir:
                raise QuestionRefused(
                    f"{job.name} has its checkpoints below {before.spec.checkpoint_dir}, and this job has "
                    f"checkpoint_dir={spec.checkpoint_dir!r}; give it the same"
                )
        for what, text in (("resume", entry), ("token", submit.token), ("identity", submit.identity)):
            if text:
                codec.identifier(what, text)

        def write(to: registry.Registry) -> str:
            for _ in range(3):
                try:
                    return to.submit(spec, before, entry, submit.token, caller, submit.identity)
                except CompareFailed:
                    continue
            raise CompareFailed("too many jobs are submitted in the same moment")

        name = await leader.change(write)
        self._note("submitted", caller, job=name, resume=submit.resume)
        plan = leader.plan()
        return {"job": name, "larger": plan.waiting[name] if name in plan.larger else ""}

    async def _stop(self, leader: FleetLeader, stop: pb.Stop, caller: Caller) -> object:
        job = _find(leader, stop.job)
        if job.result is not None and not job.waits_again:
            raise QuestionRefused(f"{job.name} is over already: {job.result.because.partition(chr(10))[0]}")
        if job.stop is None or job.stop.preempts:
            await leader.change(lambda to: to.stop(job.name, stop.because))
            job = _find(leader, job.name)  # a preempted one may go on as another one by now
            self._note("stop_asked", caller, job=job.name, because=stop.because)
        return {"job": job.name}

    async def _scale(self, leader: FleetLeader, scale: pb.Scale, caller: Caller) -> object:
        job = _find(leader, scale.job)
        if job.result is not None:
            raise QuestionRefused(f"{job.name} is over: {job.result.because.partition(chr(10))[0]}")
        least, most = job.spec.min_workers, job.spec.workers_limit
        if not least <= scale.workers <= most:
            raise QuestionRefused(
                f"{job.name} takes {least} to {most} workers, from min_workers to max_workers of its file, and not "
                f"{scale.workers}"
            )
        await leader.change(lambda to: to.scale(job.name, scale.workers))
        self._note("scaled", caller, job=job.name, workers=scale.workers, before=job.workers)
        return {"job": job.name, "workers": scale.workers, "before": job.workers}

    async def _cordon(self, leader: FleetLeader, cordon: pb.Cordon, caller: Caller) -> object:
        known = {*leader.sessions, *leader.state.cordons, *(s.node for job in leader.state.jobs for s in job.shares)}
        if cordon.node not in known:
            raise QuestionRefused(f"no node {cordon.node!r:.64}; there are {', '.join(sorted(known)) or 'none'}")
        await leader.change(lambda to: to.cordon(cordon.node, "" if cordon.over else cordon.because))
        there = [
            job.name for job in leader.state.jobs if job.runs and any(share.node == cordon.node for share in job.shares)
        ]
        for name in there or [""]:  # for the story of each job
            self._note("cordoned", caller, job=name, node=cordon.node, over=cordon.over, because=cordon.because)
        return {"node": cordon.node}

    async def _end_agent(self, leader: FleetLeader, end: pb.EndAgent, caller: Caller) -> object:
        if end.node not in leader.state.cordons:
            raise QuestionRefused(f"node {end.node:.64} is not drained, and may have jobs; `elastic drain` comes first")
        if (session := leader.sessions.get(end.node)) is None:
            return {"away": True}
        self._note("agent_end_asked", caller, node=end.node)
        session.post(pb.NodeOrder(end=end))
        return {"node": end.node}

    async def _allow(self, leader: FleetLeader, allow: pb.Allow, caller: Caller) -> object:
        owner = check_name("OWNER", allow.owner)
        if not 0 <= allow.slots <= QUOTA_LIMIT:
            raise QuestionRefused(f"a quota of {allow.slots} slots; give 1 to {QUOTA_LIMIT}, or 0 for none")
        before = leader.state.quotas.get(owner)
        await leader.change(lambda to: to.allow(owner, allow.slots))
        self._note("quota_changed", caller, owner=owner, slots=allow.slots)
        return {"owner": owner, "slots": allow.slots, "before": before.slots if before is not None else 0}

    def overview(self) -> dict[str, Any] | None:
        """What `elastic jobs --json` shows; None while this replica does not lead the fleet."""
        leader = self.fleet_leader
        return self._overview(leader) if leader is not None and leader.ready.is_set() else None

    def _overview(self, leader: FleetLeader) -> dict[str, Any]:
        taken: dict[str, dict[str, int]] = {}
        for job in leader.state.jobs:
            for share in job.shares if job.runs else ():
                taken.setdefault(share.node, {})[job.name] = share.slots
        nodes: dict[str, dict[str, Any]] = {
            name: {
                "node": name,
                "up": True,
                "address": session.hello.address,
                "slots": session.hello.slots,
                "labels": list(session.hello.labels),
                "because": session.leaves or session.notice or _unread_text(leader.unread_on(name, session)),
                "holds": None if session.holds is None else sorted(session.holds),
            }
            for name, session in leader.sessions.items()
        }
        for name in {*taken, *leader.state.cordons} - nodes.keys():
            nodes[name] = {"node": name, "up": False, "address": "", "slots": 0, "labels": [], "because": "is away"}
        for name, node in nodes.items():
            node["jobs"] = taken.get(name, {})
            if (wish := leader.state.cordons.get(name)) is not None:
                node["because"] = wish.because
        return {
            "leader": self.leader,
            "term": leader.term,
            "jobs": [self._job(leader, job) for job in leader.state.jobs],
            "nodes": [nodes[name] for name in sorted(nodes)],
            "owners": _owners(leader.state),
            "troubles": self._shown.troubles(leader.sessions.keys()),
        }

    def _job(self, leader: FleetLeader, job: FleetJob) -> dict[str, object]:
        told: dict[str, object] = {
            "job": job.name,
            "workers": job.workers,
            "min_workers": job.spec.min_workers,
            "identity": job.submission.identity,
            "request": job.submission.token,
            "owner": asdict(job.owner) if job.owner is not None else None,
            "account": job.account,
            "priority": job.spec.priority,
            "follows": job.submission.follows,
            "checkpoints": job.submission.checkpoints,
            "slots": {share.node: share.slots for share in job.shares},
        }
        if job.waits_again and (after := leader.state.after(job.name)) is None:
            missing = leader.stranded.get(job.name, "its place in the queue is being written")
            because = f"{job.stop.because if job.stop else ''}; {missing}"
            return {
                **told,
                "state": "waits",
                "because": because,
                "slots": {},
                "larger": False,
                "place": 0,
                "troubles": [],
            }
        if job.result is not None:
            ended = {name: getattr(job.result, name) for name in ("exit_code", "because", "digest", "generation")}
            ended["stopped"] = job.stop is not None and not job.stop.preempts
            if job.waits_again and job.stop is not None and after is not None:
                ended |= {"because": f"{job.stop.because}; goes on as {after.name}", "next": after.name}
            return {**told, "state": "ended", "slots": {}, **ended}
        troubles = [
            {
                "about": "agent",
                "where": node,
                "because": f"on {node} {session.troubles[job.name]}",
                "advice": f"see logs/agent.log of {job.name} there",
            }
            for node, session in sorted(leader.sessions.items())
            if job.name in session.troubles
        ] + self._shown.troubles({share.node for share in job.shares})
        state, because = "waits", leader.planned.waiting.get(job.name, "the nodes are being asked")
        if job.runs:
            state, because = "placed", leader.planned.lacking.get(job.name, "")
            because = because if job.shares else "no node has a slot for it any more"
        if job.stop is not None:
            state, because = "stopping", job.stop.because
        larger = state == "waits" and job.name in leader.planned.larger
        queue = [name for name in leader.planned.waiting if name not in leader.planned.larger]
        place = queue.index(job.name) + 1 if state == "waits" and job.name in queue else 0
        return {**told, "state": state, "because": because, "larger": larger, "place": place, "troubles": troubles}

    async def _log(self, leader: FleetLeader, ask: pb.ReadLog) -> object:
        """The names of a node's logs, or a piece of a log; bytes as Latin-1, which keeps each of them. "away": the node
        does not answer."""
        node = ask.node or node_of(ask.log)
        job = _find(leader, ask.job).name if ask.job else ""
        query = pb.LogQuery(job=job, log=ask.log, offset=ask.offset)
        piece = await leader.read_log(node, query)
        if piece is None:
            return {"text": "", "end": ask.offset, "size": -1, "away": True}
        return {"text": piece.text.decode("latin-1"), "end": piece.end, "size": piece.size}


def _is_of_this_replica(request: pb.Question) -> bool:
    """Whether the question is for this replica itself, leading or not."""
    content = request.WhichOneof("content")
    return (content == "log" and request.log.here) or (content == "examine" and not request.examine.node)


def _unread_text(jobs: list[str]) -> str:
    """Why the node of these jobs gets no other jobs."""
    return f"gets no job while etcd has documents of {', '.join(jobs)} that cannot be read" if jobs else ""


def _owners(state: FleetState) -> list[dict[str, object]]:
    """Where there are quotas, the owners that have one or slots: name, quota (0: none), and the slots of their jobs."""
    held = {owner: 0 for owner in state.quotas}
    for job in state.jobs if state.quotas else ():
        if job.runs and job.account:
            held[job.account] = held.get(job.account, 0) + sum(share.slots for share in job.shares)
    quotas = {owner: quota.slots for owner, quota in state.quotas.items()}
    return [{"owner": owner, "quota": quotas.get(owner, 0), "slots": held[owner]} for owner in sorted(held)]


def _find(leader: FleetLeader, name: str) -> FleetJob:
    """The job of that name, or as which that one goes on; or the only job submitted under that name that is not over,
    else the newest."""
    if (job := leader.state.job(name)) is not None:
        while (after := leader.state.after(job.name)) is not None:
            job = after
        return job
    alike = [job for job in leader.state.jobs if registry.base_name(job.name) == name]
    found = [job for job in alike if job.result is None] or alike[-1:]
    if len(found) == 1:
        return found[0]
    if found:
        raise QuestionRefused(
            f"{name} is the name of several jobs: {', '.join(job.name for job in found)}; give one of them"
        )
    raise QuestionRefused(f"no job {name!r:.64}; `elastic jobs` shows which there are")


async def _hello(words: AsyncIterator[pb.NodeWord]) -> pb.NodeHello:
    word = await first(words)
    if word.WhichOneof("content") != "hello":
        raise codec.WireError("the first word of a daemon must be its hello")
    hello = word.hello
    try:
        check_name("node", hello.node)
        check_pairs("labels", hello.labels)
    except ConfigError as error:
        raise codec.WireError(str(error)) from error
    if not 1 <= hello.slots <= SLOTS_LIMIT:
        raise codec.WireError(f"slots={hello.slots} must be 1 to {SLOTS_LIMIT}")
    return hello
