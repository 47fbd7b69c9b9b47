"""Pages of the repository's root on the site, links between pages, and no script from elsewhere."""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

OUTSIDE = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Files beside docs/ that are pages too."""

_RECIPE = re.compile(r"\]\(\.\./(recipes/[\w/]+\.py)\)")
_ELSEWHERE = "https://unpkg.com/iframe-worker/shim"
_log = logging.getLogger("mkdocs.hooks.pages")


def on_files(files: Any, config: Any) -> Any:
    """All pages, with those of the repository's root."""
    docs = Path(config.docs_dir)
    root = docs.parent
    for name in OUTSIDE:
        # there a page is docs/page.md, here page.md
        content = (root / name).read_text().replace("](docs/", "](").replace("](README.md", "](index.md")
        files.append(File.generated(config, name, content=content))
    for recipe in {
        match[1] for file in docs.glob("*.md") for match in _RECIPE.finditer(file.read_text())
    }:
        files.append(File.generated(config, _code(recipe), content=(root / recipe).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page, with links that lead to pages of the site, and titles in place of files' names."""
    docs, here = Path(config.docs_dir), Path(page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match["text"], match["target"], match["anchor"] or ""
        name = posixpath.normpath(here / target)
        if name.startswith("../recipes/"):
            return f"[{text}]({posixpath.relpath(_code(name), here)})"
        if name.removeprefix("../").startswith("examples/"):  # of a clone, and not of the site
            return text if text.startswith("`") else f"{text} (`{name.removeprefix('../')}`)"
        if name.lstrip("./") in OUTSIDE:  # beside docs/ there, here a page like any other
            name = name.lstrip("./")
            target = posixpath.relpath(name, here)
        source = docs.parent / name if name in OUTSIDE else docs / name
        if text.endswith((".md", "/")) and source.is_file():
            text = source.read_text().partition("\n")[0].removeprefix("# ")
        return f"[{text}]({target}{anchor})"

    return re.sub(
        r"\[(?P<text>[^]\n]+)\]\((?P<target>[\w./-]+\.(?:md|py))(?P<anchor>#[^)]*)?\)", link, markdown
    )


def _code(recipe: str) -> str:
    """Name on the site of a recipe's code, which browsers show as text."""
    return "code/" + recipe.partition("hush_recipes/")[2].removesuffix(".py").replace("/", "-") + ".txt"


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """The page, with a link wherever a docstring names a page of docs/."""
    here = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        target = posixpath.relpath(match[1], here or ".")
        return f'<a href="{target}.html">{match[0]}</a>'

    return re.sub(r"(?<![\w/\"])docs/([\w/-]+)\.md\b", link, html) if "doc-object" in html else html


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The page, with our own script in place of the one that Material fetches for search from the disk.

    A warning, which ends a strict build, where anything else would be fetched.
    """
    root = "../" * page.file.dest_uri.count("/")
    own = output.replace(_ELSEWHERE, f"{root}site/search-from-disk.js")
    for fetched in re.findall(r'(?:\bsrc=|<link [^>]*href=)"?(?:https?:)?//[^" >]*', own):
        _log.warning("%s would fetch %s", page.file.src_uri, fetched)
    return own


def on_post_template(output_content: str, **_: Any) -> str:
    """The page for what is not found, likewise; a server shows it at any depth."""
    return output_content.replace(_ELSEWHERE, "/site/search-from-disk.js")
