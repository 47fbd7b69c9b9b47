"""Summary of the API reference: every documented name with the first paragraph of its docstring."""

import inspect
import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

MARK = "<!-- names -->"


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page, with the table in place of the mark."""
    if MARK not in markdown:
        return markdown
    return markdown.replace(MARK, table(Path(config.docs_dir) / "reference"))


def table(folder: Path) -> str:
    """A row for each name of the pages of a folder."""
    rows = ["| name | summary |", "|---|---|"]
    for page in sorted(folder.glob("*.md")):
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), flags=re.MULTILINE):
            summary = (inspect.getdoc(resolve_name(name)) or "").partition("\n\n")[0]
            summary = " ".join(summary.split()).replace("|", r"\|")
            rows.append(f"| [`{name}`]({page.name}#{name}) | {summary} |")
    return "\n".join(rows)
