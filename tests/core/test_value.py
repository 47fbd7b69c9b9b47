import pytest

from hush.core.errors import InvalidValue
from hush.core.value import Range, check_count


def test_limits_are_told_apart() -> None:
    open_ended = Range(above=0, below=1, why="w", example=0.5)
    closed = Range(at_least=0, at_most=1, why="w", example=0.5)
    assert closed.check("x", 0) == 0.0
    assert closed.check("x", 1) == 1.0
    for end in (0, 1):
        with pytest.raises(InvalidValue, match="> 0 and < 1"):
            open_ended.check("x", end)


@pytest.mark.parametrize("bad", [-1, 0.5, "3", None, float("nan"), float("inf"), True])
def test_a_count_is_a_whole_number(bad: object) -> None:
    with pytest.raises(InvalidValue, match="whole number >= 0"):
        check_count("steps", bad, "steps are counted")
    assert [check_count("steps", good, "steps are counted") for good in (0, 3.0, 10**12)] == [
        0,
        3,
        10**12,
    ]
    with pytest.raises(InvalidValue, match="whole number >= 4 and <= 1e"):
        check_count("steps", 3, "steps are counted", at_least=4)
