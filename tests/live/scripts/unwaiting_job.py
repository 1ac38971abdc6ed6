"""The size of the job of unwaiting.py, for who runs it and for who looks at it."""

from __future__ import annotations

EVERY, SHARDS = 4, 4
PHASE_S = 600.0
