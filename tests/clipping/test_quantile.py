"""Quantile clipping: a record's vector, the joint charge, and the recursion of the clipping norm."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm as normal
from torch import Tensor, nn

import hush
from hush.core.errors import Unsupported
from hush.gradients.tape import GradientTape, MaskedTape, unit_tape
from hush.gradients.terms import Dense
from hush_recipes.audit.self_test import self_test
from tests.training.helpers import plan_of, run, step_of, weights_of

RECORDS = 200


def tape_of(rows: Tensor) -> GradientTape:
    return GradientTape(terms={"w": Dense(rows)}, device=rows.device)


def vector_of(clipping: hush.Quantile, tape: Any, current: float) -> Tensor:
    total = clipping.clip(tape, None, torch.tensor(current, dtype=torch.float64)).total
    return torch.cat([part.reshape(-1) for part in total.values()])


@given(
    length=st.one_of(st.floats(0, 1e30), st.just(math.inf), st.just(math.nan)),
    norm=st.floats(1e-12, 1e12),
    moved=st.floats(1e-6, 1e6),
    share=st.floats(1e-3, 0.25),
    kind=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_vector_of_a_record_is_in_the_ball(
    length: float, norm: float, moved: float, share: float, kind: torch.dtype
) -> None:
    row = (torch.tensor([[0.6, 0.8]], dtype=torch.float64) * length).to(kind)
    vector = vector_of(hush.Quantile(norm, share=share), tape_of(row), norm * moved)
    assert vector.norm() <= norm * (1 + 1e-6)
    assert (
        vector[-1].abs() == pytest.approx(share * norm, rel=1e-6) or 0.74 < length / norm / moved < 1.26
    )


def test_a_vector_without_room_for_the_count_leaves_the_ball(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hush.Quantile, "gradient_norm", property(lambda self: self.norm))
    row = torch.tensor([[30.0, 40.0]])
    assert vector_of(hush.Quantile(1.0, share=0.25), tape_of(row), 1.0).norm() > 1.03
    step = problem(hush.Quantile(1.0, share=0.25))
    with pytest.raises(Unsupported, match="sensitivity"):
        self_test(step, data())


def test_empty_slots_and_users_add_zero() -> None:
    rows = torch.tensor([[0.1, 0.0], [30.0, 40.0], [math.nan, 1.0]])
    clipping, absent = hush.Quantile(1.0), torch.zeros(3, dtype=torch.bool)
    assert not vector_of(clipping, MaskedTape(tape_of(rows), absent), 1.0).any()
    one = vector_of(clipping, MaskedTape(tape_of(rows), torch.tensor([True, False, False])), 1.0)
    assert torch.equal(one, vector_of(clipping, tape_of(rows[:1]), 1.0))
    # two users of one and two records; the first has none that is there
    users = unit_tape(tape_of(rows), torch.tensor([1, 2]), "sum", torch.tensor([False, True, False]))
    assert torch.equal(vector_of(clipping, users, 1.0), vector_of(clipping, tape_of(rows[1:2]), 1.0))


@pytest.mark.parametrize(("multiplier", "share"), [(1.0, 0.05), (2.0, 0.25)])
def test_the_charge_is_that_of_the_joint_mechanism(multiplier: float, share: float) -> None:
    """Theorem 1 of Andrew et al. (2021), and the closed form of the Gaussian mechanism."""
    of_gradient, of_count = multiplier / math.sqrt(1 - share**2), multiplier / (2 * share)
    moved = math.hypot(1 / of_gradient, 0.5 / of_count)

    def excess(epsilon: float) -> float:
        upper = normal.cdf(moved / 2 - epsilon / moved)
        return float(upper - math.exp(epsilon) * normal.cdf(-moved / 2 - epsilon / moved) - 1e-5)

    plan = plan_of(clipping=hush.Quantile(3.0, share=share), noise=multiplier)
    cost = hush.epsilon(plan, 1, 1e-5).epsilon
    assert cost.lower <= brentq(excess, 0.0, 100.0) * (1 + 1e-9)
    assert brentq(excess, 0.0, 100.0) <= cost.upper <= cost.lower * 1.001
    # the gradient alone would cost less
    alone = hush.epsilon(plan_of(noise=of_gradient), 1, 1e-5).epsilon
    assert alone.upper < cost.lower


def data() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    inputs = torch.randn(RECORDS, 3, generator=drawn).exp()
    return inputs, torch.ones(RECORDS)


def problem(clipping: hush.Quantile, **options: Any) -> hush.PrivateStep:
    """Gradients that do not depend on the weights: the inputs themselves."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"noise": 1e-9, "lr": 0.1, **options}
    plan = plan_of(settings.pop("sampling", None), clipping, settings.pop("noise"))
    model = nn.Linear(3, 1, bias=False)
    return step_of(model, plan, lambda out, y: out[:, 0] * y, records=RECORDS, seed=1, **settings)


