"""The trainer, in processes of which one damages what the job goes on from: after the choice, before it is read."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from elastic.checkpoints.naming import PERIODIC
from elastic.checkpoints.settings import Settings

settings = Settings.from_environment(os.environ)
if settings.resume:
    try:
        open(Path(os.environ["LIVE_GATES"]) / "flipped", "x").close()
    except FileExistsError:
        pass  # once a test
    else:
        entry = Path(settings.resume_from or settings.root) / PERIODIC / settings.resume
        for part in entry.glob("*.safetensors"):
            content = bytearray(part.read_bytes())
            content[-1] ^= 1
            part.write_bytes(content)
runpy.run_path(str(Path(__file__).with_name("trainer.py")), run_name="__main__")
