"""Noise on a GPU: number by number the one that exact arithmetic makes of the same words.

Without one, Triton's interpreter runs the kernels:
TRITON_INTERPRET=1 pytest tests/noise/exact/test_ziggurat_kernel.py
"""

import os
from importlib.util import find_spec

import pytest
import torch
from scipy import stats

from hush.core.randomness import Stream
from hush.noise.exact import exact_draw, ziggurat
from hush.noise.exact.exact_draw import Words, reserve
from hush.noise.exact.layers import PLACE_SHIFT, layers, layers_beyond

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
GPU = pytest.mark.skipif(DEVICE.type != "cuda", reason="there is no GPU")
KERNEL = pytest.mark.skipif(
    find_spec("triton") is None or not (DEVICE.type == "cuda" or INTERPRETED),
    reason="there is no GPU, nor Triton's interpreter",
)
KEY = bytes(range(32))


@pytest.mark.parametrize("beta", [1.0, 2.0, 4.0])
def test_a_draw_from_its_own_blocks_has_the_law(beta: float) -> None:
    words = reserve(3000, Stream(torch.device("cpu"), KEY))
    drawn = [words.exact_sum(0.25, beta, 1.0, 2.0**-14, i) - 0.25 for i in range(3000)]
    assert stats.kstest(drawn, stats.gennorm(beta).cdf).pvalue > 1e-3
    assert stats.kstest([1.2 * value for value in drawn], stats.gennorm(beta).cdf).pvalue < 1e-3


@pytest.mark.parametrize("beta", [1.0, 2.0, 4.0])
def test_a_draw_from_its_own_blocks_reaches_the_tail(beta: float) -> None:
    class Far(Words):
        """All proposals at the far end of layer 0: they are drawn again from the tail."""

        def proposal(self, index: int) -> int:
            return (2**36 - 1) << PLACE_SHIFT

    stream = Stream(torch.device("cpu"), KEY)
    words = Far(stream, stream.reserve(1), stream.reserve(1))
    edge, tail = layers(beta).edge + 1e-3, stats.gennorm(beta)
    drawn = [words.exact_sum(0.0, beta, 1.0, 2.0**-14, i) for i in range(2000)]
    far = [value for value in drawn if value > edge]
    assert len(far) > 500
    assert stats.kstest(far, lambda x: 1 - tail.sf(x) / tail.sf(edge)).pvalue > 1e-3


def test_blocks_are_those_of_the_stream() -> None:
    stream = Stream(torch.device("cpu"), KEY)
    words = stream.array(4 * 8)
    assert [stream.block(0, k) for k in range(4)] == words.reshape(4, 8).tolist()


def launched(
    location: torch.Tensor, beta: float, scale: float, dtype: torch.dtype
) -> tuple[list[float], list[int], list[int], list[float]]:
    """What the kernels make of a location, which numbers they listed and left, and the oracle's."""
    from hush.noise.exact.ziggurat_kernel import launch, rows

    step = ziggurat.grid_spacing(scale)
    before = location.to(dtype)
    words = reserve(len(location), Stream(DEVICE, KEY))
    sums = before.clone().to(DEVICE)
    counts, listed = launch(sums, beta, scale, step, words)
    marked = rows(counts, listed)
    exact = torch.tensor(
        [
            words.exact_sum(value, beta, scale, step, index)
            for index, value in enumerate(before.tolist())
        ],
        dtype=torch.float64,
    )
    undecided = [-1 - row for row in marked if row < 0]
    assert int(counts[0]) == len(undecided)
    return sums.tolist(), [max(row, -1 - row) for row in marked], undecided, exact.to(dtype).tolist()


def locations(count: int) -> torch.Tensor:
    """From far below the grid to far above the noise."""
    seeded = torch.Generator().manual_seed(0)
    sizes = 10 ** torch.empty(count, dtype=torch.float64).uniform_(-8, 9, generator=seeded)
    return sizes * torch.randn(count, dtype=torch.float64, generator=seeded)


@KERNEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [1.0, 1.5, 2.0, 4.0, 50.0])
def test_every_number_is_the_oracle_s(beta: float, dtype: torch.dtype) -> None:
    """A scale of many digits: in single precision it would show."""
    count = 6001 if DEVICE.type == "cuda" else 3001
    sums, listed, undecided, exact = launched(locations(count), beta, 1.7 / 3, dtype)
    assert 0.0005 < len(listed) / count < 0.03
    assert len(set(listed)) == len(listed)
    assert not undecided
    assert sums == exact


