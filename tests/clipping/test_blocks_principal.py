import pytest

from hush.clipping.blocks import Principal
from hush.core.errors import InvalidValue


def test_it_is_written_as_plain_data_and_read_back() -> None:
    principal = Principal(groups=2, every=50, iterations=5)
    assert Principal.from_plain(principal.to_plain()) == principal


@pytest.mark.parametrize("name", ["groups", "every", "iterations"])
@pytest.mark.parametrize("value", [0, -1, 1.5, float("nan"), "4"])
def test_counts_are_whole_numbers_of_at_least_one(name: str, value: object) -> None:
    with pytest.raises(InvalidValue, match=name):
        Principal(**{name: value})  # type: ignore[arg-type]
