"""Thresholds of blocks from public gradient norms, against each record alone."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.clipping.blocks import Principal
from hush.core.errors import DataError
from hush.training.methods.public_bases import principal_basis
from hush.training.methods.thresholds import Norms, thresholds_of
from tests.gradients.oracle import one_at_a_time

EACH = nn.CrossEntropyLoss(reduction="none")


def problem(records: int) -> tuple[nn.Module, tuple[Tensor, Tensor], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 5))
    size = sum(parameter.numel() for parameter in model.parameters())
    return model, (torch.randn(records, 10), torch.randint(0, 5, (records,))), size


def test_norms_are_those_of_each_record_alone() -> None:
    model, data, size = problem(150)
    frame = principal_basis(
        model, EACH, data, (4, 9, size - 13), Principal(groups=2), torch.Generator().manual_seed(0)
    )
    gradients = one_at_a_time(model, EACH, *data, 150).double()
    whole = Norms.of(model, nn.CrossEntropyLoss(), data)
    assert whole.l2.shape == (150, 1)
    torch.testing.assert_close(whole.l2[:, 0], gradients.norm(dim=1), rtol=1e-5, atol=0)
    torch.testing.assert_close(whole.linf[:, 0], gradients.abs().amax(1), rtol=1e-5, atol=0)
    parts = Norms.of(model, EACH, data, frame)
    blocks = frame.blocks(gradients.float())
    for column, block in enumerate(blocks.values()):
        expected = block.double().norm(dim=1), block.double().abs().amax(1)
        torch.testing.assert_close(parts.l2[:, column], expected[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(parts.linf[:, column], expected[1], rtol=1e-4, atol=1e-6)
    # subspaces and residual are orthogonal: Pythagoras
    torch.testing.assert_close(parts.l2.square().sum(1), whole.l2[:, 0].square(), rtol=1e-4, atol=0)


def test_expected_norms_share_the_whole_and_entries_are_capped_at_a_quantile() -> None:
    generator = torch.Generator().manual_seed(1)
    l2 = 0.1 + torch.rand(4000, 3, generator=generator, dtype=torch.float64) * torch.tensor([4.0, 2, 1])
    linf = l2 * (0.1 + 0.4 * torch.rand(4000, 3, generator=generator, dtype=torch.float64))
    thresholds = thresholds_of(Norms(l2=l2, linf=linf), norm=2.5, quantile=0.99)
    assert math.hypot(*thresholds.l2) == pytest.approx(2.5)
    for j in (1, 2):
        assert thresholds.l2[j] / thresholds.l2[0] == pytest.approx(
            float(l2[:, j].mean() / l2[:, 0].mean())
        )
    for j, (bound, cap) in enumerate(zip(thresholds.l2, thresholds.linf, strict=True)):
        clipped = [e * min(1.0, bound / n) for e, n in zip(linf[:, j], l2[:, j], strict=True)]
        assert 0.989 <= sum(bool(e <= cap) for e in clipped) / 4000 <= 0.991
        assert 0 < cap <= bound


def test_public_records_give_a_clipping_with_their_share_of_the_norm() -> None:
    model, (x, y), size = problem(200)
    ranks, bases = (4, 9, size - 13), Principal(groups=1)
    fit = partial(hush.public_thresholds, model, EACH, (x, y), ranks=ranks, norm=2.0, bases=bases)
    clipping = fit(entries=True, quantile=0.9)
    assert math.hypot(*clipping.l2) == pytest.approx(2.0)
    # the basis of the first 120 records, and the gradients of the others written out
    basis = principal_basis(
        model, EACH, (x[:120], y[:120]), ranks, bases, torch.Generator().manual_seed(0)
    )
    blocks = basis.blocks(one_at_a_time(model, EACH, x[120:], y[120:], 80)).values()
    expected = torch.stack([block.double().norm(dim=1).mean() for block in blocks])
    shares = torch.tensor(clipping.l2, dtype=torch.float64)
    torch.testing.assert_close(shares, 2 * expected / expected.norm(), rtol=1e-4, atol=0)
    assert clipping.linf is not None
    assert all(cap <= bound for cap, bound in zip(clipping.linf, clipping.l2, strict=True))
    plain = fit()
    assert (plain.l2, plain.linf) == (clipping.l2, None)
    hush.Plan(sampling=hush.Poisson(0.1), clipping=clipping, noise=hush.Gaussian(1.0))


def test_records_that_fit_into_the_subspaces_are_refused() -> None:
    model, (x, y), size = problem(40)
    same = x[:1].expand(40, -1), y[:1].expand(40)
    with pytest.raises(DataError, match="as good as zero"):
        hush.public_thresholds(
            model, EACH, same, ranks=(4, size - 4), bases=Principal(groups=1), norm=1.0
        )
