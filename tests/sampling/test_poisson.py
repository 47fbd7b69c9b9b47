import torch
from scipy import stats

import hush
from hush.core.randomness import Stream

RECORDS, DRAWS = 400, 500


def draws(sampling: hush.Poisson, seed: int = 0) -> torch.Tensor:
    """Who took part in each of many draws: one row a draw."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.zeros(DRAWS, RECORDS)
    for row in rows:
        row[sampling.draw(RECORDS, generator)] = 1
    return rows


def rate_fits(rows: torch.Tensor, rate: float) -> bool:
    return bool(stats.binomtest(int(rows.sum()), rows.numel(), rate).pvalue > 1e-3)


def test_records_take_part_at_the_rate_that_is_charged() -> None:
    for rate in (0.01, 0.3, 0.99):
        rows = draws(hush.Poisson(rate=rate))
        assert rate_fits(rows, rate)
    assert not rate_fits(draws(hush.Poisson(rate=0.3)), 0.3 * 1.02)
    assert not rate_fits(draws(hush.Poisson(rate=0.3)), 0.3 * 0.98)


def independent(rows: torch.Tensor, rate: float) -> bool:
    """Whether batch sizes and each record's count spread as independent draws would."""
    spread = rate * (1 - rate)
    sizes = ((rows.sum(1) - rate * RECORDS) ** 2).sum() / (spread * RECORDS)
    counts = ((rows.sum(0) - rate * DRAWS) ** 2).sum() / (spread * DRAWS)
    fits_sizes = 1e-4 < stats.chi2.cdf(float(sizes), DRAWS) < 1 - 1e-4
    return bool(fits_sizes and 1e-4 < stats.chi2.cdf(float(counts), RECORDS) < 1 - 1e-4)


def test_records_take_part_independently_of_each_other() -> None:
    rows = draws(hush.Poisson(rate=0.3))
    assert independent(rows, 0.3)
    fixed_size = torch.zeros_like(rows)
    for row in fixed_size:
        row[torch.randperm(RECORDS)[: int(0.3 * RECORDS)]] = 1
    assert not independent(fixed_size, 0.3), "batches of one size are not Poisson sampling"
    assert not independent(rows[:1].expand_as(rows), 0.3), "nor is the same batch again and again"


def test_indices_are_in_range_and_a_rate_of_one_takes_everyone() -> None:
    generator = torch.Generator().manual_seed(0)
    assert hush.Poisson(rate=1.0).draw(7, generator).tolist() == list(range(7))
    assert hush.FullBatch().draw(7, generator).tolist() == list(range(7))
    assert hush.FullBatch().expected(7) == hush.Poisson(rate=1.0).expected(7) == 7.0


def test_a_draw_for_a_gpu_is_that_of_the_same_stream_and_does_not_wait_for_it() -> None:
    key = bytes(range(32))
    gpu, cpu = (Stream(torch.device(kind), key) for kind in ("cuda", "cpu"))
    for records in (0, 1, 5000, 2**16):
        drawn = hush.Poisson(rate=0.3).draw(records, gpu)
        words = cpu.array(records).tolist()
        expected = [i for i, word in enumerate(words) if (word >> 1) % 2**62 < int(0.3 * 2**62)]
        assert drawn.device.type == "cpu"
        assert drawn.tolist() == expected
