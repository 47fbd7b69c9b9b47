r"""LaTeX of the pages as MathML, which browsers render without scripts or fonts from elsewhere.

`$...$` is a formula in a line, `$$...$$` one of its own; GitHub reads the same marks.
"""

import re
from typing import Any

from latex2mathml.converter import convert

_CODE = re.compile(r"```.*?```|`[^`\n]*`|^(?: {4}|\t)[^\n]*$", flags=re.DOTALL | re.MULTILINE)
_FORMULA = re.compile(
    r"\$\$(?P<block>.+?)\$\$|(?<![\\$\w])\$(?! )(?P<line>[^$\n]+?)(?<! )\$(?![\w$])", re.DOTALL
)
_MARK = re.compile(r"formula(\d+)alumrof")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with a mark for each formula, which Markdown would change otherwise."""
    page.formulas = []

    def mark(match: re.Match[str]) -> str:
        display = "inline" if match["block"] is None else "block"
        page.formulas.append(convert((match["block"] or match["line"]).strip(), display=display))
        return f"formula{len(page.formulas) - 1}alumrof"

    done, out = 0, []
    for code in _CODE.finditer(markdown):
        out += [_FORMULA.sub(mark, markdown[done : code.start()]), code[0]]
        done = code.end()
    return "".join([*out, _FORMULA.sub(mark, markdown[done:])])


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """The page with its formulas."""
    return _MARK.sub(lambda match: page.formulas[int(match[1])], html)
