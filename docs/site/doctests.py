"""Doctests of docstrings as blocks of code: Markdown would take their `>>>` for quotations."""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*\n).+)*(?:\n\n>>> .*(?:\n(?!\s*\n).+)*)*", flags=re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts a fence around every doctest before docstrings are rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
