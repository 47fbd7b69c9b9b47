"""Coordinates take part at exactly the rate that is charged, each on its own."""

import pytest
import torch
from scipy import stats

import hush
from hush.core.errors import InvalidValue
from hush.core.parts import Sampling
from hush.core.randomness import SystemSource

RECORDS, WIDTH = 600, 700


def masks(sampling: Sampling, *, secure: bool = False) -> torch.Tensor:
    generator = SystemSource(torch.device("cpu")) if secure else torch.Generator().manual_seed(1)
    return sampling.mask_coordinates(torch.ones(RECORDS, WIDTH), generator)


def fits(mask: torch.Tensor, rate: float) -> bool:
    return bool(stats.binomtest(int(mask.sum()), mask.numel(), rate).pvalue > 1e-7)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("rate", [1 / 256, 1 / 3, 1 / 2, 255 / 256])
def test_coordinates_take_part_at_the_rate_that_is_charged(rate: float, secure: bool) -> None:
    for sampling in (hush.Coordinate(rate=rate), hush.Twice(rate=0.1, coordinate_rate=rate)):
        mask = masks(sampling, secure=secure)
        assert set(mask.unique().tolist()) == {0.0, 1.0}
        assert fits(mask, sampling.coordinate_participation)
        near = sampling.coordinate_participation
        assert not fits(mask, near + 0.02 if near < 0.5 else near - 0.02)


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])


def independent(mask: torch.Tensor) -> bool:
    """Neighbours along both dimensions, records and coordinates as wholes."""
    close = 4 / mask.numel() ** 0.5
    neighbours = [correlation(mask[1:], mask[:-1]), correlation(mask[:, 1:], mask[:, :-1])]
    neighbours += [correlation(mask[:, 8:], mask[:, :-8]), correlation(mask[:, 1:], mask.flip(0)[:, 1:])]
    rate = float(mask.mean())
    spread = rate * (1 - rate)
    rows = float(((mask.sum(1) - rate * WIDTH) ** 2).sum() / (spread * WIDTH))
    columns = float(((mask.sum(0) - rate * RECORDS) ** 2).sum() / (spread * RECORDS))
    return (
        all(abs(each) < close for each in neighbours)
        and 1e-4 < stats.chi2.cdf(rows, RECORDS) < 1 - 1e-4
        and 1e-4 < stats.chi2.cdf(columns, WIDTH) < 1 - 1e-4
    )


def test_coordinates_take_part_independently() -> None:
    mask = masks(hush.Coordinate(rate=1 / 3))
    assert independent(mask)
    assert not independent(mask[:1].expand_as(mask)), "the same coordinates for every record"
    assert not independent(mask[:, :1].expand_as(mask)), "all coordinates of a record or none"
    assert not independent(mask[: RECORDS // 2].repeat(2, 1)), "a mask that is used twice"


def test_a_rate_is_rounded_to_what_one_byte_runs_exactly() -> None:
    assert hush.Coordinate(rate=1 / 3).rate == 85 / 256
    twice = hush.Twice(rate=0.06, coordinate_rate=1 / 3)
    assert (twice.rate, twice.coordinate_rate) == (0.06, 85 / 256)
    assert hush.Plan.from_plain(plan(twice).to_plain()) == plan(twice)


def plan(sampling: Sampling) -> hush.Plan:
    return hush.Plan(
        sampling=sampling, clipping=hush.L2Linf(l2=1.0, linf=0.1), noise=hush.Gaussian(multiplier=1.0)
    )


def test_the_divisor_counts_records_and_coordinates() -> None:
    assert hush.Twice(rate=0.1, coordinate_rate=0.5).expected(1000) == pytest.approx(50)
    assert hush.Coordinate(rate=0.5).expected(1000) == 500
    assert len(hush.Coordinate(rate=0.5).draw(9, torch.Generator())) == 9


def test_a_rate_of_one_keeps_everything_and_odd_sizes_are_filled() -> None:
    generator = torch.Generator().manual_seed(0)
    assert hush.Coordinate(rate=1.0).mask_coordinates(torch.ones(3, 7), generator).min() == 1
    for size in (0, 1, 7, 8, 9):
        assert hush.Coordinate(rate=0.5).mask_coordinates(torch.ones(1, size), generator).shape == (
            1,
            size,
        )


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, 1e-4, float("nan"), "half"])
def test_rates_that_no_byte_runs_are_refused(rate: object) -> None:
    with pytest.raises(InvalidValue, match=r"rate=.* must be a finite number >= 0.00195312 and <= 1"):
        hush.Coordinate(rate=rate)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="coordinate_rate="):
        hush.Twice(rate=0.1, coordinate_rate=rate)  # type: ignore[arg-type]
