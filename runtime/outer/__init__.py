"""Training that averages seldom: LocalSGD, DiLoCo, and DiLoCo by fragments. One step of the job is one round.

schedule.py      when which fragment is synchronised. Pure
fragments.py     the parameters of each fragment
replica_rows.py  what belongs to one replica and lives longer than a round
diloco.py        what a script says: elastic.DiLoCo, elastic.LocalSGD
by_option.py     the same, as `elastic run --outer` says it
round.py         a round on one worker
traffic.py       how many bytes a round takes. Pure
"""

from runtime.outer.diloco import DiLoCo, LocalSGD
from runtime.outer.round import Round

__all__ = ["DiLoCo", "LocalSGD", "Round"]
