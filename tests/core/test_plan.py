import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hush
from hush.core.errors import InvalidPlan, InvalidValue
from hush.core.plan import EXAMPLE, plan_text, read_plan, write_plan

positive = st.floats(min_value=1e-12, max_value=1e12)
rates = st.floats(min_value=1e-9, max_value=1.0)


def plan(rate: float = 0.01, norm: float = 1.0, multiplier: float = 1.1) -> hush.Plan:
    return hush.Plan(
        sampling=hush.Poisson(rate), clipping=hush.L2(norm), noise=hush.Gaussian(multiplier)
    )


@given(rate=rates, norm=positive, multiplier=positive)
def test_plain_data_gives_the_same_plan_back(rate: float, norm: float, multiplier: float) -> None:
    original = plan(rate, norm, multiplier)
    restored = hush.Plan.from_plain(original.to_plain())
    assert restored == original
    assert restored.digest == original.digest


def test_digest_tells_plans_apart_and_not_spellings() -> None:
    assert plan(norm=1).digest == plan(norm=1.0).digest
    assert plan(norm=1.0).digest != plan(norm=1.0 + 2**-52).digest
    assert plan().digest != dataclasses.replace(plan(), sampling=hush.FullBatch()).digest


def test_prints_in_one_line_that_makes_the_plan() -> None:
    assert "\n" not in repr(plan())
    names = {name: getattr(hush, name) for name in ("Plan", "Poisson", "L2", "Gaussian", "Always")}
    assert eval(repr(plan()), names) == plan()


def test_plans_are_frozen_and_hashable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().noise = hush.Gaussian(2.0)  # type: ignore[misc]
    assert {plan(): 1}[plan()] == 1


PLAN = hush.Plan(sampling=hush.FullBatch(), clipping=hush.L2(0.1), noise=hush.Gaussian(1e-7))


def test_a_written_plan_reads_back_unchanged(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml") == PLAN
    assert plan_text(PLAN).startswith('[sampling]\nkind = "FullBatch"\n')


@pytest.mark.parametrize(
    ("find", "replace", "key"),
    [
        ("rate = 0.01", "rate = 1.5", "sampling.rate"),
        ("rate = 0.01", "rate = nan", "sampling.rate"),
        ("rate = 0.01", 'rate = "often"', "sampling.rate"),
        ("rate = 0.01", "", "sampling.rate"),
        ('kind = "L2"', 'kind = "L7"', "clipping.kind"),
        ('kind = "Poisson"', 'kind = "Gaussian"', "sampling.kind"),
        ('kind = "Poisson"\n', "", "sampling.kind"),
        ("[sampling]\n", "sampling = 3\n[sample]\n", "sample"),
        ("norm = 1.0", "norm = 1.0\nmorm = 2", "clipping.morm"),
        ("[noise]", "[noize]", "noize"),
        ('[noise]\nkind = "Gaussian"\nmultiplier = 1.0', "", "noise"),
        ('"L2"\nnorm = 1.0', '"Subspaces"\nranks = [1, 2]\nl2 = [1, 1]\nbases = 3', "clipping.bases"),
        (
            '"L2"\nnorm = 1.0',
            '"Subspaces"\nranks = [1, 2]\nl2 = [1, 1]\nbases = {every = 0}',
            "clipping.bases.every",
        ),
    ],
)
def test_an_error_names_the_key(tmp_path: Path, find: str, replace: str, key: str) -> None:
    path = tmp_path / "plan.toml"
    assert find in EXAMPLE
    path.write_text(EXAMPLE.replace(find, replace))
    with pytest.raises(InvalidPlan, match=rf"plan\.toml, key {re.escape(key)}: ") as caught:
        read_plan(path)
    assert caught.value.key == key


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


@pytest.mark.parametrize(
    ("kind", "value", "name"),
    [
        *((kind, 0.25, "rate") for kind in (hush.Poisson, hush.Coordinate)),
        *((kind, 1.5, "norm") for kind in (hush.L2, hush.Linf, hush.Importance)),
        *((kind, 1.5, "multiplier") for kind in (hush.Gaussian, hush.Laplace)),
        (hush.StochasticSign, 1.5, "scale"),
        (hush.BlockGaussian, (1.0, 2.0), "multipliers"),
        (hush.Box, ((3, 1.0), (2, 0.5)), "bounds"),
    ],
)
def test_the_main_number_of_a_part_may_be_positional(kind: Any, value: Any, name: str) -> None:
    assert kind(value) == kind(**{name: value})
    wrongs: list[Any] = [-1, math.nan, "1", None, [], {}]
    for wrong in wrongs:
        with pytest.raises(InvalidValue, match=rf"{name}=.* must be"):
            kind(wrong)


@pytest.mark.parametrize(
    ("kind", "values", "way_out"),
    [
        (hush.GeneralizedGaussian, (1.5, 2.0), "beta=..., multiplier=..."),
        (hush.Rectified, (1.0, 2.0), "scale=..., bound=..."),
        (hush.L2, (1.0, 2.0), "norm=..."),
        (hush.Plan, (1.0, 2.0, 3.0), "sampling=..., clipping=..., noise=..., release=..."),
    ],
)
def test_other_arguments_are_named_in_the_error(kind: Any, values: tuple[float], way_out: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(f"Pass {kind.__name__}({way_out}).")):
        kind(*values)


def test_an_unknown_argument_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        InvalidValue, match=r"has no argument 'noise_multiplier'\. Pass Gaussian\(multip"
    ):
        hush.Gaussian(noise_multiplier=1.0)  # type: ignore[call-arg]


def test_a_budget_may_be_positional() -> None:
    assert hush.Budget(3, 1e-5) == hush.Budget(epsilon=3.0, delta=1e-5)
    with pytest.raises(InvalidValue, match="delta=2 must be"):
        hush.Budget(3, 2)
