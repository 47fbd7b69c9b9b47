from pathlib import Path

import pytest

import hush
from hush.core.errors import InvalidPlan
from hush.core.plan import EXAMPLE, plan_text, read_plan, write_plan

PLAN = hush.Plan(
    sampling=hush.FullBatch(), clipping=hush.L2(norm=0.1), noise=hush.Gaussian(multiplier=1e-7)
)


def test_a_written_plan_reads_back_unchanged(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml") == PLAN
    assert plan_text(PLAN).startswith('[sampling]\nkind = "FullBatch"\n')


def test_the_example_in_the_error_is_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(EXAMPLE)
    assert read_plan(path).sampling == hush.Poisson(rate=0.01)


@pytest.mark.parametrize(
    ("find", "replace", "line", "key"),
    [
        ("rate = 0.01", "rate = 1.5", 3, "sampling.rate"),
        ("rate = 0.01", "rate = nan", 3, "sampling.rate"),
        ("rate = 0.01", 'rate = "often"', 3, "sampling.rate"),
        ("rate = 0.01", "", 1, "sampling.rate"),
        ('kind = "L2"', 'kind = "L7"', 6, "clipping.kind"),
        ("norm = 1.0", "norm = 1.0\nmorm = 2", 8, "clipping.morm"),
        ("[noise]", "[noize]", 9, "noize"),
        ('[noise]\nkind = "Gaussian"\nmultiplier = 1.0', "", 9, "noise"),
    ],
)
def test_an_error_names_line_and_key(
    tmp_path: Path, find: str, replace: str, line: int, key: str
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(EXAMPLE.replace(find, replace))
    with pytest.raises(InvalidPlan, match=rf"line {line}, key {key}: ") as caught:
        read_plan(path)
    assert caught.value.key == key


def test_inline_tables_are_located_too(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('\nsampling = { kind = "Poisson", rate = 0 }\n')
    with pytest.raises(InvalidPlan, match=r"line 2, key sampling\.rate"):
        read_plan(path)


BLOCKS = """\
[sampling]
kind = "FullBatch"

[clipping]
# bases = {every = 0} would be refused
bases = BASES
kind = "Subspaces"
ranks = [1, 2]
l2 = [1.0, 1.0]

[noise]
kind = "Gaussian"
multiplier = 1.0
"""


@pytest.mark.parametrize(
    ("bases", "line", "key"),
    [
        ('{kind = "Principal"}', 6, "bases.kind"),
        ("{every = 0}", 6, "bases.every"),
        ('{"every" = 0}', 6, "bases.every"),
        ("{ranks = [1, 2]}", 6, "bases.ranks"),
        ("3", 6, "bases"),
    ],
)
def test_a_mistake_in_a_table_within_a_table_is_located(
    tmp_path: Path, bases: str, line: int, key: str
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(BLOCKS.replace("BASES", bases))
    with pytest.raises(InvalidPlan, match=rf"line {line}, key clipping\.{key}: "):
        read_plan(path)


def test_a_mistake_in_a_table_of_its_own_is_located(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    text = BLOCKS.replace("bases = BASES\n", "")
    path.write_text(text.replace("[noise]", "[clipping.bases]\ngroups = 1\nevery = 0\n\n[noise]"))
    with pytest.raises(InvalidPlan, match=r"line 12, key clipping\.bases\.every: "):
        read_plan(path)


def test_broken_toml_and_missing_files_say_so(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    with pytest.raises(InvalidPlan, match=r"cannot read .* should look like"):
        read_plan(path)
    path.write_text("[sampling]\nrate = \n")
    with pytest.raises(InvalidPlan, match=r"not a TOML file: .*line 2"):
        read_plan(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidPlan, match="cannot read"):
        read_plan(path)
