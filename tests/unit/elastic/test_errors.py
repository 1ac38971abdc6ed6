from __future__ import annotations

import inspect
import re
from pathlib import Path

from elastic import errors

DOCS = Path(__file__).parents[3] / "docs"
CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]


def drawn() -> dict[str, str]:
    """Class -> parent, as the picture in the module's docstring has them."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        name = line.lstrip("│├└─ ").split(" ")[0]
        if name not in vars(errors):
            continue
        depth = (len(line) - len(line.lstrip("│├└─ "))) // 4
        path[depth:] = [name]
        if depth:
            parents[name] = path[depth - 1]
    return parents


def test_the_picture_in_the_docstring_is_the_class_tree() -> None:
    real = {cls.__name__: cls.__base__.__name__ for cls in CLASSES if cls is not errors.ElasticError and cls.__base__}
    assert drawn() == real


def test_every_error_says_what_to_do_next() -> None:
    assert [cls.__name__ for cls in CLASSES if not vars(cls).get("__doc__")] == []


def test_every_mistake_of_a_script_has_a_row_in_the_documentation() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8") + (DOCS / "ddp.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^(?:\| `|  ok +)(\w+)(?:` \|)? ", text, re.MULTILINE))
    assert {cls.__name__ for cls in CLASSES if cls.__base__ is errors.UsageError} <= rows


def test_exit_codes_are_those_documented() -> None:
    assert [int(code) for code in errors.ExitCode] == [0, 1, 2, 3, 4, 5, 6, 75, 130, 143]


def test_an_error_carries_what_its_handler_needs() -> None:
    assert errors.StoreUnavailable("late", ambiguous=True).ambiguous
    assert not errors.StoreUnavailable("down").ambiguous
    assert errors.RingBroken("eof", peer="n.1.0").peer == "n.1.0"
    failed = errors.BuildFailed(unreachable=["n.1.0", "n.2.0"])
    assert failed.unreachable == ("n.1.0", "n.2.0")
    assert "n.1.0, n.2.0" in str(failed)
