"""The page of a job of this machine that is over, as one file that asks the network for nothing."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from elastic.observability.dashboard.directory_source import DirectorySource
from elastic.observability.dashboard.job_history import JobHistory
from elastic.records.job_follower import SETTLE_NS

STATIC = resources.files("elastic.observability.dashboard") / "static"
PAGE = "page.html"


def saved_page(job_dir: Path, title: str, above: str, more: Mapping[str, Any]) -> str:
    """title: of the job. above: HTML that is shown before the rest. more: what the page's document has besides, or
    instead. Raises ConfigError if the directory holds no job."""
    source, history = DirectorySource(job_dir, None), JobHistory()
    time.sleep(SETTLE_NS / 1e9)  # younger lines are left for a later look
    while source.poll(history):
        continue
    state = {"status": source.status(), "summary": history.summary(time.time()), "problem": ""}
    document = {**history.document(), **state, "boot": "", "actions": [], **more}
    session = {"mode": "job", "job": title, "token": "", "may_act": False}
    answers = json.dumps({"/api/session": session, f"/api/jobs/{quote(title, safe='')}": document}).replace(
        "<", "\\u003c"
    )
    page = re.sub(r"<link rel=.icon.*\n", "", _text(PAGE)).replace("<main ", f"{above}\n<main ")
    page = re.sub(r'<link rel="stylesheet" href="/static/(.*)">', lambda m: f"<style>{_text(m[1])}</style>", page)
    page = re.sub(
        r'<script src="/static/(.*?)"(.*)></script>', lambda m: f"<script{m[2]}>{_script(m[1])}</script>", page
    )
    return page.replace("<script", f'<script id="saved" type="application/json">{answers}</script>\n<script', 1)


def _script(name: str) -> str:
    """With the module that it imports, because a file has no address from which others could be loaded."""
    return re.sub(r'import \{.*\} from "./(.*)";', lambda m: _text(m[1]).replace("export ", ""), _text(name))


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
