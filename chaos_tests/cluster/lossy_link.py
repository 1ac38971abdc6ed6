"""A bad cable between two network devices: frames are late, in another order, lost, doubled and damaged.

A program of its own, for kernels that have no netem, run in the namespace where the devices are:

    python -S lossy_link.py join DEVICE OTHER '{"delay_s": 0.05, ...}'
                                           says "ready", carries from the first line that it reads until it is killed,
                                           and says "carries" once it does
    python -S lossy_link.py plain DEVICE        from now on what this device sends has whole checksums, frame by frame
    python -S lossy_link.py usual DEVICE        no longer

A virtual cable carries frames of 64 KiB without a checksum, because nothing happens to them in memory. Here something
does: without `plain` at both ends a damaged frame would not be noticed by those whose data it holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import random
import select
import socket
import struct
import sys
import time
from dataclasses import dataclass

ALL_PROTOCOLS = 3
PACKET_IGNORE_OUTGOING = 23
SIOCETHTOOL = 0x8946
ETHTOOL_STXCSUM = 0x17
IPV4 = b"\x08\x00"
SUMMED_FROM = 34
"""Bytes of an Ethernet and an IPv4 header. A bit behind them is covered by the checksum of TCP or UDP."""
LARGEST = 1 << 16
BUFFER_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Roughness:
    """What a cable does to frames, the same in each direction. A frame is delay_s late, up to jitter_s more or less,
    whatever came before it. lost, doubled, damaged: shares of all frames. Damage is one bit, behind the headers of
    IPv4."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    lost: float = 0.0
    doubled: float = 0.0
    damaged: float = 0.0

    def fates(self, frame: bytes, dice: random.Random) -> list[tuple[float, bytes]]:
        """What comes out at the other end: after how many seconds, and with which bytes."""
        if dice.random() < self.lost:
            return []
        copies = 2 if dice.random() < self.doubled else 1
        return [(self._late_s(dice), self._harmed(frame, dice)) for _ in range(copies)]

    def _late_s(self, dice: random.Random) -> float:
        return max(0.0, self.delay_s + dice.uniform(-self.jitter_s, self.jitter_s))

    def _harmed(self, frame: bytes, dice: random.Random) -> bytes:
        if dice.random() >= self.damaged or frame[12:14] != IPV4 or len(frame) <= SUMMED_FROM:
            return frame
        changed = bytearray(frame)
        changed[dice.randrange(SUMMED_FROM, len(frame))] ^= 1 << dice.randrange(8)
        return bytes(changed)


def join(devices: list[str], how: Roughness) -> None:
    """Never returns. What a device does not take, or has lost, is lost."""
    ends = [_open() for _ in devices]
    other = dict(zip(ends, reversed(ends), strict=True))
    dice, order = random.Random(), itertools.count()
    under_way: list[tuple[float, int, socket.socket, bytes]] = []
    print("ready", flush=True)
    sys.stdin.readline()
    for end, device in zip(ends, devices, strict=True):  # not before: until now frames went another way
        end.bind((device, ALL_PROTOCOLS))
    print("carries", flush=True)
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], wait_s)[0]:
            now_s = time.monotonic()
            with contextlib.suppress(OSError):
                for late_s, frame in how.fates(end.recv(LARGEST), dice):
                    heapq.heappush(under_way, (now_s + late_s, next(order), other[end], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(under_way)
            with contextlib.suppress(OSError):
                end.send(frame)


def _open() -> socket.socket:
    """It hears nothing until it is bound."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(263, PACKET_IGNORE_OUTGOING, 1)  # SOL_PACKET
    end.setsockopt(socket.SOL_SOCKET, 33, BUFFER_BYTES)  # SO_RCVBUFFORCE
    return end


def sum_in_full(device: str, whole: bool) -> None:
    """Whether what the device sends has its checksums, and is in frames that fit. Raises OSError."""
    value = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_STXCSUM, not whole))
    request = struct.pack("16sP16x", device.encode(), ctypes.addressof(value))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, request)


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    if verb == "join":
        join(words[:2], Roughness(**json.loads(words[2])))
    else:
        sum_in_full(words[0], verb == "plain")
