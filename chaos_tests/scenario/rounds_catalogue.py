"""The faults of scripts in rounds (--restart), and of what they keep in memory; rows as those of catalogue.py."""

from __future__ import annotations

import signal
from functools import partial

from chaos_tests.scenario import failpoints
from chaos_tests.scenario.failpoints import Act
from chaos_tests.scenario.faults import Aim, Effect, Fault, Ground

HUNG_S = 120.0
"""From when a script hangs until the round is ended for it: the hang limit of such a run, the time that is measured at
once, twice, and what a loaded machine adds."""

_script = partial(Fault, ground=Ground.ROUNDS, aim=Aim.ANY)
_of_kept = partial(_script, usual=False, presets={"rounds-kept": 1})
_on_nodes = partial(Fault, ground=Ground.CLUSTER, usual=False)

ROUNDS_ROWS = (
    _script(
        "kill-script",
        "SIGKILL of the script of a member; its worker lives, and has to end with it",
        "scripts.strike",
        Effect.ENDS,
        presets={"rounds-kept": 2},
        given={"number": signal.SIGKILL},
    ),
    _script(
        "stop-script",
        "SIGSTOP of the script of a member: it has to be ended, and its worker with it",
        "scripts.strike",
        Effect.ENDS,
        noted_s=10.0,
        given={"number": signal.SIGSTOP},
    ),
    _script(
        "hang-script",
        "the script of a member waits for ever, and all others for it: the round has to be ended",
        "scripts.hang",
        Effect.SUSPECTS,
        for_s=HUNG_S,
    ),
    _of_kept(
        "kill-in-keep",
        "SIGKILL of a script at a point of writing its state into memory (needs elastic.keep)",
        "failpoints.arm",
        Effect.SUSPECTS,
        places=failpoints.KEEP,
        presets={"rounds-kept": 4},
        given={"act": Act.KILL},
    ),
    _of_kept(
        "flip-kept",
        "one bit of the newest state in memory is flipped, and a script gets SIGKILL: the bit has to be found",
        "kept.flip",
        Effect.SUSPECTS,
        for_s=15.0,
        presets={"rounds-kept": 2},
    ),
    _on_nodes(
        "kill-in-mirror",
        "SIGKILL of a script, or of a worker, while a step goes into memory here or on another node",
        "failpoints.arm",
        Effect.SUSPECTS,
        aim=Aim.ANY,
        places=failpoints.MIRROR,
        presets={"rounds-kept-nodes": 3},
        given={"act": Act.KILL},
    ),
    _on_nodes(
        "kill-in-thin-copy",
        "SIGKILL of a worker that copies what one node alone has kept, after a first SIGKILL (needs elastic.keep)",
        "failpoints.arm",
        Effect.ENDS,
        aim=Aim.ANY,
        places=(failpoints.THIN_COPIED,),
        spark=True,
        presets={"rounds-kept-nodes": 2},
        given={"act": Act.KILL},
    ),
    _on_nodes(
        "lose-node",
        "SIGKILL of a whole node, whose memory is gone; it comes back at once",
        "kept.lose_nodes",
        Effect.ENDS,
        presets={"rounds-kept-nodes": 3},
        given={"count": 1},
    ),
    _on_nodes(
        "lose-node-and-partner",
        "the same of two nodes at once, one of which mirrors what the other one keeps",
        "kept.lose_nodes",
        Effect.ENDS,
        forgets=True,
        presets={"rounds-kept-nodes": 1},
        given={"count": 2},
    ),
)
