"""What is imported for a script before it runs, decided from its text alone."""

from __future__ import annotations

import textwrap

import pytest

from elastic.agent.worker.import_scan import Import, Program, leading_imports, program_of
from elastic.errors import ColdStart


def chosen(*texts: str) -> list[str]:
    sources = [(f"{n}.py", textwrap.dedent(text)) for n, text in enumerate(texts)]
    return [f"{one.module} {','.join(one.names)}".strip() for one in leading_imports(sources)]


def test_imports_at_the_top_are_taken_in_their_order_and_once() -> None:
    text = '''
    """What this trains."""
    from __future__ import annotations
    import argparse, json as j
    import numpy as np
    from torch.utils.data import DataLoader, Dataset
    import argparse
    '''
    wanted = ["__future__ annotations", "argparse", "json", "numpy", "torch.utils.data DataLoader,Dataset"]
    assert chosen(text) == wanted


@pytest.mark.parametrize(
    "statement",
    [
        "sys.path.insert(0, '..')",
        "try:\n    import apex\nexcept ImportError:\n    apex = None",
        "if sys.platform == 'linux':\n    import torch",
        "job = start()",
        "class Net(base()): pass",
        "@cached\ndef f(): pass",
    ],
)
def test_nothing_is_taken_after_a_statement_that_may_change_what_an_import_does(statement: str) -> None:
    assert chosen(f"import sys\n{statement}\nimport torch") == ["sys"]


def test_a_plain_function_between_two_imports_changes_nothing() -> None:
    assert chosen("import sys\ndef main():\n    import torch\n    sys.exit()\nimport json") == ["sys", "json"]


def test_relative_imports_and_stars_name_nothing_that_could_be_taken() -> None:
    assert chosen("from . import model\nfrom .data import load\nfrom torch.nn import *") == ["torch.nn"]


@pytest.mark.parametrize(
    "change",
    [
        "os.environ['OMP_NUM_THREADS'] = '1'",
        "os.environ.setdefault('OMP_NUM_THREADS', '1')",
        "os.environ.update(OMP_NUM_THREADS='1')",
        "del environ['MKL_NUM_THREADS']",
        "os.putenv('A', 'b')",
        "configure(os.environ)",
        "if True:\n    os.environ['A'] = 'b'",
        "def prepare():\n    os.environ['A'] = 'b'\nprepare()",
        "dotenv.load_dotenv()",
    ],
)
def test_a_change_of_the_environment_before_an_import_asks_for_a_cold_start(change: str) -> None:
    with pytest.raises(ColdStart, match=r"0\.py:\d+ may change the environment"):
        chosen(f"import os, dotenv\nfrom os import environ\n{change}\nimport torch")
    with pytest.raises(ColdStart, match=r"0\.py:\d+ may change the environment"):
        chosen(f"import os\n{change}", "import torch")
    assert chosen(f"import os\nimport torch\n{change}") == ["os", "torch"]


@pytest.mark.parametrize(
    "reading", ["slot = os.environ['ELASTIC_SLOT']", "home = os.environ.get('HOME')", "on = 'DEBUG' in os.environ"]
)
def test_reading_the_environment_is_no_change(reading: str) -> None:
    assert chosen(f"import os\n{reading}\nimport torch") == ["os"]


def test_an_import_inside_a_function_is_done_too_late_to_count() -> None:
    assert chosen("import torch\nimport os\ndef main():\n    os.environ['A'] = 'b'\n    import json") == ["torch", "os"]


def test_what_does_not_compile_is_left_to_a_cold_start_to_show() -> None:
    with pytest.raises(ColdStart, match=r"0\.py does not compile"):
        chosen("import torch\nthis is no python")
    with pytest.raises(ColdStart, match="does not compile"):
        chosen("\0")


def test_the_outermost_package_decides_where_a_module_comes_from() -> None:
    assert Import("torch.utils.data", ("Dataset",)).outermost == "torch"


def test_scripts_and_modules_are_told_from_other_commands() -> None:
    assert program_of(("python", "train.py", "--lr", "1")) == Program("train.py", False, ("--lr", "1"))
    assert program_of(("python", "-m", "pkg.train", "-x")) == Program("pkg.train", True, ("-x",))
    for command in (("python", "-c", "pass"), ("python", "-u", "train.py"), ("python", "-m"), ("true",)):
        with pytest.raises(ColdStart, match="neither"):
            program_of(command)
