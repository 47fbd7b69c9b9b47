import pytest
import torch
from scipy import stats

from hush.core import randomness
from hush.core.errors import Unsupported
from hush.core.randomness import fresh_generator


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
