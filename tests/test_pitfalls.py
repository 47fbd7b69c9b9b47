"""Every pitfall names tests, and they are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "pitfalls.md").read_text()
TESTS = (ROOT / "tests" / "pitfalls.md").read_text()
GRADES = ("Breaks the guarantee", "Weakens the guarantee", "Costs accuracy", "Causes confusion")
IMPLEMENTATIONS = "Mistakes in implementations"
_TABLE = PAGE.partition(f"\n## {IMPLEMENTATIONS}\n")[2]
ENTRIES = {
    *re.findall(r"^### (.+)$", PAGE, flags=re.MULTILINE),
    *re.findall(r"^\| (?!mistake )([^|]+?) \|", _TABLE, flags=re.MULTILINE),
}
ROWS = re.findall(r"^\| (?!entry )(.+?) \| (.+) \|$", TESTS, flags=re.MULTILINE)


def named(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`([\w/]+\.py)::(test_\w+)`", text)


def missing(tests: list[tuple[str, str]]) -> list[str]:
    def exists(file: str, test: str) -> bool:
        path = ROOT / "tests" / file
        return path.is_file() and f"\ndef {test}(" in path.read_text()

    return [f"{file}::{test}" for file, test in tests if not exists(file, test)]


def test_every_test_that_is_named_is_there() -> None:
    assert len(named(TESTS)) >= 60
    assert not missing(named(TESTS))
    # written without its file, a name would not be checked
    assert len(re.findall(r"\btest_\w+(?!\.py|\w)", TESTS)) == len(named(TESTS))


@pytest.mark.parametrize("row", ROWS, ids=[title for title, _ in ROWS])
def test_every_entry_names_a_test(row: tuple[str, str]) -> None:
    assert named(row[1])


def test_every_entry_has_a_row_of_tests() -> None:
    assert len(ENTRIES) > 50
    assert len({title for title, _ in ROWS}) == len(ROWS)
    assert {title for title, _ in ROWS} == ENTRIES


def test_the_grades_are_in_order() -> None:
    headings = tuple(re.findall(r"^## (.+)$", PAGE, flags=re.MULTILINE))
    assert headings == ("Ten common mistakes", *GRADES, IMPLEMENTATIONS)
