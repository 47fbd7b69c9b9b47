"""Attacks find who an overfit model was trained on, and nobody in a model that was not trained."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from hush_recipes.dpsur.membership import (
    Candidates,
    Verdict,
    black_box_shadow,
    confidences,
    lira,
    loss_threshold,
    losses,
    posteriors,
    split,
    white_box_features,
    white_box_partial,
)


def noise(records: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs that say nothing of their labels: all that can be learned is by heart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(records, 20, generator=generator)
    return x, torch.randint(3, (records,), generator=generator)


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 100), nn.Tanh(), nn.Linear(100, 3))


def trained(x: torch.Tensor, y: torch.Tensor, seed: int, steps: int) -> nn.Module:
    model = network(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def verdicts(steps: int) -> list[Verdict]:
    x, y = noise(1200, 0)
    parts = split(1200, torch.Generator().manual_seed(0))
    model = trained(x[parts.target_train], y[parts.target_train], 1, steps)
    shadow = trained(x[parts.shadow_train], y[parts.shadow_train], 2, steps)
    candidates = Candidates.of(x, y, parts.target_train[100:], parts.target_test[100:])
    labelled = Candidates.of(x, y, parts.target_train[:100], parts.target_test[:100])
    own = Candidates.of(x, y, parts.shadow_train, parts.shadow_test)
    return [
        loss_threshold(model, candidates, shadow, own),
        black_box_shadow(model, candidates, shadow, own),
        white_box_partial(model, candidates, labelled),
        lira(model, candidates, [shadow]),
    ]


def test_every_attack_finds_what_was_learned_by_heart() -> None:
    for verdict in verdicts(steps=60):
        assert verdict.accuracy().low > 0.6, verdict.name
        assert verdict.roc.auc > 0.8, verdict.name


def test_no_attack_finds_anything_in_models_that_were_not_trained() -> None:
    for verdict in verdicts(steps=0):
        accuracy = verdict.accuracy(confidence=0.9999)
        assert accuracy.low <= 0.5 <= accuracy.high, verdict.name
        assert 0.35 < verdict.roc.auc < 0.65, verdict.name


def test_what_is_seen_against_one_record_at_a_time() -> None:
    x, y = noise(7, 3)
    model = network(4)
    with torch.no_grad():
        list(model.parameters())[2][0] *= 200  # some probabilities round to 1
    from_outside, from_inside = posteriors(model, (x, y)), white_box_features(model, (x, y))
    double = copy.deepcopy(model).double()
    for k in range(7):
        double.zero_grad()
        logits = double(x[k : k + 1].double())
        loss = nn.functional.cross_entropy(logits, y[k : k + 1])
        loss.backward()
        assert losses(model, (x, y))[k] == pytest.approx(float(loss.detach()), abs=1e-4)
        exact = logits[0].detach()
        rest = torch.cat([exact[: y[k]], exact[y[k] + 1 :]])
        expected = float(exact[y[k]] - torch.log(torch.exp(rest - rest.max()).sum()) - rest.max())
        assert confidences(model, (x, y))[k] == pytest.approx(expected, rel=1e-5)
        assert from_outside[k, 3] == float(exact.argmax() == y[k])
        np.testing.assert_allclose(np.exp(from_outside[k, :3]).sum(), 1.0)
        norms = [float(value.grad.norm()) for value in double.parameters() if value.grad is not None]
        np.testing.assert_allclose(np.exp(from_inside[k, 6:10]), norms, rtol=1e-3, atol=1e-30)
    assert np.isfinite(confidences(model, (x, y))).all()
    assert from_inside.shape == (7, 4 + 1 + 1 + 4 + 64)
