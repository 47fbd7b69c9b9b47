"""The site of docs/: its navigation, reference, pictures, and the hooks that build it."""

import importlib.util
import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import yaml
from markdown_it import MarkdownIt

import hush

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
COMMONMARK = MarkdownIt("commonmark").enable("table")
DIRECTIVES = re.findall(
    r"^::: ([\w.]+)$",
    "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md")),
    flags=re.MULTILINE,
)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entries(tree: Any) -> list[str]:
    """Files of a navigation, in order."""
    if isinstance(tree, str):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [page for part in parts for page in entries(part)]


def test_every_page_is_in_the_navigation_once() -> None:
    pages = entries(SETTINGS["nav"])
    beside = {"SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"}  # added by docs/site/pages.py
    notebooks = {f"notebooks/{path.stem}.md" for path in NOTEBOOKS}  # docs/site/notebooks.py
    written = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert set(pages) == written | beside | notebooks
    assert len(pages) == len(set(pages))


def test_nothing_is_fetched_from_elsewhere() -> None:
    assert SETTINGS["theme"]["font"] is False
    for style in (DOCS / "site").rglob("*.css"):
        text = style.read_text()
        assert "@import" not in text
        for name in re.findall(r"url\(([^)]*)\)", text):
            assert (style.parent / name).is_file()
    for page in DOCS.rglob("*.md"):
        assert not re.findall(r"!\[[^]]*\]\(https?:|<(?:script|img|link|iframe)\b", page.read_text()), (
            page
        )


def test_the_reference_has_every_exported_name() -> None:
    assert {f"hush.{name}" for name in hush.__all__} - {"hush.errors", "hush.PrivacyWarning"} <= set(
        DIRECTIVES
    )
    classes = [value for value in vars(hush.errors).values() if isinstance(value, type)]
    assert {f"hush.errors.{each.__name__}" for each in classes} <= set(DIRECTIVES)


def test_the_summary_of_the_reference_has_every_name() -> None:
    reference = load(DOCS / "site" / "reference.py")
    rows = reference.table(DOCS / "reference").split("\n")[2:]
    assert len(rows) == len(DIRECTIVES)
    assert all(row.endswith(". |") for row in rows), "a docstring begins with a sentence"
    assert reference.MARK in (DOCS / "reference" / "README.md").read_text()


@pytest.mark.parametrize("page", [*(DOCS / "reference").glob("*.md")], ids=lambda page: page.stem)
def test_a_page_of_the_reference_has_examples_and_text_for_each_name(page: Path) -> None:
    text = page.read_text()
    written = set(re.findall(r"\w+", re.sub(r"^:::.*$", "", text, flags=re.MULTILINE)))
    names = re.findall(r"^::: [\w.]*\b(\w+)$", text, flags=re.MULTILINE)
    assert set(names) <= written
    assert "```python\n" in text or not names
    assert {"## Raises", "## References"} <= {*text.split("\n")} or page.stem in ("README", "errors")


@pytest.mark.parametrize("name", DIRECTIVES)
def test_a_name_of_the_reference_has_a_docstring(name: str) -> None:
    assert resolve_name(name).__doc__


@pytest.mark.parametrize("page", [*DOCS.rglob("*.md"), *ROOT.glob("*.md")], ids=lambda page: page.name)
def test_lists_are_indented_without_a_change_of_meaning(page: Path) -> None:
    text = page.read_text()
    indented = load(DOCS / "site" / "lists.py").indent_lists(text)

    def skeleton(markdown: str) -> list[tuple[str, str, int]]:
        """Blocks in order; whether a list is tight, which is spacing alone, is left out."""
        tokens = COMMONMARK.parse(markdown)
        return [(token.type, " ".join(token.content.split()), token.level) for token in tokens]

    assert skeleton(indented) == skeleton(text)


def test_nested_lists_get_four_spaces_and_blank_lines() -> None:
    indent_lists = load(DOCS / "site" / "lists.py").indent_lists
    assert indent_lists("text\n- a\n  - b\n- c\nend?\n\nnext") == (
        "text\n\n-   a\n\n    -   b\n\n-   c\n    end?\n\nnext"
    )
    assert indent_lists("9. a\n\n       code\n10. b") == "9.  a\n\n        code\n\n10. b"


def test_formulas_are_found_outside_of_code_and_keep_their_place() -> None:
    mathematics = load(DOCS / "site" / "mathematics.py")
    text = "a $x_1$ and `$HOME`\n\n$$y < 1 \\tag{2}$$\n\n    $ hush train $\n\ncosts \\$5 or $6"
    page = SimpleNamespace()
    marked = mathematics.on_page_markdown(text, page)
    assert page.formulas == [("x_1", False), ("y < 1 \\tag{2}", True)]
    assert mathematics.on_page_content(marked, page) == text.replace(
        "$x_1$", '<span class="formula">x_1</span>'
    ).replace("$$y < 1 \\tag{2}$$", '<span class="formula displayed" id="eq-2">y &lt; 1 \\tag{2}</span>')


