"""What forward passes change for all records alike: nothing of it tells how many slots were drawn."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import binom, nbinom, norm
from torch import Tensor, nn

import hush
from hush.core.errors import Unsupported
from hush.gradients.checks.module_state import ModuleState
from hush.training.methods.selective import Trials
from hush_recipes.dpsur.adaptive import Adaptive, AdaptiveDescent

RECORDS = 20
INPUTS = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(RECORDS) % 3


class Counting(nn.Module):
    """Counts its passes, in a buffer and in an attribute, and turns its sign with each."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        nn.init.zeros_(self.linear.weight)  # before the first step the sign shows in gradients alone
        nn.init.zeros_(self.linear.bias)
        self.register_buffer("calls", torch.zeros(()))
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.passes += 1
        return self.linear(x) * (1 - 2 * torch.remainder(self.calls, 2))  # type: ignore[no-any-return]


def power_iteration() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)))


MODELS: list[Callable[[], nn.Module]] = [
    Counting,
    power_iteration,
    lambda: nn.utils.spectral_norm(nn.Linear(4, 3)),
]


def step_of(
    model: nn.Module, physical_batch: int | None, release: hush.Selective | None = None
) -> hush.PrivateStep:
    plan = hush.Plan(
        sampling=hush.Poisson(rate=0.05),
        clipping=hush.L2(norm=1.0),
        noise=hush.Gaussian(multiplier=1.0),
        release=release or hush.Always(),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hush.PrivateStep(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        plan,
        records=RECORDS,
        execution=hush.Execution(physical_batch=physical_batch),
        randomness=hush.Randomness(generator=torch.Generator().manual_seed(3)),
    )


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], atol=1e-6) for name in one | other)


@pytest.mark.parametrize("physical_batch", [1, None])
@pytest.mark.parametrize("make", MODELS, ids=["counter", "parametrized", "spectral norm"])
def test_a_step_moves_such_state_on_by_one_pass_whoever_was_drawn(
    make: Callable[[], nn.Module], physical_batch: int | None
) -> None:
    torch.manual_seed(0)
    model = make()
    step = step_of(model, physical_batch)
    drawn = set()
    for batch in step.batches((INPUTS, TARGETS), steps=12):
        once = make()
        before = buffers(model)
        passes = getattr(model, "passes", -1)
        step(batch)
        once.load_state_dict({**model.state_dict(), **before})
        once(torch.zeros(1, 4))
        drawn.add(len(batch))
        assert same(buffers(model), buffers(once))
        assert getattr(model, "passes", 0) == passes + 1
    assert 0 in drawn
    assert max(drawn) > 1
    assert step.spent(1e-3).epsilon.upper > 0


def test_without_putting_it_back_the_number_drawn_is_read_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModuleState, "rewind", lambda self: None)
    model = Counting()
    step = step_of(model, 1)
    read, drawn = [], []
    for batch in step.batches((INPUTS, TARGETS), steps=12):
        before = float(model.calls)
        step(batch)
        read.append(float(model.calls) - before - 1)
        drawn.append(len(batch))
    assert read == drawn


def test_who_knows_the_number_drawn_learns_more_than_is_charged() -> None:
    """The number k drawn is independent of the records: known, each slot took part with chance k / n.

    The loss of 100 steps by Fourier transforms, rounded down: a lower bound on epsilon.
    """
    records, rate, steps, delta, cell = RECORDS, 0.05, 100, 1e-5, 1e-3
    edges = np.linspace(-12, 13, 100_001)
    middle = (edges[1:] + edges[:-1]) / 2
    empty, there = (np.diff(norm.cdf(edges, mean)) for mean in (0, 1))
    step = np.zeros(2**17)
    for drawn in range(records + 1):
        share = drawn / records
        loss = np.log1p(share * np.expm1(middle - 0.5))
        mass = binom.pmf(drawn, records, rate) * ((1 - share) * empty + share * there)
        np.add.at(step, np.floor(loss / cell).astype(int), mass)  # negative losses from the end
    total = np.fft.ifft(np.fft.fft(step) ** steps).real
    losses = cell * np.fft.fftfreq(len(step), 1 / len(step))
    plan = hush.Plan(
        sampling=hush.Poisson(rate=rate), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
    )
    assert hush.epsilon(plan, steps, delta).epsilon.upper == pytest.approx(3.502, abs=1e-3)
    above = losses > 5.25
    assert -(total[above] * np.expm1(5.25 - losses[above])).sum() > delta


def test_a_record_s_gradient_does_not_depend_on_the_passes_before_it() -> None:
    """The model turns its sign with every pass: sums in one pass and in several are the same."""
    sums = []
    for physical_batch in (RECORDS, 1, 3):
        torch.manual_seed(0)
        step = step_of(Counting(), physical_batch)
        batch = next(step.batches((INPUTS, TARGETS), steps=1))
        full = type(batch)(torch.arange(RECORDS), batch.data, physical_batch)
        sums.append(step.clipped_sum(full).clone())
    assert float(sums[0].norm()) > 1
    for other in sums[1:]:
        assert torch.allclose(sums[0], other, atol=1e-6)


