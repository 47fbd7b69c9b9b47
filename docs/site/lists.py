"""Lists as GitHub shows them: MkDocs wants four spaces and blank lines where CommonMark does not.

Pages are written for both. Without this, a nested list with two or three spaces, or a list right below a
line of text, would be run together with that text on the site alone.
"""

import logging
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

_PARSER = MarkdownIt("commonmark").enable("table")
_log = logging.getLogger("mkdocs.hooks.lists")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its lists indented for MkDocs."""
    return indent_lists(markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """The page as it is; warns, and so ends a strict build, where GitHub shows other lists."""
    if ":::" not in page.markdown:  # what is generated from docstrings is not on GitHub
        expected = _PARSER.render(page.markdown)
        for tag in ("<li", "<ol", "<ul", "<table", "<h2", "<h3"):
            if expected.count(tag) != html.count(tag):
                _log.warning(
                    "%s has %d %s> on GitHub and %d on the site",
                    *(page.file.src_uri, expected.count(tag), tag, html.count(tag)),
                )
    return html


def indent_lists(text: str) -> str:
    """Markdown of the same meaning with blank lines around lists and four spaces a level.

    Args:
        text: Markdown of a page, or of what a list item contains.
    """
    lines, done, out = text.split("\n"), 0, []
    blocks = [token for token in _PARSER.parse(text) if token.level == 0 and token.nesting >= 0]
    for block in blocks:
        if block.type not in ("bullet_list_open", "ordered_list_open") or block.map is None:
            continue
        start, end = block.map
        while not lines[end - 1].strip():
            end -= 1
        out += [*lines[done:start], *([""] if start > done and lines[start - 1].strip() else [])]
        out += _items("\n".join(lines[start:end]))
        out += [""] if end < len(lines) and lines[end].strip() else []
        done = end
    return "\n".join([*out, *lines[done:]])


def _items(text: str) -> list[str]:
    """Lines of a list, each item with its marker and its content four columns further in."""
    lines, out = text.split("\n"), []
    for item in _PARSER.parse(text):
        if item.type != "list_item_open" or item.level != 1 or item.map is None:
            continue
        start, end = item.map
        content = _content(lines[start:end], item)
        marker = f"{item.info}{item.markup}".ljust(4)
        indented = [f"    {line}" if line else "" for line in indent_lists(content).split("\n")]
        # a paragraph of several blocks ends at a blank line, or the next item would be part of it
        out += [marker + indented[0][4:], *indented[1:], *([""] if "" in indented else [])]
    return out[:-1] if out and not out[-1] else out


def _content(lines: list[str], item: Token) -> str:
    """What a list item contains, without its marker and indentation."""
    first = lines[0].lstrip()
    marker = len(item.info) + len(item.markup)
    text = first[marker:].lstrip()
    margin = len(lines[0]) - len(text)
    rest = [line[min(margin, len(line) - len(line.lstrip())) :] for line in lines[1:]]
    return "\n".join([text, *rest]).rstrip("\n")