def reference(clipping: hush.Quantile, steps: int) -> tuple[float, np.ndarray[Any, Any]]:
    """Last clipping norm and sum of the updates without noise."""
    rows = data()[0].double().numpy()
    lengths, current, total = np.linalg.norm(rows, axis=1), clipping.norm, np.zeros(3)
    for _ in range(steps):
        total += (rows * np.minimum(1, current / lengths)[:, None]).mean(0)
        below = np.interp(lengths / current, [0.75, 1.25], [1.0, 0.0]).mean()
        current *= math.exp(-clipping.learning_rate * (below - clipping.quantile))
    return current, total


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_the_norm_follows_the_recursion_to_the_quantile(quantile: float) -> None:
    clipping = hush.Quantile(0.01, quantile=quantile, learning_rate=0.5)
    step = problem(clipping)
    before = weights_of(step.model)
    for steps in (5, 95):
        run(step, data(), steps)
    current, total = reference(clipping, 100)
    assert step.clip_norm == pytest.approx(current, rel=1e-4)
    moved = (before - weights_of(step.model)) / 0.1
    np.testing.assert_allclose(moved.numpy(), total, rtol=1e-4)
    lengths = data()[0].norm(dim=1)
    assert float((lengths < current).float().mean()) == pytest.approx(quantile, abs=0.05)


def test_noise_on_gradient_and_count_is_the_charged_one() -> None:
    """With no record in the slots, updates are noise alone; the norm moves by that of the count."""
    clipping = hush.Quantile(1e-3, share=0.2, learning_rate=0.1)
    step = problem(clipping, noise=2.0)
    counts, gradients = [], []
    for batch in step.batches(data(), steps=400, present=torch.zeros(RECORDS, dtype=torch.bool)):
        before, weights = step.clip_norm, weights_of(step.model)
        step(batch)
        assert before is not None
        assert step.clip_norm is not None
        counts.append(math.log(before / step.clip_norm) / 0.1 * RECORDS)
        gradients.append((weights - weights_of(step.model)) / 0.1 * RECORDS / before)
    spread = float(torch.stack(gradients).std())
    assert spread == pytest.approx(2.0 / math.sqrt(1 - 0.2**2), rel=0.1)
    assert np.std(counts) == pytest.approx(2.0 / (2 * 0.2), rel=0.12)
    assert abs(np.mean(counts)) < 4 * 5.0 / math.sqrt(400)


@pytest.mark.parametrize("sampling", [hush.Poisson(0.3), hush.FullBatch()])
def test_a_resumed_run_has_the_same_norms(sampling: Any) -> None:
    clipping = hush.Quantile(0.1)
    whole = run(problem(clipping, sampling=sampling, noise=1.0), data(), 6)
    first = run(problem(clipping, sampling=sampling, noise=1.0), data(), 3)
    second = problem(clipping, sampling=sampling, noise=1.0, ledger=first.ledger)
    assert second.clip_norm == 0.1
    second.load_state_dict(first.state_dict())
    assert second.clip_norm == first.clip_norm != 0.1
    run(second, data(), 3)
    assert second.clip_norm == whole.clip_norm
    assert torch.equal(weights_of(second.model), weights_of(whole.model))


def test_the_self_test_leaves_the_norm() -> None:
    step = run(problem(hush.Quantile(0.1), noise=1.0), data(), 3)
    before = step.clip_norm
    self_test(step, data())
    assert step.clip_norm == before


def test_a_replay_would_keep_the_norm() -> None:
    with pytest.raises(Unsupported, match="norm of Quantile changes"):
        problem(hush.Quantile(), execution=hush.Execution(replay=True))


def test_a_mean_has_no_next_step() -> None:
    with pytest.raises(Unsupported, match="not by Quantile"):
        hush.mean([[1.0, 2.0]], plan_of(clipping=hush.Quantile(1.0)), delta=0.1)


def test_layers_are_clipped_one_by_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2, bias=False), nn.Linear(2, 2))
    model[3].requires_grad_(False)
    clipping = hush.Subspaces.per_layer(model, 0.2)
    assert clipping.ranks == (15, 6)
    assert clipping.reference_norm == pytest.approx(0.2)
    plan = plan_of(clipping=clipping)
    assert hush.rdp(plan, [2.0]) == pytest.approx(hush.rdp(plan_of(clipping=hush.L2(0.2)), [2.0]))
    inputs, targets = torch.randn(8, 4), torch.randint(0, 2, (8,))
    step = step_of(model, plan, records=8, seed=0)
    summed = step.clipped_sum(next(step.batches((inputs, targets))))
    expected = torch.zeros(21, dtype=torch.float64)
    trained = [value for value in model.parameters() if value.requires_grad]
    for x, y in zip(inputs, targets, strict=True):
        loss = nn.functional.cross_entropy(model(x[None]), y[None])
        flat = torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, trained)]).double()
        for layer in (slice(0, 15), slice(15, 21)):
            bound = 0.2 / math.sqrt(2)
            expected[layer] += flat[layer] * min(1.0, bound / float(flat[layer].norm()))
    torch.testing.assert_close(summed, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(hush.errors.InvalidValue, match="no trainable parameter"):
        hush.Subspaces.per_layer(model.requires_grad_(False), 1.0)
