import math

import pytest
import torch
from scipy import stats

from hush.core import randomness
from hush.core.errors import InvalidValue, Unsupported
from hush.core.randomness import (
    Randomness,
    SystemSource,
    fresh_generator,
    random_bits,
    source_for,
    uniform,
)


def test_draws_are_uniform_and_normal() -> None:
    generator = fresh_generator()
    uniform = torch.rand(100_000, generator=generator, dtype=torch.float64).numpy()
    normal = torch.randn(100_000, generator=generator, dtype=torch.float64).numpy()
    assert stats.kstest(uniform, "uniform").pvalue > 1e-4
    assert stats.kstest(normal, "norm").pvalue > 1e-4


def test_torch_keeps_only_32_bits_of_a_seed() -> None:
    """Why a seed is not enough; should this ever fail, `fresh_generator` can be simpler."""
    pair = [torch.Generator().manual_seed(seed) for seed in (5, 5 + 2**32)]
    assert torch.equal(*(torch.randn(9, generator=each) for each in pair))


def test_generators_of_one_seed_still_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness.secrets, "randbits", lambda _: 5)  # type: ignore[attr-defined]
    draws = [torch.randn(9, generator=fresh_generator()) for _ in range(2)]
    assert not torch.equal(*draws)


def test_the_state_survives_being_saved() -> None:
    generator = fresh_generator()
    torch.randn(7, generator=generator)
    again = torch.Generator()
    again.set_state(generator.get_state())
    assert torch.equal(torch.randn(9, generator=again), torch.randn(9, generator=generator))


def test_an_unknown_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "_TWISTER", slice(4, 628))
    with pytest.raises(Unsupported, match="does not know"):
        fresh_generator()


SYSTEM = SystemSource(torch.device("cpu"))


@pytest.mark.parametrize("source", [SYSTEM, torch.Generator().manual_seed(0)])
def test_every_bit_is_random(source: Randomness) -> None:
    words = random_bits(50_000, source)
    assert words.dtype == torch.int64
    for place in range(64):
        ones = int((words >> place & 1).sum())
        assert abs(ones - 25_000) < 5 * math.sqrt(12_500)


@pytest.mark.parametrize("source", [SYSTEM, torch.Generator().manual_seed(0)])
def test_uniforms_are_uniform_to_53_bits(source: Randomness) -> None:
    drawn = uniform(100_000, source)
    assert stats.kstest(drawn.numpy(), "uniform").pvalue > 1e-6
    places = drawn * 2.0**53
    assert torch.equal(places, places.round())
    assert bool((places % 2 == 1).any())
    assert 0 <= float(drawn.min()) <= float(drawn.max()) < 1


def test_the_system_s_source_is_asked_for_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def urandom(count: int) -> bytes:
        asked.append(count)
        return bytes(count)

    monkeypatch.setattr(randomness.os, "urandom", urandom)  # type: ignore[attr-defined]
    assert not random_bits(5, SYSTEM).any()
    assert not uniform(3, SYSTEM).any()
    assert asked == [40, 24]


def test_secure_and_a_generator_exclude_each_other() -> None:
    device = torch.device("cpu")
    assert source_for(device, None, secure=True) == SYSTEM
    with pytest.raises(InvalidValue, match=r"secure=True .*generator was passed.*Pass one of the two"):
        source_for(device, torch.Generator(), secure=True)


def test_a_generator_that_everything_draws_from_is_refused() -> None:
    with pytest.raises(InvalidValue, match="which everything draws from"):
        source_for(torch.device("cpu"), torch.default_generator, secure=False)
    mine = torch.Generator()
    assert source_for(torch.device("cpu"), mine, secure=False) is mine
