"""Who can reach whom: hosts, lanes between them, and partitions."""

from __future__ import annotations

from collections.abc import Collection

from tests.sim.clock import Clock, Lane


class Network:
    def __init__(self, clock: Clock, loss: float) -> None:
        self.clock, self._loss = clock, loss
        self._sides: dict[str, int] | None = None
        self._one_way = False
        self._apart: Collection[str] = ()
        self._muted: set[tuple[str, str]] = set()
        self._lanes: dict[tuple[str, str], Lane] = {}

    def part(self, *, one_way: bool, apart: Collection[str] = ()) -> None:
        """From now on two halves: what one host sends to a host of the other half does not arrive. one_way: what the
        second half sends does. apart: the hosts of the second half; else a host falls into a half when it is first
        spoken to or of."""
        self._sides, self._one_way, self._apart = {}, one_way, apart

    def heal(self) -> None:
        self._sides = None

    def mute(self, sender: str, receiver: str) -> None:
        """What this host sends to that one does not arrive."""
        self._muted.add((sender, receiver))

    def unmute(self) -> None:
        self._muted.clear()

    @property
    def is_parted(self) -> bool:
        return self._sides is not None

    def side(self, host: str) -> int:
        """Which half, while there is a partition."""
        assert self._sides is not None
        if self._apart:
            return int(host in self._apart)
        return self._sides.setdefault(host, self.clock.random.randrange(2))

    def is_blocked(self, sender: str, receiver: str) -> bool:
        if self._muted and (sender, receiver) in self._muted:
            return True
        if self._sides is None or sender == receiver:
            return False
        here, there = self.side(sender), self.side(receiver)
        return here != there and not (self._one_way and here == 1)

    def new_lane(self, sender: str, receiver: str, low_s: float, high_s: float) -> Lane:
        """A connection from host to host."""
        return Lane(self.clock, low_s, high_s, self._loss, lambda: self.is_blocked(sender, receiver))

    def lane(self, sender: tuple[str, str], receiver: tuple[str, str], low_s: float, high_s: float) -> Lane:
        """The one from process to process, each with its host."""
        key = (sender[0], receiver[0])
        if (known := self._lanes.get(key)) is not None:
            return known
        loss = 0.0 if sender[1] == receiver[1] else self._loss
        lane = Lane(self.clock, low_s, high_s, loss, lambda: self.is_blocked(sender[1], receiver[1]))
        self._lanes[key] = lane
        return lane

    def lose_from(self, sender: str, but: str) -> None:
        """What this process has sent is lost, apart from what goes to `but`."""
        for (source, target), lane in self._lanes.items():
            if source == sender and target != but:
                lane.lose()
