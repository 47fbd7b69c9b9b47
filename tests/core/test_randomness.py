import math

import pytest
import torch
from scipy import stats

from hush.core import randomness
from hush.core.errors import InvalidValue
from hush.core.randomness import (
    RandomSource,
    Stream,
    bernoulli,
    derive_source,
    fill_state,
    random_bits,
    random_words,
    source_for,
    uniform,
)


def test_torch_keeps_only_32_bits_of_a_seed() -> None:
    """Why a seed is not enough; should this ever fail, `fresh_generator` can be simpler."""
    pair = [torch.Generator().manual_seed(seed) for seed in (5, 5 + 2**32)]
    assert torch.equal(*(torch.randn(9, generator=generator) for generator in pair))


FRESH = source_for(torch.device("cpu"))


@pytest.mark.parametrize("source", [FRESH, torch.Generator().manual_seed(0)])
def test_every_bit_is_random(source: RandomSource) -> None:
    words = random_bits(50_000, source)
    assert words.dtype == torch.int64
    for place in range(64):
        ones = int((words >> place & 1).sum())
        assert abs(ones - 25_000) < 5 * math.sqrt(12_500)


@pytest.mark.parametrize("source", [FRESH, torch.Generator().manual_seed(0)])
def test_uniforms_are_uniform_to_53_bits(source: RandomSource) -> None:
    drawn = uniform(100_000, source)
    assert stats.kstest(drawn.numpy(), "uniform").pvalue > 1e-6
    places = drawn * 2.0**53
    assert torch.equal(places, places.round())
    assert bool((places % 2 == 1).any())
    assert 0 <= float(drawn.min()) <= float(drawn.max()) < 1


def test_a_generator_that_everything_draws_from_is_refused() -> None:
    device = torch.device("cpu")
    with pytest.raises(InvalidValue, match="which other code also uses"):
        source_for(device, torch.default_generator)
    mine = torch.Generator()
    assert source_for(device, mine).key != source_for(device, mine).key


def test_a_stream_is_chacha20() -> None:
    # RFC 8439, appendix A.1, test vectors 1 and 2 are blocks 0 and 1 under a key and nonce of zeros
    stream = Stream(torch.device("cpu"), bytes(32))
    keystream = random_bits(16, stream).numpy().tobytes()
    assert keystream[:8].hex() == "76b8e0ada0f13d90"
    assert keystream[64:72].hex() == "9f07e7be5551387a"
    # a call is a nonce: vector 5 has the last byte of the nonce 2, ours counts from its first
    following = random_bits(8, stream).numpy().tobytes()
    assert following != keystream[:64]


def test_a_stream_goes_on_from_its_state() -> None:
    stream = source_for(torch.device("cpu"))
    assert isinstance(stream, Stream)
    random_bits(7, stream)
    state = stream.get_state()
    expected = random_bits(5, stream)
    resumed = Stream(torch.device("cpu"), bytes(32))
    resumed.set_state(state)
    assert torch.equal(random_bits(5, resumed), expected)
    with pytest.raises(ValueError, match="not the state"):
        resumed.set_state(state[1:])


@pytest.mark.parametrize("source", [FRESH, torch.Generator().manual_seed(0)])
def test_coins_have_their_rate_and_no_more(
    source: RandomSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (60_000, 100_000):  # on the CPU, and where the source is
        thrown = bernoulli(count, 0.3, source)
        assert stats.binomtest(int(thrown.sum()), count, 0.3).pvalue > 1e-6
    assert bool(bernoulli(1000, 1.0, source).all())
    # the largest word that is heads is one below rate * 2**62
    edge = int(1e-9 * 2.0**62)
    words = torch.tensor([edge - 1, edge]) << 1
    monkeypatch.setattr(randomness, "random_bits", lambda count, source: words)
    monkeypatch.setattr(randomness, "random_words", lambda count, source: words.numpy())
    assert bernoulli(2, 1e-9, source).tolist() == [True, False]


def test_the_whole_state_of_a_generator_is_drawn() -> None:
    """Two states drawn from one stream differ in nearly every word, not in 32 bits of seed."""
    stream = Stream(torch.device("cpu"), bytes(32))
    states = []
    for _ in range(2):
        generator = torch.Generator()
        fill_state(generator, stream)
        states.append(generator.get_state().numpy().view("u8")[3:627])
    assert (states[0] != states[1]).sum() > 620


def test_equal_sources_with_different_labels_draw_unrelated_numbers() -> None:
    def source() -> Stream:
        return source_for(torch.device("cpu"), torch.Generator().manual_seed(5))

    plain = random_words(64, source())
    assert (random_words(64, derive_source(source(), b"")) == plain).all()
    first, second = (random_words(64, derive_source(source(), label)) for label in (b"1:0", b"0:1"))
    assert (random_words(64, derive_source(source(), b"1:0")) == first).all(), "a run can be repeated"
    for a, b in ((first, plain), (second, plain), (first, second)):
        assert not set(a.tolist()) & set(b.tolist())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("words", [2**12, 2**16 + 1, 3_000_003])
def test_a_gpu_gives_the_same_stream(words: int) -> None:
    key = bytes(range(32))
    gpu, cpu = Stream(torch.device("cuda"), key), Stream(torch.device("cpu"), key)
    for _ in range(2):
        drawn = random_bits(words, gpu)
        assert drawn.is_cuda
        assert torch.equal(drawn.cpu(), random_bits(words, cpu))
