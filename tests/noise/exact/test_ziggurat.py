"""Exact draws against SciPy's law, and each number against rational arithmetic of the same words."""

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from scipy.special import gamma

import hush
from hush.core.randomness import Stream, random_words, source_for
from hush.noise.exact import ziggurat
from hush.noise.exact.exact_draw import exact_sum
from hush.noise.exact.layers import LAYERS, PLACE_SHIFT, Integers, layers, layers_beyond
from hush.noise.exact.ziggurat import PendingDraws, add_noise, grid_spacing, pending_draws

BETAS = (1.0, 1.2, 1.5, 2.0, 2.33, 3.0, 4.0, 8.0)
DRAWS = 250_000
CPU = torch.device("cpu")
Floats = npt.NDArray[np.floating]


def stream(seed: int = 0) -> Stream:
    return Stream(CPU, seed.to_bytes(32, "big"))


def deviations(values: npt.NDArray[np.float64], beta: float) -> npt.NDArray[np.float64]:
    """By how many standard errors the moments and the tails are off."""
    law, draws = stats.gennorm(beta), len(values)
    # |x|^beta has a gamma law, and so known moments of every power of |x|
    errors = [values.mean() / law.std() * math.sqrt(draws)]
    for power in (1, 2, 4):
        first = gamma((power + 1) / beta) / gamma(1 / beta)
        second = gamma((2 * power + 1) / beta) / gamma(1 / beta)
        mean = (np.abs(values) ** power).mean()
        errors.append((mean - first) * math.sqrt(draws / (second - first**2)))
    # up to where some fifty draws are expected beyond; for beta 1 that is eight scale units
    for chance in (0.9, 0.5, 0.1, 1e-2, 1e-3, 100 / draws):
        for side in (-1, 1):
            beyond = (side * values > law.isf(chance / 2)).sum()
            errors.append((beyond - draws * chance / 2) / math.sqrt(draws * chance / 2))
    return np.asarray(np.abs(errors))


def drawn(
    beta: float, dtype: torch.dtype = torch.float64, draws: int = DRAWS
) -> npt.NDArray[np.float64]:
    values = add_noise(torch.zeros(draws, dtype=dtype), beta, 1.0, stream())
    assert values.dtype == dtype
    return values.double().numpy()


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", BETAS)
def test_the_law_is_the_one_named_and_no_other(beta: float, dtype: torch.dtype) -> None:
    law = stats.gennorm(beta)
    values = drawn(beta, dtype)
    assert stats.kstest(values, law.cdf).pvalue > 1e-3
    assert deviations(values, beta).max() < 4.5
    for wrong in (0.95, 1.05):
        assert stats.kstest(values * wrong, law.cdf).pvalue < 1e-6
        assert deviations(values * wrong, beta).max() > 6
    # A change of beta moves the cdf little but the likelihood much: exp(14) is a million to one. The
    # larger beta, the more draws it takes.
    values = values if beta <= 3 or dtype == torch.float32 else drawn(beta, dtype, 4_000_000)
    for wrong in (beta - 0.1, beta + 0.1) if len(values) > DRAWS or beta <= 3 else ():
        likelier = law.logpdf(values) - stats.gennorm.logpdf(values, wrong)
        assert likelier.sum() > 14


@pytest.mark.parametrize("beta", [1.0, 2.33, 4.0])
def test_no_layer_is_over_or_underfilled(beta: float) -> None:
    # Chi-square over 1024 cells of equal chance, fine enough to see a layer that is left out.
    values = drawn(beta)
    cells = np.floor(1024 * stats.gennorm(beta).cdf(values)).astype(int)
    assert stats.chisquare(np.bincount(cells, minlength=1024)).pvalue > 1e-3
    # one in four of the places in the middle left out: one draw in some hundred
    middle = np.abs(values) < layers(beta).inner[-2]
    cells = cells[~middle | (np.arange(len(values)) % 4 > 0)]
    assert stats.chisquare(np.bincount(cells, minlength=1024)).pvalue < 1e-6


