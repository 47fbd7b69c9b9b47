r"""LaTeX of the pages, rendered by the KaTeX in `katex/` (version 0.19.1, fonts as woff2 only).

`$...$` is a formula in a line, `$$...$$` a displayed formula; GitHub reads the same marks. An equation
with `\tag{n}` has the anchor `#eq-n`. Only pages with formulas load the script.
"""

import re
from html import escape
from typing import Any

_CODE = re.compile(r"```.*?```|`[^`\n]*`|^(?: {4}|\t)[^\n]*$", flags=re.DOTALL | re.MULTILINE)
_FORMULA = re.compile(
    r"\$\$(?P<block>.+?)\$\$|(?<![\\$\w])\$(?! )(?P<line>[^$\n]+?)(?<! )\$(?![\w$])", re.DOTALL
)
_MARK = re.compile(r"formula(\d+)alumrof")


def formulas(markdown: str) -> list[tuple[str, bool]]:
    """LaTeX of each formula outside of code, and whether it is displayed."""
    return [
        ((match["block"] or match["line"]).strip(), match["block"] is not None)
        for text, code in _parts(markdown)
        if not code
        for match in _FORMULA.finditer(text)
    ]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with a mark for each formula, which Markdown would change otherwise."""
    page.formulas = formulas(markdown)
    number = iter(range(len(page.formulas)))
    return "".join(
        text if code else _FORMULA.sub(lambda _: f"formula{next(number)}alumrof", text)
        for text, code in _parts(markdown)
    )


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """The page with an element for each formula."""
    return _MARK.sub(lambda match: _element(*page.formulas[int(match[1])]), html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The page with the scripts that render its formulas."""
    if not page.formulas:
        return output
    root = "../" * page.file.dest_uri.count("/") + "site/"
    style = f'<link rel="stylesheet" href="{root}katex/katex.min.css">'
    scripts = "".join(
        f'<script src="{root}{name}"></script>' for name in ("katex/katex.min.js", "mathematics.js")
    )
    return output.replace("</head>", style + "</head>").replace("</body>", scripts + "</body>")


def _parts(markdown: str) -> list[tuple[str, bool]]:
    """The page in order, cut into text and code."""
    parts, done = [], 0
    for code in _CODE.finditer(markdown):
        parts += [(markdown[done : code.start()], False), (code[0], True)]
        done = code.end()
    return [*parts, (markdown[done:], False)]


def _element(formula: str, displayed: bool) -> str:
    tag = re.search(r"\\tag\{(\w+)\}", formula)
    anchor = f' id="eq-{tag[1]}"' if tag else ""
    kind = "formula displayed" if displayed else "formula"
    return f'<span class="{kind}"{anchor}>{escape(formula)}</span>'
