"""Options of a benchmark's command line that name some of what it can measure."""

import argparse
from collections.abc import Callable, Iterable


def names_among(known: Iterable[str], separator: str = ";") -> Callable[[str], list[str]]:
    """Type of an argument that is a list of known names; argparse prints them where one is not.

    Args:
        known: names that may be given.
        separator: between two names on the command line.
    """
    everything = list(known)

    def names(text: str) -> list[str]:
        given = text.split(separator)
        unknown = [name for name in given if name not in everything]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"no {', '.join(map(repr, unknown))} among {separator.join(everything)!r}"
            )
        return given

    return names
