"""Run by Python itself at the start of every process of a job: `--ring nccl` is gloo between CPUs there.

A worker can be held in the middle of an exchange: at the gate "exchange".
"""

from typing import Any

from tests.mutants import patch_when_imported


def stand_in(nccl: Any) -> None:
    from tests.unit.gloo import GlooGroup

    sound = nccl.ring_kind
    nccl.ring_kind = lambda wanted, *others: wanted if wanted == "nccl" else sound(wanted, *others)
    nccl.make_group = GlooGroup


def gate(process_group: Any) -> None:
    transport = process_group.ProcessGroupTransport
    sound, attempt = transport.exchange, transport.attempt

    def exchange(self: Any, *tensors: Any) -> None:
        sound(self, *tensors)
        if self.attempts > 1:  # the first one greets
            from tests.live.scripts import gates  # it looks at who it is in, which a process that is forked from is not

            gates.hold("exchange")

    def counted(self: Any) -> Any:
        self.attempts = getattr(self, "attempts", 0) + 1
        return attempt(self)

    transport.attempt, transport.exchange = counted, exchange


patch_when_imported("runtime.nccl", stand_in)
patch_when_imported("runtime.process_group", gate)
