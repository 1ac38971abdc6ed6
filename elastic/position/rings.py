"""What became of a ring: of the generation entered, or of a pending one."""

from __future__ import annotations

from dataclasses import replace

from elastic.messages import BuildFailed, RingBroken, RingState, RingUp
from elastic.position.actions import Outcome, Say
from elastic.position.events import RingBuilt, RingFailed, RingLost
from elastic.position.state import Position


def ring_changed(p: Position, event: RingBuilt | RingFailed | RingLost) -> Outcome:
    match event:
        case RingBuilt(generation):
            if generation == p.entered and p.ring is RingState.BUILDING and not p.quiesced:
                return replace(p, ring=RingState.LIVE), (Say(RingUp(p.me, generation)),)
            if any(g.number == generation for g in p.pending):
                return replace(p, built=(*p.built, generation)), (Say(RingUp(p.me, generation)),)
        case RingFailed(generation, unreachable):
            failed = Say(BuildFailed(p.me, generation, unreachable))
            if generation == p.entered and p.ring is RingState.BUILDING:
                return replace(p, ring=RingState.ABORTED), (failed,)
            if any(g.number == generation for g in p.pending):
                return p, (failed,)
        case RingLost(generation, because):
            if generation == p.entered and p.ring is not RingState.ABORTED:
                return replace(p, ring=RingState.ABORTED), (Say(RingBroken(p.me, generation, because)),)
    return p, ()
