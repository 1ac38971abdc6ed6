"""Measures what it costs to look at a job: metrics that are scraped, and a dashboard with an open page.

    python -m tests.bench.observation [--quick] [--rounds 16] [--json FILE]

Two jobs of two workers compute in turns, in blocks of steps; one of them is looked at. Counted is the time of the
processors that all processes of a job use in its blocks, also those that only look; and, because two jobs never use the
same time, that of all processes but the workers alone: what looks asks no worker. --quick is a smoke run which leaves
docs/performance.md as it is.
"""

from __future__ import annotations

import socket
import statistics
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.bench import contenders, report
from tests.bench.contenders import Contender
from tests.bench.intervals import median_interval, ratios
from tests.bench.recovery import MS, say, shown_ratio
from tests.bench.report import Bench, Row, target
from tests.live.dashboard_page import Following, PageClient, address_in

BENCH = Bench("observation")

PLAIN, SEEN = "nobody looks", "metrics, dashboard, a page"
WORKERS = 2
SETTINGS = {"BENCH_MICRO_BATCH": "8", "BENCH_SHARDS": "2"}
"""Some 10 steps a second on 2 cores: what looks costs the more of a step the shorter it is."""
BLOCK_STEPS = 60
"""Some 6 s: what looks does so every second, or every few."""
SCRAPE_S = 5.0
CPU_MAX = 0.01
"""Part of the time that a step uses."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = BENCH.parser("a smoke run", "--quick")
    parser.add_argument("--rounds", type=int, default=16, help="blocks of each job (default %(default)s)")
    options = parser.parse_args(arguments)
    rounds = 2 if options.quick else options.rounds
    with BENCH.directory(writes=not options.quick) as directory:
        cpu_s, others_s, step_s = measure(directory, rounds)
    rows = rows_of(cpu_s, others_s, step_s)
    figures = {"cpu_s": cpu_s, "others_s": others_s, "step_s": step_s}
    BENCH.publish(figures, rows, notes(), f"--rounds {rounds}", to=options.json, writes=not options.quick)
    return 0 if options.quick else len(report.missed(rows)) > 0


ByJob = dict[str, list[float]]


def measure(directory: Path, rounds: int) -> tuple[ByJob, ByJob, ByJob]:
    """By job, for each block: seconds a step of processors, of those without the workers', and of the clock."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    cpu_s: ByJob = {PLAIN: [], SEEN: []}
    others_s: ByJob = {PLAIN: [], SEEN: []}
    step_s: ByJob = {PLAIN: [], SEEN: []}
    with ExitStack() as stack:
        plain = stack.enter_context(contenders.elastic(directory / "plain", WORKERS, name=PLAIN, settings=SETTINGS))
        plain.stand(WORKERS)
        looks = ("--metrics", str(port), "--dashboard")
        seen = stack.enter_context(
            contenders.elastic(directory / "seen", WORKERS, "exact", *looks, name=SEEN, settings=SETTINGS)
        )
        seen.stand(WORKERS)
        stack.enter_context(looking(seen, port))
        for number in range(-1, rounds):  # the first block of each warms up
            for job in (plain, seen) if number % 2 else (seen, plain):
                all_s, workers_s = job.cpu_s(), job.workers_cpu_s()
                first = job.run(BLOCK_STEPS, WORKERS)
                all_s, workers_s = job.cpu_s() - all_s, job.workers_cpu_s() - workers_s
                if number >= 0:
                    cpu_s[job.name].append(all_s / BLOCK_STEPS)
                    others_s[job.name].append((all_s - workers_s) / BLOCK_STEPS)
                    step_s[job.name].append(contenders.step_s(job.stamps(), first, first + BLOCK_STEPS))
                    say(f"block {number + 1}/{rounds} {job.name}: {cpu_s[job.name][-1] * MS:.1f} ms CPU a step")
    return cpu_s, others_s, step_s


@contextmanager
def looking(job: Contender, port: int) -> Iterator[None]:
    """A page that follows the job, and a scraper."""
    found: list[str] = []

    def printed() -> bool:
        found[:] = [address for address in [address_in(job.output)] if address]
        return bool(found)

    job.until("the address of its dashboard", printed)
    page = PageClient(found[0])
    document = page.job()
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(SCRAPE_S):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                answer.read()

    scraping = threading.Thread(target=scrape, daemon=True)
    scraping.start()
    with Following(page, f"{document['boot']}-{document['number']}"):
        try:
            yield
        finally:
            over.set()
            scraping.join()


def rows_of(cpu_s: ByJob, others_s: ByJob, step_s: ByJob) -> list[Row]:
    rows = []
    for name in (PLAIN, SEEN):
        for what, of in (
            ("CPU a step", cpu_s[name]),
            ("CPU a step without the workers'", others_s[name]),
            ("step", step_s[name]),
        ):
            spread = f"{min(of) * MS:.1f} to {max(of) * MS:.1f} ms"
            rows.append(Row(f"{name}: {what}", f"{statistics.median(of) * MS:.1f} ms", spread))
    more_s = [seen - plain for seen, plain in zip(others_s[SEEN], others_s[PLAIN], strict=True)]
    part = median_interval(ratios(more_s, cpu_s[PLAIN]))
    wanted = target(part.median <= CPU_MAX, f"<= {CPU_MAX}")
    rows.append(Row("what looks: part of the CPU of a step", *shown_ratio(part), wanted))
    rows.append(Row(f"CPU: {SEEN} / {PLAIN}", *shown_ratio(median_interval(ratios(cpu_s[SEEN], cpu_s[PLAIN])))))
    return [*rows, Row(f"step: {SEEN} / {PLAIN}", *shown_ratio(median_interval(ratios(step_s[SEEN], step_s[PLAIN]))))]


def notes() -> list[str]:
    """What a reader has to know to judge the table."""
    return [
        "The MLP of 10.0 million float32 parameters with 2 workers, each of which has one shard of "
        f"{SETTINGS['BENCH_MICRO_BATCH']} samples; blocks of {BLOCK_STEPS} steps take turns. CPU is that of all "
        "processes of a job: workers, agent, rendezvous, etcd, the command, and the dashboard.",
        "The cost of observation is the difference between the two jobs in their processes without the workers: "
        "metrics, dashboard and page ask no worker, and the workers of two equal jobs differ by more than this cost.",
        f"The observed job has a scraper every {SCRAPE_S:g} s and a page that follows all events. The CPU time of a "
        "browser that draws the page is not counted.",
    ]


if __name__ == "__main__":
    sys.exit(main())