@KERNEL
@pytest.mark.parametrize("beta", [1.0, 2.0, 3.3])
def test_every_number_is_the_oracle_s_where_most_are_settled(
    beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With layers that are too high, most proposals are rejected: some numbers are out of attempts."""
    from hush.noise.exact import ziggurat_kernel

    poor = layers_beyond(beta, 0.9 * layers(beta).edge ** beta)
    for module in (exact_draw, ziggurat_kernel):
        monkeypatch.setattr(module, "layers", lambda _: poor)
    ziggurat_kernel._law.cache_clear()
    try:
        before = locations(1501)
        sums, listed, undecided, exact = launched(before, beta, 1.7 / 3, torch.float64)
    finally:
        monkeypatch.undo()
        ziggurat_kernel._law.cache_clear()
    assert len(listed) > 400
    assert 0 < len(undecided) < 400
    for index in undecided:
        exact[index] = float(before[index])
    assert sums == exact


@GPU
@pytest.mark.parametrize("beta", [1.0, 2.0, 4.0])
def test_a_group_s_list_is_the_oracle_s(beta: float) -> None:
    """Many programs at once, and the tail beyond the layers."""
    from hush.noise.exact.ziggurat_kernel import launch, rows

    words = reserve(2**20, Stream(DEVICE, KEY))
    sums = torch.zeros(2**20, dtype=torch.float64, device=DEVICE)
    listed = rows(*launch(sums, beta, 1.7 / 3, 2.0**-15, words))
    assert len(set(listed)) == len(listed) > 2000
    assert min(listed) >= 0
    values = sums.tolist()
    assert sum(abs(values[index]) > 1.7 / 3 * layers(beta).edge for index in listed) > 20
    for index in listed:
        exact = words.exact_sum(0.0, beta, 1.7 / 3, 2.0**-15, index)
        assert values[index] == exact


@GPU
def test_what_is_left_is_settled_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some numbers are given back as if double precision had not decided: nothing changes."""
    from hush.noise.exact import ziggurat_kernel

    count, launch = 2**16, ziggurat_kernel.launch
    before = locations(count).to(DEVICE)
    expected = ziggurat.add_noise(before.clone(), 2.0, 1.7, Stream(DEVICE, KEY))

    def undecided(
        location: torch.Tensor, beta: float, scale: float, step: float, words: Words
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counts, listed = launch(location, beta, scale, step, words)
        back = listed[:20].clone()
        location[back.long()] = before[back.long()]
        listed[:20] = -1 - back
        counts[0] = 20
        return counts, listed

    monkeypatch.setattr(ziggurat_kernel, "launch", undecided)
    actual = ziggurat.add_noise(before.clone(), 2.0, 1.7, Stream(DEVICE, KEY))
    assert torch.equal(actual, expected)


@GPU
@pytest.mark.parametrize("count", [2**12, 2**16 + 1])
def test_a_call_uses_as_many_nonces_whatever_is_drawn(count: int) -> None:
    """So a run that resumes goes on with the same words."""
    source = Stream(DEVICE, KEY)
    for calls in range(3):
        assert source.reserve(1) == 3 * calls
        ziggurat.add_noise(torch.zeros(count, device=DEVICE), 2.0, 1.0, source)


@GPU
@pytest.mark.parametrize("beta", [1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gpu_s_noise_has_the_law(beta: float, dtype: torch.dtype) -> None:
    zeros = torch.zeros(2**22, dtype=dtype, device=DEVICE)
    noise = ziggurat.add_noise(zeros, beta, 1.7, Stream(DEVICE, KEY)).double().cpu().numpy() / 1.7
    assert stats.kstest(noise, stats.gennorm(beta).cdf).pvalue > 1e-3
    assert stats.kstest(1.005 * noise, stats.gennorm(beta).cdf).pvalue < 1e-3


@GPU
def test_a_smaller_type_is_rounded_once_more() -> None:
    half, double = (torch.ones(5000, dtype=d, device=DEVICE) for d in (torch.bfloat16, torch.float64))
    noisy = [ziggurat.add_noise(each, 2.0, 1.7, Stream(DEVICE, KEY)) for each in (half, double)]
    assert torch.equal(noisy[0], noisy[1].to(torch.bfloat16))