@pytest.mark.skipif(shutil.which("node") is None, reason="KaTeX runs in node")
def test_katex_renders_every_formula() -> None:
    formulas = load(DOCS / "site" / "mathematics.py").formulas
    found = [
        [str(page.relative_to(ROOT)), *formula]
        for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]
        for formula in formulas(page.read_text())
    ]
    script = """
        const katex = require(process.argv[1])
        for (const [page, formula, displayMode] of JSON.parse(require("fs").readFileSync(0)))
          try { katex.renderToString(formula, { displayMode, strict: "error" }) }
          catch (error) { console.log(`${page}: ${formula}: ${error.message}`) }
    """
    node = [shutil.which("node") or "", "-e", script, str(DOCS / "site" / "katex" / "katex.min.js")]
    done = subprocess.run(node, input=json.dumps(found), capture_output=True, text=True, check=True)
    assert len(found) > 2000
    assert done.stdout == ""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_have_outputs_and_are_small(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    printed = "".join("".join(output.get("text", [])) for output in outputs)
    assert "epsilon <= " in printed
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert path.stat().st_size < 100_000
    assert "/tmp" not in printed


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if path.stem == "finetune":
        pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HUSH_FAST", "1")
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, object] = {}
    threads = torch.get_num_threads()
    try:
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]), names)
    finally:
        torch.set_num_threads(threads)
    assert "epsilon <= " in capsys.readouterr().out


def test_the_gallery_is_what_its_script_writes() -> None:
    gallery = load(DOCS / "site" / "gallery.py")
    assert gallery.PAGE.read_text() == gallery.page()
    names = {name for figures in gallery.PAPERS.values() for name in figures}
    assert {path.stem for path in (DOCS / "gallery").glob("*.png")} == names
    assert all(path.stat().st_size < 60_000 for path in (DOCS / "gallery").glob("*.png"))


def test_guides_rank_above_measurements_and_proofs() -> None:
    boost = load(DOCS / "site" / "search.py").boost
    assert boost("own-loop.md") > boost("results/step.md") > boost("guarantees/tape.md")
    assert boost("mechanisms/dpsur.md") == boost("first-steps.md")


@pytest.mark.parametrize(
    "words", ["batchnorm", "ghost clipping", "gradient accumulation", "hyperparameter", "lora", "fsdp"]
)
def test_a_guide_has_the_words_that_people_search_for(words: str) -> None:
    assert [page.name for page in DOCS.glob("*.md") if words in page.read_text().lower()]


@pytest.mark.slow  # dictionaries differ between systems
@pytest.mark.skipif(shutil.which("hunspell") is None, reason="no spelling dictionary")
def test_words_are_spelled_as_in_the_dictionary_or_the_list() -> None:
    spelling = load(DOCS / "site" / "spelling.py")
    assert spelling.unknown() == {}, "correct the words, or add them to docs/site/words.txt"


@pytest.mark.parametrize("page", [*DOCS.rglob("*.md"), *ROOT.glob("*.md")], ids=lambda page: page.name)
def test_anchors_of_links_are_headings(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text())
    for target, anchor in links:
        text = (page.parent / target if target else page).read_text()
        assert anchor in anchors(text), f"{target}#{anchor}"


def anchors(markdown: str) -> set[str]:
    """Anchors of the headings, names of the reference, and numbered equations of a page."""
    headings = [
        following.content
        for token, following in pairwise(COMMONMARK.parse(markdown))
        if token.type == "heading_open"
    ]
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)|[`*$]", r"\1", heading).lower() for heading in headings]
    slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip()) for title in titles}
    names = re.findall(r"^::: ([\w.]+)$", markdown, flags=re.MULTILINE)
    return slugs | {f"eq-{number}" for number in re.findall(r"\\tag\{(\w+)\}", markdown)} | {*names}


def test_pictures_are_what_the_script_draws() -> None:
    folder = DOCS / "pictures"
    drawn = {f"{name}.svg": draw() for name, draw in load(folder / "draw.py").PICTURES.items()}
    assert {path.name for path in folder.glob("*.svg")} == set(drawn)
    for name, text in drawn.items():
        assert (folder / name).read_text() == text
        assert "prefers-color-scheme: dark" in text
        assert ElementTree.fromstring(text).find("{http://www.w3.org/2000/svg}title") is not None
