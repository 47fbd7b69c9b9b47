from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.clipping.norms import weights_within
from hush.gradients.recording import record


def test_it_is_the_l_p_clipping_of_order_two() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(9, 4) * torch.logspace(-2, 2, 9)[:, None]
    loss = nn.CrossEntropyLoss(reduction="none")
    tape = record(nn.Linear(4, 3), loss, inputs, torch.randint(0, 3, (9,)))
    ours, general = hush.L2(norm=0.7).clip(tape), hush.Lp(p=2.0, norm=0.7).clip(tape)
    assert all(torch.equal(ours.total[name], general.total[name]) for name in ours.total)
    assert hush.L2(norm=0.7).reference_norm == hush.Lp(p=2.0, norm=0.7).reference_norm == 0.7


@pytest.mark.parametrize("norm", [1e-12, 1e-6, 0.1, 1.0, 1e6, 1e12])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_a_last_bit_of_a_norm_moves_a_record_by_next_to_nothing(norm: float, kind: torch.dtype) -> None:
    """Over all magnitudes: within the norm, and no jump from there to nothing."""
    norms = torch.logspace(-38, 38, 20_000, dtype=torch.float64).to(kind)
    edges = torch.tensor(
        [norm * 2.0**k for k in (0, 101, 102, 126)] + [2.0**100, 2.0**101], dtype=torch.float64
    )
    norms = torch.cat([norms, edges.to(kind)])
    after = torch.nextafter(norms, norms + norms)
    norms, after = (each[after.isfinite()].double() for each in (norms, after))

    def jump(weights: Callable[[float, Tensor], Tensor]) -> float:
        here, there = (weights(norm, each.to(kind)).double() * each for each in (norms, after))
        assert float(here.max()) <= norm * (1 + 1e-6)
        return float((here - there).abs().max())

    assert jump(weights_within) <= 1e-6 * norm
    # a weight that is cut off where it gets too small is caught
    if norm <= 1:
        assert jump(_cut_off) > 0.99 * norm


def _cut_off(norm: float, norms: Tensor) -> Tensor:
    weights = (norm / norms).clamp(max=1.0)
    return weights.where(weights >= torch.finfo(torch.float32).tiny, 0.0)
