"""What a ring costs that follows another one: `python -m tests.bench.rebuild [--members 8] [--rounds 10]`.

Members are threads of this process. All of them leave a ring and build the next one, in turns with new connections and
with those that they have. Printed: CPU time of all members together, the medians; within a host, over TCP, over TLS.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from elastic.security import certificate_authority
from elastic.security.certificate_authority import Authority
from runtime.allreduce.ring.ring import Ring
from runtime.allreduce.ring.tls import TlsContexts
from tests.unit.rings import build_all, build_one, everyone, listeners, peers_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    names = [f"w{rank}" for rank in range(arguments.members)]
    apart = [f"127.0.0.{rank + 1}" for rank in range(arguments.members)]
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        certificate_authority.create(home / "ca")
        for name in names:
            Authority(home / "ca").issue(name, ["agent"], home / name)
        seals = [TlsContexts(home / name) for name in names]
        for way, hosts, sealed in (("host", ["127.0.0.1"] * len(names), ()), ("TCP", apart, ()), ("TLS", apart, seals)):
            anew, kept = measure(names, hosts, sealed, arguments.rounds)
            print(f"{way:4} new connections {1000 * anew:6.1f} ms CPU, kept ones {1000 * kept:6.1f} ms", flush=True)


def measure(names: list[str], hosts: list[str], seals: Sequence[TlsContexts], rounds: int) -> tuple[float, float]:
    """The medians with new connections and with kept ones, in seconds."""
    times: dict[bool, list[float]] = {False: [], True: []}
    with listeners(names, hosts, seals) as opened:
        peers, built = peers_of(opened), build_all(opened)
        for number in range(2 * rounds):
            keeps = number % 2 == 1

            def member(ring: Ring, generation: int = number + 2, keeps: bool = keeps) -> Ring:
                kept = ring.hand_over(names) if keeps else {}
                ring.close()
                return build_one(opened[ring.me], ring.me, peers, generation=generation, kept=kept)

            began_s = time.process_time()
            built = everyone([lambda ring=ring: member(ring) for ring in built])  # type: ignore[misc]
            times[keeps].append(time.process_time() - began_s)
        for ring in built:
            ring.close()
    return statistics.median(times[False]), statistics.median(times[True])


if __name__ == "__main__":
    main()
