"""Records and coordinates take part at exactly the rate that is charged, each on its own."""

import pytest
import torch
from scipy import stats

import hush
from hush.core.errors import InvalidValue
from hush.core.parts import Sampling
from hush.core.randomness import Stream

RECORDS, DRAWS = 400, 500
SHAPE = 600, 700


def draws(rate: float) -> torch.Tensor:
    """Who took part in each of many draws: one row a draw."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.zeros(DRAWS, RECORDS)
    for row in rows:
        row[hush.Poisson(rate).draw(RECORDS, generator)] = 1
    return rows


def masks(sampling: Sampling) -> torch.Tensor:
    return sampling.mask_coordinates(torch.ones(SHAPE), torch.Generator().manual_seed(1))


def rate_fits(taken: torch.Tensor, rate: float) -> bool:
    return bool(stats.binomtest(int(taken.sum()), taken.numel(), rate).pvalue > 1e-4)


def spread_fits(taken: torch.Tensor, rate: float) -> bool:
    """Whether the sums of rows and of columns vary as those of independent coins."""
    variance = rate * (1 - rate)
    for other, own in ((0, 1), (1, 0)):
        size, count = taken.shape[own], taken.shape[other]
        squares = float(((taken.sum(own) - rate * size) ** 2).sum() / (variance * size))
        if not 1e-4 < stats.chi2.cdf(squares, count) < 1 - 1e-4:
            return False
    return True


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.99])
def test_records_take_part_at_the_rate_that_is_charged(rate: float) -> None:
    rows = draws(rate)
    assert rate_fits(rows, rate)
    for wrong in (0.98, 1.02) if rate == 0.3 else ():
        assert not rate_fits(rows, rate * wrong)


def test_records_take_part_independently_of_each_other() -> None:
    rows = draws(0.3)
    assert spread_fits(rows, 0.3)
    fixed_size = torch.zeros_like(rows)
    for row in fixed_size:
        row[torch.randperm(RECORDS)[: int(0.3 * RECORDS)]] = 1
    assert not spread_fits(fixed_size, 0.3), "batches of one size are not Poisson sampling"
    assert not spread_fits(rows[:1].expand_as(rows), 0.3), "nor is the same batch again and again"


def test_indices_are_in_range_and_a_rate_of_one_takes_everyone() -> None:
    generator = torch.Generator().manual_seed(0)
    assert hush.Poisson(1.0).draw(7, generator).tolist() == list(range(7))
    assert hush.FullBatch().draw(7, generator).tolist() == list(range(7))
    assert hush.Coordinate(rate=0.5).draw(7, generator).tolist() == list(range(7))


def test_a_draw_for_a_gpu_is_that_of_the_same_stream_and_does_not_wait_for_it() -> None:
    key = bytes(range(32))
    gpu, cpu = (Stream(torch.device(kind), key) for kind in ("cuda", "cpu"))
    for records in (0, 1, 5000, 2**16):
        drawn = hush.Poisson(0.3).draw(records, gpu)
        words = cpu.array(records).tolist()
        expected = [i for i, word in enumerate(words) if (word >> 1) % 2**62 < int(0.3 * 2**62)]
        assert drawn.device.type == "cpu"
        assert drawn.tolist() == expected


@pytest.mark.parametrize("rate", [1 / 256, 1 / 3, 1 / 2, 255 / 256])
def test_coordinates_take_part_at_the_rate_that_is_charged(rate: float) -> None:
    for sampling in (hush.Coordinate(rate=rate), hush.Twice(rate=0.1, coordinate_rate=rate)):
        mask = masks(sampling)
        assert set(mask.unique().tolist()) == {0.0, 1.0}
        near = sampling.coordinate_participation
        assert stats.binomtest(int(mask.sum()), mask.numel(), near).pvalue > 1e-7
        assert not rate_fits(mask, near + 0.02 if near < 0.5 else near - 0.02)


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])


def independent(mask: torch.Tensor) -> bool:
    """Neighbours along both dimensions, records and coordinates as wholes."""
    neighbours = [correlation(mask[1:], mask[:-1]), correlation(mask[:, 1:], mask[:, :-1])]
    neighbours += [correlation(mask[:, 8:], mask[:, :-8]), correlation(mask[:, 1:], mask.flip(0)[:, 1:])]
    close = all(abs(each) < 4 / mask.numel() ** 0.5 for each in neighbours)
    return close and spread_fits(mask, float(mask.mean()))


def test_coordinates_take_part_independently() -> None:
    mask = masks(hush.Coordinate(rate=1 / 3))
    assert independent(mask)
    assert not independent(mask[:1].expand_as(mask)), "the same coordinates for every record"
    assert not independent(mask[:, :1].expand_as(mask)), "all coordinates of a record or none"
    assert not independent(mask[: SHAPE[0] // 2].repeat(2, 1)), "a mask that is used twice"


def test_a_rate_is_rounded_to_what_one_byte_runs_exactly() -> None:
    assert hush.Coordinate(rate=1 / 3).rate == 85 / 256
    twice = hush.Twice(rate=0.06, coordinate_rate=1 / 3)
    assert (twice.rate, twice.coordinate_rate) == (0.06, 85 / 256)
    assert hush.Twice.from_plain(twice.to_plain()) == twice


def test_the_divisor_counts_records_and_coordinates() -> None:
    assert hush.Twice(rate=0.1, coordinate_rate=0.5).expected(1000) == pytest.approx(50)
    assert hush.Coordinate(rate=0.5).expected(1000) == 500
    assert hush.FullBatch().expected(7) == hush.Poisson(1.0).expected(7) == 7.0


def test_a_rate_of_one_keeps_everything_and_odd_sizes_are_filled() -> None:
    generator = torch.Generator().manual_seed(0)
    assert hush.Coordinate(rate=1.0).mask_coordinates(torch.ones(3, 7), generator).min() == 1
    for size in (0, 1, 7, 8, 9):
        mask = hush.Coordinate(rate=0.5).mask_coordinates(torch.ones(1, size), generator)
        assert mask.shape == (1, size)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1, 1e-4, float("nan"), "half"])
def test_rates_that_no_byte_runs_are_refused(rate: object) -> None:
    with pytest.raises(InvalidValue, match=r"rate=.* must be a finite number >= 0.00195312 and <= 1"):
        hush.Coordinate(rate=rate)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="coordinate_rate="):
        hush.Twice(rate=0.1, coordinate_rate=rate)  # type: ignore[arg-type]
