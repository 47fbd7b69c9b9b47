"""Clippings of blocks: what they say of themselves, and what they refuse."""

import math
import tomllib
from typing import Any

import pytest

import hush
from hush.core.errors import InvalidValue
from hush.core.parts import SensitivitySet
from hush.core.plan import plan_text


def test_each_knows_its_set() -> None:
    assert hush.Linf(0.1).sensitivity(400) == (SensitivitySet(p=math.inf, norm=0.1, dimension=400),)
    assert hush.Linf(0.1).sensitivity(400)[0].l2_radius == pytest.approx(2.0)
    capped = hush.L2Linf(l2=1.0, linf=0.1)
    assert [ball.l2_radius for ball in capped.sensitivity(400)] == [1.0]
    assert [ball.l2_radius for ball in capped.sensitivity(25)] == [0.5], "the box is the smaller one"
    box = hush.Box(bounds=(0.1, 0.1, (3, 0.2)))
    assert box.bounds == ((2, 0.1), (3, 0.2))
    assert [ball.l2_radius for ball in box.sensitivity(5)] == pytest.approx([0.1 * 2**0.5, 0.2 * 3**0.5])
    assert box.reference_norm == 0.2
    hybrid = hush.Subspaces(ranks=(2, 8), l2=(3.0, 4.0), linf=(3.0, 1.0))
    assert hybrid.reference_norm == 5.0
    assert [ball.l2_radius for ball in hybrid.sensitivity(10)] == pytest.approx([3.0, 8**0.5])
    projected = hush.Subspaces(ranks=(2, 8), l2=(3.0, 4.0), bases=hush.Principal())
    assert [ball.dimension for ball in projected.sensitivity(10)] == [2, 10], (
        "the rest in all coordinates"
    )


@pytest.mark.parametrize(
    "clipping",
    [
        hush.Box(bounds=(0.1, (3, 0.2))),
        hush.Subspaces(ranks=(1, 3), l2=(3.0, 4.0)),
        hush.Subspaces(ranks=(1, 3), l2=(3.0, 4.0), linf=(1.0, 1.0), bases=hush.Principal(groups=2)),
    ],
)
def test_plans_survive_being_written(clipping: Any) -> None:
    plan = hush.Plan(
        sampling=hush.Twice(rate=0.1, coordinate_rate=0.5),
        clipping=clipping,
        noise=hush.BlockGaussian(multipliers=(1.0, 2.0)),
    )
    assert hush.Plan.from_plain(tomllib.loads(plan_text(plan))) == plan
    assert hush.Plan.from_plain(plan.to_plain()).digest == plan.digest


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: hush.Box(bounds=()), "bounds="),
        (lambda: hush.Box(bounds=(0.0, 1.0)), "bounds=0.0 must be"),
        (lambda: hush.Box(bounds=((0, 1.0),)), "whole number >= 1"),
        (lambda: hush.Box(bounds="ab"), "must be a non-empty list"),  # type: ignore[arg-type]
        (lambda: hush.Linf(0.0), "norm=0.0"),
        (lambda: hush.L2Linf(l2=1.0, linf=math.nan), "linf=nan"),
        (lambda: hush.Subspaces(ranks=(1, 2), l2=(1.0,)), "l2=.* must have 2 numbers"),
        (lambda: hush.Subspaces(ranks=(1.5, 2), l2=(1.0, 1.0)), "whole number"),  # type: ignore[arg-type]
        (lambda: hush.Subspaces(ranks=(1, 2), l2=(1.0, 1.0), linf=(1.0,)), "linf=.* must have 2"),
        (lambda: hush.Subspaces(ranks=(3,), l2=(1.0,), bases=hush.Principal()), "at least two numbers"),
        (lambda: hush.BlockGaussian(multipliers=()), "multipliers="),
        (lambda: hush.BlockGaussian(multipliers=(1.0, 0.0)), "multipliers=0.0"),
    ],
)
def test_bad_bounds_are_refused(make: Any, says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        make()
    with pytest.raises(InvalidValue, match="bounds 5 parameters, but 6 are trained"):
        hush.Subspaces(ranks=(2, 3), l2=(1.0, 1.0)).sensitivity(6)
