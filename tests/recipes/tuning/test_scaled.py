"""Scale-then-privatize: against NumPy, one record's influence, and broken versions; AdamBC."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import Unsupported
from hush.core.parts import ClippedSum
from hush_recipes.audit.self_test import self_test
from hush_recipes.tuning import optimizers
from hush_recipes.tuning.scaled import AdamBC, ScaledStep, ScaledTape
from tests.training.helpers import plan_of, randomness

RECORDS, FEATURES, CLASSES, NORM = 40, 5, 3, 0.5
SCALES = torch.tensor([30.0, 10.0, 1.0, 0.1, 0.01])


def records() -> tuple[Tensor, Tensor]:
    """Features of very different lengths."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, FEATURES, generator=source) * SCALES
    return x, torch.randint(0, CLASSES, (RECORDS,), generator=source)


def step_of(plan: hush.Plan, kind: Any = ScaledStep, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"records": RECORDS, "randomness": randomness(1), **options}
    return kind(model, nn.CrossEntropyLoss(), optimizer, plan, **options)


def test_the_steps_are_those_of_numpy() -> None:
    """Softmax gradients, scales and updates in double precision, without noise."""
    step = step_of(plan_of(hush.FullBatch(), hush.L2(NORM), 1e-7), floor=0.5, decay=0.9)
    x, y = records()
    weights = step.model.weight.detach().double().numpy().copy()
    rows, labels = x.double().numpy(), np.eye(CLASSES)[y.numpy()]
    moments, scale = np.zeros(weights.size), np.ones(weights.size)
    for batch in step.batches((x, y), steps=4):
        step(batch)
        scores = np.exp(rows @ weights.T)
        errors = scores / scores.sum(1, keepdims=True) - labels
        gradients = (errors[:, :, None] * rows[:, None, :]).reshape(RECORDS, -1) * scale
        lengths = np.linalg.norm(gradients, axis=1)
        mean = (gradients * np.minimum(1, NORM / lengths)[:, None]).sum(0) / RECORDS / scale
        weights -= 0.1 * mean.reshape(weights.shape)
        moments = 0.9 * moments + 0.1 * mean**2
        roots = np.sqrt(moments)
        scale = 1 / (roots + 0.5 * np.sqrt((roots**2).mean()))
        scale /= np.sqrt((scale**2).mean())
        np.testing.assert_allclose(step.model.weight.detach().numpy(), weights, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(step.scale.numpy(), scale, rtol=1e-3)
    assert scale.max() / scale.min() > 1.5


class ClippedFirst(ScaledStep):
    """Broken: the gradient is clipped before it is scaled."""

    def clip_physical_batch(self, *parts: Any) -> ClippedSum:
        clipped = super(ScaledStep, self).clip_physical_batch(*parts)
        flat = torch.cat([part.flatten() for part in clipped.total.values()])
        return ClippedSum(total={"scaled": flat * self.scale}, skipped=clipped.skipped)


class OwnScale(ScaledStep):
    """Broken: the scale comes from the batch itself."""

    def clip_physical_batch(
        self, inputs: Any, targets: Any, basis: Any, present: Any, counts: Any
    ) -> ClippedSum:
        kept, tape = self.scale, self.gradients.record(inputs, targets)
        there = torch.ones(len(targets)) if present is None else present.float()
        total = ScaledTape(tape, torch.ones_like(kept)).weighted_sum(there)["scaled"]
        self.scale = 1 / (total.abs() + 1e-3)
        clipped = super().clip_physical_batch(inputs, targets, basis, present, counts)
        self.scale = kept
        return clipped


def influence(kind: type[ScaledStep]) -> float:
    """Largest change of the clipped sum by one record, in units of the clipping norm."""
    x, y = records()
    step = step_of(plan_of(hush.FullBatch(), hush.L2(NORM), 1e-7), kind, floor=0.1)
    step.scale = torch.linspace(0.1, 3.0, FEATURES * CLASSES, dtype=torch.float64)
    batch = next(step.batches((x, y), steps=1))
    whole = step.clipped_sum(batch).clone()
    changes = []
    for slot in range(RECORDS):
        present = torch.arange(RECORDS) != slot
        without = step_of(plan_of(hush.FullBatch(), hush.L2(NORM), 1e-7), kind, floor=0.1)
        without.scale = step.scale
        one_less = next(without.batches((x, y), steps=1, present=present))
        changes.append(float((whole - without.clipped_sum(one_less)).norm()) / NORM)
    return max(changes)


def test_one_record_moves_the_sum_by_at_most_the_norm_and_in_broken_versions_by_more() -> None:
    assert 0.5 < influence(ScaledStep) <= 1 + 1e-6
    assert influence(ClippedFirst) > 1.2
    assert influence(OwnScale) > 1.2


def test_it_passes_the_self_test_and_is_charged_like_any_step() -> None:
    plan = plan_of(hush.Poisson(0.5), hush.L2(NORM), 1.0)
    step, plain = step_of(plan), step_of(plan, hush.PrivateStep)
    for each in (step, plain):
        for batch in each.batches(records(), steps=3):
            each(batch)
    assert step.spent(1e-3).epsilon == plain.spent(1e-3).epsilon
    self_test(step, records())


def test_other_clipping_and_checkpoints_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"clipping=hush\.L2"):
        step_of(plan_of(hush.Poisson(0.5), hush.Linf(0.1), 1.0))
    with pytest.raises(Unsupported, match="no checkpoints"):
        step_of(plan_of(hush.Poisson(0.5), hush.L2(NORM), 1.0)).state_dict()


def test_adam_without_noise_is_adam_and_noise_is_subtracted() -> None:
    torch.manual_seed(0)
    gradients = torch.randn(6, 4)
    own, reference, corrected = (nn.Parameter(torch.zeros(4)) for _ in range(3))
    pairs: list[tuple[nn.Parameter, torch.optim.Optimizer]] = [
        (own, AdamBC([own], 0.1, deviation=0.0, floor=1e-16)),
        (reference, torch.optim.Adam([reference], 0.1)),
        (corrected, AdamBC([corrected], 0.1, deviation=0.7, floor=0.01)),
    ]
    for gradient in gradients:
        for value, optimizer in pairs:
            value.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(own, reference)
    mean = square = np.zeros(4)
    weights = np.zeros(4)
    for number, gradient in enumerate(gradients.double().numpy(), start=1):
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        fixed = np.maximum(square / (1 - 0.999**number) - 0.7**2, 0.01)
        weights = weights - 0.1 * mean / (1 - 0.9**number) / np.sqrt(fixed)
    np.testing.assert_allclose(corrected.detach().numpy(), weights, rtol=1e-4)


def test_the_recipe_has_a_row_for_every_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "OF_SGD", (1.0,))
    monkeypatch.setattr(optimizers, "OF_ADAM", (0.03,))
    rows = optimizers.tuning_optimizers(seeds=1, steps=3, only="digits").rows
    assert [row[1] for row in rows] == ["SGD", "Adam", "AdamW", "AdamBC", "scale-then-privatize"]
    assert all(5 <= float(str(row[3])) <= 100 for row in rows)
