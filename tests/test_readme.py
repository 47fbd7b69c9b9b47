"""What the README shows must work as it stands."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hush

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_lines_of_python_run(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out
    assert "epsilon <= 2.99" in printed
    assert float(printed.split()[-1]) > 0.85


def messages() -> Iterator[str]:
    """All strings in the library that are not docstrings."""
    for path in Path(hush.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                yield node.value


def test_every_name_in_the_readme_and_in_messages_is_there_after_importing_hush() -> None:
    """In a process of its own: other tests import the modules that a name might need."""
    text = "\n".join([README, *messages()])
    names = set(re.findall(r"(?<![\w/.-])hush(?:\.[A-Za-z]\w*)+(?![\w/])", text))
    assert {"hush.data.views.flips_and_shifts", "hush.training.methods.mean.individual_mean"} <= names
    code = (
        "import hush, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try: eval(name)\n"
        "    except AttributeError: print(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *sorted(names)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    for package in (hush, hush.data, hush.training):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            package.nothing  # noqa: B018
