"""Code, names and links of the README and of the how-to pages."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hush

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
MANUAL = [*PAGES, ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"]
HOW_TO = (
    *(
        "command-line",
        "who-is-protected",
        "data",
        "own-data",
        "models",
        "class-imbalance",
        "batches",
        "plans",
        "own-loop",
        "distributed",
        "pate",
    ),
    *("statistics", "mechanisms/README", "sklearn", "tune", "finetune", "logging", "lightning"),
    *("transformers", "first-steps", "concepts", "from-opacus", "from-jax-privacy", "resume"),
    *("audit", "report", "ten-minutes", "choosing", "several-models", "federated"),
)
PEERS = {"from-opacus": "opacus", "from-jax-privacy": "jax_privacy"}
"""Pages that show a peer's code beside ours, in blocks marked `py`, which are not run."""
OF_SCRIPTS = "distributed"
"""Page whose blocks are scripts for several processes: tests/training/distributed/test_launchers.py."""


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def test_the_lines_of_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(README)
    exec(code, {})
    printed = capsys.readouterr().out
    assert "epsilon <= 2.99" in printed
    assert float(printed.split()[-1]) > 0.85


@pytest.mark.filterwarnings("ignore:.*:Warning:lightning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:Warning")
@pytest.mark.parametrize(
    "page",
    [each for each in PAGES[1:] if blocks(each) and each.stem != OF_SCRIPTS],
    ids=lambda page: page.stem,
)
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in blocks(page):
        exec(code, names)
    printed = capsys.readouterr().out
    assert "epsilon <=" in printed
    if page.parent.name == "reference":  # a comment of a whole line is output
        lines = re.findall(r"^# (.*)$", "\n".join(blocks(page)), flags=re.MULTILINE)
        assert " ".join(lines).split() == printed.split()


def test_the_plan_file_that_is_shown_is_a_plan(tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "docs" / "plans.md", "toml")
    (tmp_path / "plan.toml").write_text(text)
    assert hush.core.plan.read_plan(tmp_path / "plan.toml").clipping.sensitivity(650)


def test_all_python_is_in_blocks_that_run() -> None:
    """A block marked as plain text would not be checked."""
    for page in PAGES:
        marks = re.findall(r"^```(\w*)\n.*?^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert set(marks) <= {"python", "toml"} | ({"py"} if page.stem in PEERS else set()), page
    for name, library in PEERS.items():
        assert all(library in code for code in blocks(ROOT / "docs" / f"{name}.md", "py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_code_fit_on_a_page(page: Path) -> None:
    lines = [
        line
        for mark in ("python", "py", "toml")
        for code in blocks(page, mark)
        for line in code.split("\n")
    ]
    assert [line for line in lines if len(line) > 88] == []


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 100
    index = (ROOT / "docs" / "README.md").read_text()
    for name in HOW_TO:
        assert f"(docs/{name}.md)" in text
        assert f"({name}.md)" in index
    assert "(docs/pitfalls.md)" in text
    assert "(SECURITY.md)" in text
    results = (ROOT / "docs" / "results" / "README.md").read_text()
    for page in (ROOT / "docs" / "results").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in results


@pytest.mark.parametrize("page", MANUAL, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", MANUAL, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page: Path) -> None:
    paths = re.findall(
        r"(?<![\w/])((?:src|tests|recipes|benchmarks|examples)/[\w/]+\.py)", page.read_text()
    )
    assert [path for path in paths if not (ROOT / path).exists()] == []


def messages() -> Iterator[str]:
    """All strings in the library that are not docstrings."""
    for path in Path(hush.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                yield node.value


def test_every_name_in_pages_and_in_messages_is_there_after_importing_hush() -> None:
    """In a process of its own: other tests import the modules that a name might need."""
    pages = [page.read_text() for page in MANUAL if page.parent in (ROOT, ROOT / "docs")]
    text = re.sub(r"^from hush.*", "", "\n".join([*pages, *messages()]), flags=re.MULTILINE)
    names = set(re.findall(r"(?<![\w/.-])hush(?:\.[A-Za-z]\w*)+(?![\w/])", text)) - {"hush.json"}
    names.discard("hush.training.methods.selective")  # imported by name, as the runner of a rule
    assert {"hush.data.flips_and_shifts", "hush.individual_rdp"} <= names
    code = (
        "import hush, sys\n"
        "assert 'torch' not in sys.modules and 'scipy' not in sys.modules\n"
        "for name in sys.argv[1:]:\n"
        "    try: eval(name)\n"
        "    except AttributeError: print(name)\n"
    )
    exported = {f"hush.{name}" for name in hush.__all__}
    done = subprocess.run(
        [sys.executable, "-c", code, *sorted(names | exported)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []


def test_bounds_of_attacks_in_ten_minutes_are_rounded_up() -> None:
    page = ROOT / "docs" / "ten-minutes.md"
    rows = re.findall(
        r"^\| ([\d.]+) \| ([\d.]+)% \| ([\d.]+)% \|$", page.read_text(), flags=re.MULTILINE
    )
    assert len(rows) == 4
    plan = hush.plans.dpsgd(rate=0.25, clip_norm=1.0, multiplier=1.0)
    for epsilon, right, found in rows:
        budget = hush.Budget(epsilon=float(epsilon), delta=1e-5)
        attacker = hush.Attacker({hush.calibrate(plan, budget, steps=200): 200})
        bounds = attacker.posterior(prior=0.5), attacker.true_positive_rate(0.01)
        for printed, bound in zip((right, found), bounds, strict=True):
            assert 100 * bound <= float(printed) < 100 * bound + 0.1


def test_the_version_is_of_the_newest_changes() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert newest is not None
    assert hush.__version__.partition(".dev")[0] == newest[1]
    assert f"\nversion: {newest[1]}\n" in (ROOT / "CITATION.cff").read_text()
    assert f'\nversion = "{newest[1]}"\n' in (ROOT / "recipes" / "pyproject.toml").read_text()


def test_no_page_installs_the_other_project_of_this_name() -> None:
    """On the package index, the name hush belongs to another project."""
    project = re.compile(r"(?:pip|uv)[\w ]* (?:add|install) [^`#\n]*?(?<![\w./-])hush(?![\w-])")
    assert project.search("pip install 'hush[transformers]'")
    assert project.search("pip install --upgrade hush")
    assert not project.search("pip install hush-dp")
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]:
        assert not project.search(page.read_text()), page


def commands() -> list[list[str]]:
    """The words of every `hush` command line in the pages, without its comment and redirection."""
    lines = "\n".join(page.read_text() for page in MANUAL)
    return [
        re.split(r"\s(?:[>#|]|&&)\s", line)[0].split()
        for line in re.findall(r"^    (hush [a-z].*)$", lines, flags=re.MULTILINE)
    ]


def test_every_option_of_the_commands_that_are_shown_is_there() -> None:
    from typer.main import get_command

    from hush.cli.main import app

    registered = get_command(app).commands  # type: ignore[attr-defined]
    assert len(commands()) > 20
    for words in commands():
        options = {
            name
            for option in registered[words[1]].params
            for name in (*option.opts, *option.secondary_opts)
        }
        assert {word for word in words if word.startswith("--")} <= options, words


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    for package in (hush, hush.data, hush.training):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            package.nothing  # noqa: B018
