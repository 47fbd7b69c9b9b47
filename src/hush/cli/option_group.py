"""Commands whose options are the fields of a dataclass: several commands may share one."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def options_of(kind: type[T]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a command whose first parameter is a `kind`: typer sees its fields as options.

    Args:
        kind: A dataclass; its fields are annotated as typer has it and have defaults. A field whose
            metadata has `option` False is no option.

    Returns:
        A function of the fields and of the command's other parameters.
    """
    hints = get_type_hints(kind, include_extras=True)
    grouped = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)  # type: ignore[arg-type]
        if field.metadata.get("option", True)
    ]
    names = [parameter.name for parameter in grouped]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *others = inspect.signature(command).parameters.values()

        @wraps(command)
        def with_options(**passed: Any) -> None:
            group = kind(**{name: passed.pop(name) for name in names})
            command(group, **passed)

        rest = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in others]
        with_options.__signature__ = inspect.Signature([*grouped, *rest])  # type: ignore[attr-defined]
        with_options.__annotations__ = {each.name: each.annotation for each in [*grouped, *rest]}
        return with_options

    return decorate
