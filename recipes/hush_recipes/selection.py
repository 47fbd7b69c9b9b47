"""Methods of a recipe (`--only`), and its learning rate (`--learning-rates`)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from hush.core.errors import InvalidValue

Item = TypeVar("Item")


def select(items: Mapping[str, Item], only: str) -> dict[str, Item]:
    """The items that are asked for, in their order; all, if none is.

    Args:
        items: by name.
        only: names, with ; between them; what is no name stands for all that have it in theirs.
    """
    parts = [part.strip() for part in only.split(";") if part.strip()]
    chosen = {name for part in parts for name in _matches(items, part)}
    return {name: item for name, item in items.items() if not parts or name in chosen}


def _matches(names: Iterable[str], part: str) -> list[str]:
    matches = [name for name in names if name == part] or [name for name in names if part in name]
    if not matches:
        raise InvalidValue(
            f"nothing here has {part!r} in its name: choose from {'; '.join(names)}, with ; between "
            "them. Leave out --only, and all are run."
        )
    return matches


def one_rate(learning_rates: Sequence[float] | None, default: float) -> float:
    """The learning rate of `--learning-rates` for a recipe that has one, not candidates.

    Raises:
        InvalidValue: more than one value.
    """
    if learning_rates is None:
        return default
    if len(learning_rates) != 1:
        raise InvalidValue(
            f"--learning-rates has {len(learning_rates)} values, and this recipe takes one, because it "
            "does not select among candidates. Pass one value, for example --learning-rates 4."
        )
    return learning_rates[0]
