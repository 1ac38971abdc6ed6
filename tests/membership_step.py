"""The membership's state machine as a function, for tests that look at a group before and after an event."""

from __future__ import annotations

from copy import copy
from dataclasses import fields

from elastic.protocol import membership
from elastic.protocol.membership import Action, Event, Group


def step(group: Group, event: Event, now_s: float) -> tuple[Group, tuple[Action, ...]]:
    """Apply one event to a copy of the group. Returns that, and what is to be done."""
    after = copy(group)
    for spec in fields(group):
        if isinstance(value := getattr(group, spec.name), dict | set):  # what is changed in place
            setattr(after, spec.name, copy(value))
    return after, membership.advance(after, (event,), now_s)
