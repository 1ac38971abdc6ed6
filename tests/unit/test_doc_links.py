"""Links of the pages lead to files that are there, and to headings of them; pages have all verbs and choices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic.cli import MODULES
from elastic.preemption.selection import Provider

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])


def prose(page: Path) -> str:
    """Without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchor(heading: str) -> str:
    """As GitHub makes it from a heading."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"[`*]", "", heading)).strip().lower()
    return re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")


def broken(page: Path) -> list[str]:
    links = (link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if not link.startswith(("http", "mailto:")))
    found = []
    for link in links:
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (heading and heading not in anchors(target)):
            found.append(link)
    return found


def anchors(page: Path) -> set[str]:
    """Of its headings, and those that it names itself."""
    text = prose(page)
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)} | set(
        re.findall(r'<a name="([^"]+)"', text)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `name` of it\n[here](#a-name-of-it) [there](#nowhere) [a file](gone.txt) [web](https://x.org/#y)\n"
    )
    assert broken(page) == ["#nowhere", "gone.txt"]


def test_the_glossary_is_alphabetical_and_names_a_page_for_each_word() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    words = [row[0].casefold() for row in rows]
    assert words == sorted(set(words))
    assert [row for row in rows if len(row) != 3 or not re.fullmatch(r"\[[^\]]+\]\([^)]+\)", row[2])] == []


@pytest.mark.parametrize("verb", MODULES)
def test_each_verb_is_on_a_page(verb: str) -> None:
    shown = re.compile(rf"\belastic {verb}\b")
    assert any(shown.search(page.read_text(encoding="utf-8")) for page in PAGES if page.name != "CHANGELOG.md")


@pytest.mark.parametrize("page", ["run.md", "spot.md"])
def test_each_choice_of_a_source_of_notices_is_on_the_pages_that_list_them(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    choices = [*Provider, "slurm:requeue", "file:PATH"]
    assert [choice for choice in choices if f"`{choice}`" not in text] == []
