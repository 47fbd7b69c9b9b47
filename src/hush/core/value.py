"""Base of the immutable values: fields are checked when made, and can be written as plain data."""

from dataclasses import MISSING, dataclass, fields
from typing import Any, NoReturn, Self, SupportsIndex

from hush.core.errors import InvalidPlan, Unsupported, short_repr
from hush.core.ranges import with_article


@dataclass(frozen=True, kw_only=True)
class Value:
    """A frozen value whose fields lie in their declared ranges."""

    def __post_init__(self) -> None:
        for field in fields(self):
            allowed = field.metadata.get("range")
            if allowed is not None:
                object.__setattr__(
                    self, field.name, allowed.check(field.name, getattr(self, field.name))
                )

    def to_plain(self) -> dict[str, Any]:
        """The fields as plain data: what TOML and JSON can hold."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _plain(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        """The value that `to_plain` wrote."""
        if not isinstance(plain, dict):
            raise InvalidPlan(f"{short_repr(plain)} is no table of the settings of {cls.__name__}.")
        names = [field.name for field in fields(cls)]
        needed = [field.name for field in fields(cls) if field.default is MISSING]
        for key in plain:
            if key not in names:
                raise InvalidPlan(
                    f"{short_repr(key)} is not a setting of {cls.__name__}{_listed(names)}", key=key
                )
        for name in needed:
            if name not in plain:
                raise InvalidPlan(f"{name!r} of {cls.__name__} is missing{_listed(names)}", key=name)
        return cls(**plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Value):
        return value.to_plain()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _listed(names: list[str]) -> str:
    return f"; it has {', '.join(names)}." if names else "; it has none."


class SingleOwner:
    """Refuses to be copied or pickled: `copy.copy`, `copy.deepcopy` and `pickle` all ask here."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise Unsupported(
            f"{with_article(type(self).__name__)} cannot be copied or pickled: it holds a ledger's open "
            "file and a run's randomness, and two owners would charge, or close, the same one. Copy the "
            "model alone and make a new PrivateStep for the copy with ledger=step.ledger, so that both "
            "charges add up; or load state_dict() into a new PrivateStep with that ledger."
        )
