"""What the README shows must work as it stands."""

import re
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


def test_the_table_lists_the_parts_there_are() -> None:
    for kind in ("sampling", "clipping", "noise", "release"):
        field = hush.Plan.__dataclass_fields__[kind]
        (row,) = re.findall(rf"^\| {kind} \|.*$", README, flags=re.MULTILINE)
        kinds = field.type.kinds.values()  # type: ignore[union-attr]
        ours = {each.__name__ for each in kinds if each.__module__.startswith("hush.")}
        assert set(re.findall(r"`(\w+)\(", row)) == ours
