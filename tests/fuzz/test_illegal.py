"""Random mistakes are refused by name, before anything runs; the number in a test's name makes it
again."""

from pathlib import Path
from random import Random

import pytest

from hush.core.errors import HushError
from tests.fuzz.mistake import Mistake, charges
from tests.fuzz.wrong_arguments import argument, records
from tests.fuzz.wrong_files import file, plain, resumed
from tests.fuzz.wrong_settings import combination, setting, without_example

QUICK, ALL = range(50), range(1000)
KINDS = (setting, setting, combination, argument, argument, records, plain, file, resumed)


@pytest.mark.parametrize("seed", QUICK)
def test_a_mistake_is_refused_by_name(seed: int, tmp_path: Path) -> None:
    is_refused(mistake(seed, tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ALL)
def test_any_mistake_is_refused_by_name(seed: int, tmp_path: Path) -> None:
    is_refused(mistake(seed, tmp_path), tmp_path)


def test_every_part_of_the_library_is_tried() -> None:
    assert without_example() == set()


def mistake(seed: int, folder: Path) -> Mistake:
    """The mistake of that number, the same one every time; whatever it writes goes to the folder."""
    pick = Random(seed)
    return pick.choice(KINDS)(pick, folder)


def is_refused(wrong: Mistake, folder: Path) -> None:
    before = charges(folder)
    with pytest.raises(HushError) as raised:
        wrong.attempt()
    # long values are shortened
    assert wrong.named[:100] in str(raised.value), wrong.what
    assert charges(folder) == before, wrong.what
    assert not list(folder.rglob("*.safetensors")), wrong.what
