"""Noise on a GPU: number by number the one that exact arithmetic makes of the same words."""

import pytest
import torch
from scipy import stats

from hush.core.randomness import Stream, random_bits
from hush.noise import ziggurat
from hush.noise.layers import LAYERS, layers

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("beta", [1.0, 2.0, 4.0])
def test_exact_arithmetic_has_the_law(beta: float) -> None:
    """The oracle itself, on words that need no height and on words that do."""
    stream = Stream(torch.device("cpu"), bytes(31) + b"1")
    words = random_bits(3000, stream).tolist()
    further = random_bits(3000 * 25, stream).view(3000, 25).tolist()
    found = [
        ziggurat.settled(beta, 0.25, 1.0, word, more, stream) - 0.25
        for word, more in zip(words, further, strict=True)
    ]
    assert stats.kstest(found, stats.gennorm(beta).cdf).pvalue > 1e-3
    assert stats.kstest([1.2 * value for value in found], stats.gennorm(beta).cdf).pvalue < 1e-3


@pytest.mark.parametrize("beta", [1.0, 2.0, 4.0])
def test_exact_arithmetic_reaches_the_tail(beta: float) -> None:
    law, stream = layers(beta), Stream(torch.device("cpu"), bytes(32))
    # layer 0, at its far end: all of these are drawn again from the tail
    word = (2**36 - 1) << ziggurat._SHIFT
    assert word % LAYERS == 0
    found = []
    for row in random_bits(2000 * 25, stream).view(2000, 25).tolist():
        value = ziggurat.settled(beta, 0.0, 1.0, word, row, stream)
        if abs(value) > law.edge + 1e-3:
            found.append(value)
    tail = stats.gennorm(beta)
    edge = law.edge + 1e-3

    assert len(found) > 500
    assert stats.kstest(found, lambda x: 1 - tail.sf(x) / tail.sf(edge)).pvalue > 1e-3


@GPU
@pytest.mark.parametrize("beta", [1.0, 1.5, 2.0, 4.0])
def test_a_gpu_settles_as_exact_arithmetic_does(beta: float) -> None:
    key, count, scale = bytes(range(32)), 2**17, 1.7
    location = 50 * torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = ziggurat.around(location.cuda(), beta, scale, Stream(torch.device("cuda"), key)).cpu()
    # the same words: the first call is the proposals, the second what those need that are open
    twin = Stream(torch.device("cuda"), key)
    words = random_bits(count, twin).cpu().tolist()
    law = layers(beta)
    units = scale / ziggurat.grid(scale)
    sure, row = [], 0
    spare = Stream(torch.device("cpu"), key)
    zeros = [0] * 25
    for i, word in enumerate(words):
        start = (word >> ziggurat._SHIFT) * float(law.cells[word % LAYERS])
        if abs(start) < law.inner[word % LAYERS] - law.cells[word % LAYERS]:
            sure.append(i)
        else:
            row += 1
    assert 0.001 < row / count < 0.02
    for i in sure[:3000]:
        exact = ziggurat.settled(beta, float(location[i]), scale, words[i], zeros, spare)
        assert abs(float(found[i]) - exact) <= ziggurat.grid(scale) * (1 + law.widest * units)
    residue = (found - location).numpy() / scale
    assert stats.kstest(residue, stats.gennorm(beta).cdf).pvalue > 1e-3


@GPU
def test_every_open_number_is_the_oracle_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all numbers left to exact arithmetic after the kernel, nothing changes."""
    from hush.noise import ziggurat_kernel

    key, count = bytes(range(32)), 2**17
    location = torch.zeros(count, dtype=torch.float64, device="cuda")
    seen: dict[str, torch.Tensor] = {}
    settle = ziggurat_kernel._settle

    class Noted:
        def __getitem__(self, grid: object) -> object:
            def launch(location, where, first, further, left, *rest):  # type: ignore[no-untyped-def]
                seen.update(where=where, first=first, further=further)
                settle[grid](location, where, first, further, left, *rest)

            return launch

    monkeypatch.setattr(ziggurat_kernel, "_settle", Noted())
    found = ziggurat.around(location, 2.0, 1.0, Stream(torch.device("cuda"), key)).cpu()
    spare = Stream(torch.device("cpu"), key)
    rows = zip(*(seen[name].tolist() for name in ("where", "first", "further")), strict=True)
    checked = 0
    for index, word, further in rows:
        exact = ziggurat.settled(2.0, 0.0, 1.0, word, further, spare)
        assert float(found[index]) == exact
        checked += 1
    assert checked > 300