def test_draws_are_on_the_grid() -> None:
    for scale in (1e-12, 0.3, 1.0, 7e9):
        values = add_noise(torch.zeros(1000, dtype=torch.float64), 2.0, scale, stream())
        assert torch.equal(values / grid_spacing(scale), (values / grid_spacing(scale)).round())
        assert 2.0**-15 < grid_spacing(scale) / scale <= 2.0**-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_does_not_tell_the_sign_of_its_location(dtype: torch.dtype) -> None:
    for location in (-1e-9, -0.0, 0.0, 1e-9):
        values = add_noise(torch.full((500_000,), location, dtype=dtype), 2.0, 1.0, stream())
        zeros = values[values == 0]
        assert len(zeros) > 5
        assert not zeros.signbit().any()


def whole(noise: torch.Tensor) -> float:
    """How far pairs in the tail are from coming from 24-bit uniforms, as torch's; 1/4 if unrelated."""
    z = noise.double().numpy()
    z = z[: len(z) // 16 * 16].reshape(-1, 2, 8)
    k = np.exp(-(z[:, 0] ** 2 + z[:, 1] ** 2) / 2).ravel() * 2**24
    k = k[(k > 1.5) & (k < 200_000)]
    return float(np.abs(k - k.round()).mean())


def test_noise_cannot_be_told_by_the_uniforms_it_came_from() -> None:
    shape = (2_000_000,)
    noise = hush.Gaussian(1.0)
    assert abs(whole(hush.noise.sample(noise, shape)) - 0.25) < 0.05
    # torch's own normal draws can: an attacker tells right from wrong sums by them
    assert whole(torch.randn(shape)) < 0.05


def test_the_source_decides_everything() -> None:
    pair = [add_noise(torch.zeros(100_000), 1.5, 1.0, stream(seed)) for seed in (1, 1, 2)]
    assert torch.equal(pair[0], pair[1])
    assert not torch.equal(pair[0], pair[2])
    global_state = torch.get_rng_state()
    add_noise(torch.zeros(1000), 1.5, 1.0, source_for(CPU))
    assert torch.equal(global_state, torch.get_rng_state())


class Replay:
    """The words that draws and their sums were made of, from a twin of their source."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.near: list[int] = []
        refine = PendingDraws._refine

        def noted(drawn: PendingDraws, location: object, rows: list[Integers], *rest: object) -> object:
            self.near.extend(int(row) for each in rows for row in each)
            return refine(drawn, location, rows, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(PendingDraws, "_refine", noted)

    def exact(
        self, drawn: PendingDraws, before: Floats, scale: float, sample: set[int]
    ) -> dict[int, float]:
        """Sums in exact arithmetic of all that needed a height or further bits, and of `sample`."""
        twin = stream()
        words = random_words(len(before), twin).tolist()
        compared = []
        for rows, _ in drawn.compared:
            fours = random_words(4 * len(rows), twin).reshape(-1, 4).tolist()
            compared += list(zip(rows.tolist(), fours, strict=True))
        position = dict(zip(self.near, random_words(len(self.near), twin).tolist(), strict=True))
        own = Own(words, attempts_of(compared, position))
        assert 0.001 < len(own.attempts) / len(before) < 0.02
        return {
            i: own.exact_sum(float(before[i]), drawn.beta, scale, grid_spacing(scale), i)
            for i in {*own.attempts, *sample}
        }


@dataclass(frozen=True)
class Own:
    """Words of each number, by attempt; zeros where none are needed."""

    words: list[int]
    attempts: dict[int, list[list[int]]]
    source: Stream = field(default_factory=lambda: stream(1))

    def exact_sum(self, location: float, beta: float, scale: float, step: float, index: int) -> float:
        attempts = self.attempts.get(index, [[0] * 8])
        word = self.words[index]
        return exact_sum(location, beta, scale, step, word, attempts.__getitem__, self.source)


def attempts_of(
    compared: list[tuple[int, list[int]]], position: dict[int, int]
) -> dict[int, list[list[int]]]:
    """Words of each attempt; the last may be a proposal that needs no height."""
    attempts: dict[int, list[list[int]]] = {}
    for row, (height, zeros, spot, proposal) in compared:
        attempts.setdefault(row, []).append(
            [height, zeros, spot, position.get(row, 0), proposal, 0, 0, 0]
        )
    for row in {*attempts, *position}:
        attempts.setdefault(row, []).append([0, 0, 0, position.get(row, 0), 0, 0, 0, 0])
    return attempts


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("beta", [1.0, 1.5, 2.0, 4.0])
def test_every_number_is_the_oracle_s(
    beta: float, dtype: type[np.floating], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that needed a height or further bits, all of them; of the others the first thousand."""
    count, scale = 2**17, 1.99
    before: Floats = (50 * np.random.default_rng(0).normal(size=count)).astype(dtype)
    source, replay = stream(), Replay(monkeypatch)
    monkeypatch.setattr(ziggurat, "_ROUNDING", 1e-3)  # so that many are near a middle
    drawn, after = pending_draws(beta, count, scale / grid_spacing(scale), source), before.copy()
    undecided = drawn.add_to(after, grid_spacing(scale), source)
    assert len(undecided) > 100
    assert set(undecided) <= set(replay.near)
    assert len(drawn.tails) > 2
    for index, exact in replay.exact(drawn, before, scale, set(range(1000))).items():
        assert after[index] == dtype(exact)
    for index, (value, position) in undecided.items():
        exact = drawn.exact(index, value, position, scale, grid_spacing(scale), source)
        assert after[index] == dtype(exact)


@pytest.mark.parametrize("beta", [1.0, 1.5, 2.0, 4.0])
def test_places_that_straddle_a_middle_are_the_oracle_s(
    beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locations that put a middle between two points of the grid into places, also of the tail."""
    count, scale, source, replay = 2**17, 1.99, stream(), Replay(monkeypatch)
    drawn, before = pending_draws(beta, count, scale / grid_spacing(scale), source), np.zeros(count)
    rows = sorted({*drawn.tails, *range(500)})
    cells = layers(beta).cells[drawn.words[rows] & LAYERS - 1].tolist()
    widths = [drawn.tails.get(row, cell) for row, cell in zip(rows, cells, strict=True)]
    share = np.random.default_rng(0).uniform(0.2, 0.8, len(rows))
    inside = drawn.start[rows] + np.array(widths) * drawn.units * share
    before[rows] = (np.rint(inside) + 0.5 - inside) * grid_spacing(scale)
    after = before.copy()
    undecided = set(drawn.add_to(after, grid_spacing(scale), source))
    assert set(rows) <= set(replay.near)
    assert sum(row in drawn.tails for row in rows) > 2
    assert {width < 0 for width in widths} == {True, False}
    exact = replay.exact(drawn, before, scale, set(rows))
    assert [row for row in rows if after[row] != exact[row] and row not in undecided] == []
    assert len(undecided) < 0.05 * len(rows)
    up = np.array([exact[row] for row in rows]) > (np.rint(inside) + 0.5) * grid_spacing(scale)
    assert 0.3 < up.mean() < 0.7  # the position decides


@pytest.mark.parametrize("beta", [1.0, 2.0, 4.0])
def test_places_at_the_edges_are_the_oracle_s(beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the tail begins, and where a place of a layer is under the curve as a whole."""
    law = layers(beta)
    tail = round(law.edge / law.cells[0])
    assert tail * law.cells[0] == law.edge
    ends = {0: [tail + k for k in (-2, -1, 0, 1)]}
    for layer in range(1, LAYERS, 9):
        full = int(max(law.inner[layer] / law.cells[layer], 2))
        ends[layer] = [full + k for k in (-2, -1, 0, 1)]
    words = [
        place << PLACE_SHIFT | layer
        for layer, places in ends.items()
        for place in (*places, *(-place for place in places))
    ]
    source = stream()
    calls: list[list[int]] = []

    def crafted(count: int, source: Stream) -> Integers:
        calls.append(random_words(count, source).tolist() if calls else words)
        return np.array(calls[-1], np.int64)

    monkeypatch.setattr(ziggurat, "random_words", crafted)
    drawn, after = pending_draws(beta, len(words), 1.5 * 2.0**14, source), np.full(len(words), 0.25)
    undecided = set(drawn.add_to(after, 2.0**-14, source))
    compared = [
        pair
        for rows, fours in drawn.compared
        for pair in zip(rows.tolist(), fours.tolist(), strict=True)
    ]
    own = Own(words, attempts_of(compared, {}))
    assert len(undecided) < 5
    assert len(own.attempts) < len(words)
    for i in set(range(len(words))) - undecided:
        assert after[i] == own.exact_sum(0.25, beta, 1.5, 2.0**-14, i)


@pytest.mark.parametrize(
    "beta", [2.0, *(pytest.param(b, marks=pytest.mark.slow) for b in (1.0, 1.5, 4.0))]
)
def test_the_tail_beyond_the_layers_is_the_law_s(beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # layers that end near the peak, so that most draws are in the tail
    near = layers_beyond(beta, 2.0)
    assert near.heights[-1] >= 1
    assert np.diff(near.strips).max() <= near.strip
    law = stats.gennorm(beta)
    with monkeypatch.context() as patch:
        patch.setattr(ziggurat, "layers", lambda beta: near)
        values = pending_draws(beta, 100_000, 1.0, stream())
    assert len(values.tails) > 500
    assert stats.kstest(values.start, law.cdf).pvalue > 1e-3
    far = np.abs(values.start[sorted(values.tails)])
    assert far.min() >= near.edge

    def cdf(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray(1 - law.sf(x) / law.sf(near.edge))

    assert stats.kstest(far, cdf).pvalue > 1e-3
    assert stats.kstest(near.edge + 0.8 * (far - near.edge), cdf).pvalue < 1e-6


def test_sums_are_rounded_as_real_numbers_are() -> None:
    """Against rational arithmetic, for locations of every size, with all bits of the draw at hand."""
    scale, source = 1.7, stream()
    step = Fraction(grid_spacing(scale))
    for size in (1e-9, 1.0, 1e3, 1e9, 1e18):
        location = size * np.random.default_rng(1).normal(size=400)
        values = pending_draws(2.0, 400, scale / grid_spacing(scale), source)
        layer, place = values.words & LAYERS - 1, values.words >> PLACE_SHIFT
        result = location.copy()
        assert not values.add_to(result, grid_spacing(scale), source)
        for i in set(range(400)) - set(values.tails):
            width = Fraction(float(layers(2.0).cells[layer[i]]))
            ends = int(place[i]) * width, (int(place[i]) + 1) * width
            sums = [Fraction(float(location[i])) + Fraction(scale) * end for end in ends]
            rounded = [math.floor(value / step + Fraction(1, 2)) for value in sums]
            assert float(result[i]) in [float(k * step) for k in rounded]


def test_where_a_place_straddles_a_boundary_further_bits_decide() -> None:
    step, width = grid_spacing(1.0), float(layers(2.0).cells[0])
    # a quarter of the place lies below the boundary between two multiples of the grid
    start = 100.5 * step - width / 4
    above = undecided = 0
    for seed in range(2000):
        result = np.zeros(1)
        draw = PendingDraws(2.0, 1 / step, np.zeros(1, np.int64), np.array([start / step]))
        undecided += len(draw.add_to(result, step, stream(seed)))
        assert float(result[0]) in (100 * step, 101 * step)
        above += float(result[0]) == 101 * step
    assert undecided < 50  # nearer than 2**-28 to the boundary, with 53 further bits
    assert stats.binomtest(above, 2000, 0.75).pvalue > 1e-6
    assert stats.binomtest(above, 2000, 0.5).pvalue < 1e-6


def test_a_height_next_to_the_curve_is_settled_with_further_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With every height taken for unsure, the draws are the same but where a third proposal is made."""
    exact_sums: list[float] = []

    def counted(*arguments: object) -> float:
        exact_sums.append(exact_sum(*arguments))  # type: ignore[arg-type]
        return exact_sums[-1]

    few = add_noise(torch.zeros(60_000, dtype=torch.float64), 2.0, 1.0, stream())
    monkeypatch.setattr(ziggurat, "exact_sum", counted)
    monkeypatch.setattr(ziggurat, "_SURE", 10.0)
    result = add_noise(torch.zeros(60_000, dtype=torch.float64), 2.0, 1.0, stream())
    assert len(exact_sums) > 200
    assert set(exact_sums) <= set(result.tolist())
    assert stats.kstest(result.numpy(), stats.gennorm(2.0).cdf).pvalue > 1e-3
    assert int((result != few).sum()) < 6