def test_trials_of_a_selective_step_leave_no_count() -> None:
    torch.manual_seed(0)
    model = Counting()
    release = hush.Selective(rate=0.2, clip=1.0, multiplier=2.0)
    step = step_of(model, 1, release)
    for batch in step.batches((INPUTS, TARGETS), steps=6):
        before = float(model.calls)
        step(batch)
        assert float(model.calls) == before + 1
    assert step.spent(1e-3).epsilon.upper > 0


@pytest.mark.parametrize("make", MODELS, ids=["counter", "parametrized", "spectral norm"])
def test_hidden_trials_of_an_update_are_not_counted(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many there were is secret (docs/guarantees/selective.md): state moves on once an update."""
    verdicts: list[bool] = []
    verdict = Trials.noisy_verdict

    def noted(trials: Trials, rise: Tensor) -> bool:
        verdicts.append(verdict(trials, rise))
        return verdicts[-1]

    monkeypatch.setattr(Trials, "noisy_verdict", noted)
    torch.manual_seed(0)
    model = make()
    release = hush.Selective(
        rate=1.0, clip=1.0, multiplier=0.8, accounting="per-acceptance", test="mean"
    )
    step = step_of(model, None, release)
    for batch in step.batches((INPUTS, TARGETS), steps=4):
        before = buffers(model)
        step(batch)
        once = make()
        once.load_state_dict({**model.state_dict(), **before})
        once(torch.zeros(1, 4))
        assert same(buffers(model), buffers(once))
    assert len(verdicts) > 8


def test_who_knows_the_hidden_trials_learns_more_than_is_charged() -> None:
    """A record that moves the clipped mean from one end to the other: trials until 30 are accepted."""
    updates, delta = 30, 1e-5
    plan = hush.Plan(
        sampling=hush.Poisson(rate=0.001),
        clipping=hush.L2(norm=1.0),
        noise=hush.Gaussian(multiplier=50.0),
        release=hush.Selective(
            rate=1.0, clip=1.0, multiplier=0.8, threshold=8.0, accounting="per-acceptance", test="mean"
        ),
    )
    assert isinstance(plan.release, hush.Selective)
    seldom, often = plan.release.acceptance(RECORDS)
    assert hush.epsilon(plan, updates, delta).epsilon.upper < 0.004
    rejected = np.arange(10_000)
    with_it, without = (nbinom.pmf(rejected, updates, accepted) for accepted in (seldom, often))
    assert np.maximum(with_it - np.exp(6.4) * without, 0).sum() > delta


@pytest.mark.parametrize("make", MODELS, ids=["counter", "parametrized", "spectral norm"])
def test_a_run_that_goes_on_moves_such_state_as_one_that_was_not_stopped(
    make: Callable[[], nn.Module],
) -> None:
    """The probe before the first draw of each leaves it where it was."""
    released = []
    for parts in ([8], [5, 3]):
        torch.manual_seed(0)
        model = make()
        step = step_of(model, None)
        for steps in parts:
            for batch in step.batches((INPUTS, TARGETS), steps=steps):
                step(batch)
        released.append(model.state_dict())
    assert all(torch.equal(released[0][name], released[1][name]) for name in released[0])


def test_a_model_that_takes_no_record_of_zeros_is_refused_before_any_draw() -> None:
    class Particular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = power_iteration()

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.linear(x)
            if not bool(x.any()):
                raise ValueError("an empty record")
            return scores

    step = step_of(Particular(), None)
    with pytest.raises(Unsupported, match=r"changes linear.* fails for a record of zeros \(an empty"):
        step.batches((INPUTS, TARGETS))


def test_an_adaptive_descent_counts_gradients_and_no_trials() -> None:
    torch.manual_seed(0)
    model = Counting()
    descent = AdaptiveDescent(
        model,
        nn.CrossEntropyLoss(),
        (INPUTS, TARGETS),
        hush.Budget(epsilon=2.0, delta=1e-3),
        Adaptive(clip=1.0, sizes=3, splits=6),
        generator=torch.Generator().manual_seed(0),
        physical_batch=7,
    )
    before = model.passes  # of the probe, on made-up records
    moves = sum(1 for _ in descent.run())
    assert moves > 1
    assert float(model.calls) == model.passes == before + moves + 1


def test_a_step_that_is_stopped_leaves_no_count() -> None:
    class Stopping(Counting):
        def forward(self, x: Tensor) -> Tensor:
            scores = super().forward(x)
            if self.stops:
                raise KeyboardInterrupt
            return scores

        stops = False

    model = Stopping()
    step = step_of(model, 1)
    for batch in step.batches((INPUTS, TARGETS)):
        if len(batch) > 1:
            break
        step(batch)
    before = float(model.calls)
    model.stops = True
    with pytest.raises(KeyboardInterrupt):
        step(batch)
    assert float(model.calls) == before
    model.stops = False
    assert step(batch)
