"""The page of a fleet of three nodes behind certificates, in a real Chromium."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos_tests.support.processes import Command
from tests.live.dashboard_page import address_in
from tests.live.fleet import Fleet
from tests.live.jobs import ROOT

pytest.importorskip("selenium", reason="`make test-browser` installs it")

from tests.browser.chromium import BROWSER, DRIVER, Chromium

pytestmark = pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="no chromium here; `make test-browser`")


ABOUT_AND_WHERE = """
return [...document.querySelectorAll("#findings tr.finding")].map(
  (row) => [row.children[1].textContent, row.children[2].textContent]
);
"""


def test_jobs_nodes_kills_a_scale_and_a_drain(tmp_path: Path) -> None:
    with Fleet(tmp_path, replicas=1, nodes=("a", "b", "c"), certs=True) as fleet:
        name = fleet.train("small", workers=3, min_workers=1, max_workers=3)
        waiting = fleet.train("waits", workers=30)
        of_fleet = ["--certs", str(fleet.home / "certs" / "ann"), "--rendezvous", ",".join(fleet.client.replicas)]
        words = [sys.executable, "-m", "elastic.cli", "dashboard", "--listen", "0", *of_fleet]
        doctor = [sys.executable, "-m", "elastic.cli", "doctor", *of_fleet, "--json"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with (
            Command(words, tmp_path / "page.out", environment={"PYTHONPATH": str(ROOT)}) as command,
            Chromium() as page,
        ):
            page.open(page.until("its address", lambda: address_in(command.output)))
            page.until("both jobs", lambda: name in page.text("main") and waiting in page.text("main"))
            page.until("it is placed", lambda: "placed" in page.text(f"tr[data-job='{name}']"))
            fleet.until("a world that trains", lambda: fleet.status(name)["state"] == "running")
            page.click("#examine")
            page.until("the findings", lambda: page.all("#findings tr.finding"))
            rows = page.all("#findings tr.finding")
            assert any(row.startswith("OKnodec") for row in rows) and any("answers in" in row for row in rows)
            told = subprocess.run(doctor, env=environment, capture_output=True, text=True, check=False).stdout
            assert {(f["about"], f["where"]) for f in json.loads(told)["findings"]} == {
                tuple(cells) for cells in page.run(ABOUT_AND_WHERE)
            }
            page.screenshot("fleet")
            page.click(f"tr[data-job='{name}'] a")
            page.count("#members tr[data-worker]", 3)
            for number in (1, 2):
                worker = page.all("#members td button.link")[-1]
                page.click(f"button[aria-label='Kill {worker}']")
                page.click("#ask-yes")
                page.count("#moments [data-event=member_lost]", number)
                page.count("#recoveries tr button", number)
                page.count("#members tr[data-worker]", 3)
            page.until("the loss curve", lambda: page.run("return document.querySelectorAll('#loss canvas').length"))
            page.screenshot("fleet-job")
            page.run(
                "[...document.querySelectorAll('#top button')].find((one) => one.textContent === 'Scale…').click()"
            )
            page.run("document.querySelector('#ask input').value = 2")
            page.click("#ask-yes")
            page.count("#members tr[data-worker]", 2)
            page.click("#top a")
            page.until("the nodes", lambda: page.all("tr[data-node='c']"))
            page.click("tr[data-node='c'] button")
            page.click("#ask-yes")
            page.until("it leaves", lambda: "leaves" in page.text("tr[data-node='c']"))
            assert page.foreign() == [] and page.console() == []
