import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hush
from hush.clipping.norms import clipping_weights
from hush.core.parts import SensitivitySet
from hush.core.tape import ClippedSum, CoordinateMask
from hush.gradients.recording import record


class Rows:
    """A tape of rows."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def norms(self, order: float) -> torch.Tensor:
        norms: torch.Tensor = self.rows.norm(order, dim=1)
        return norms

    def weighted_sum(self, weights: torch.Tensor, max_norm: float = math.inf) -> dict[str, torch.Tensor]:
        return {"rows": (weights[:, None] * self.rows)[weights != 0].sum(0)}

    def clip_entrywise(
        self, sensitivity: Sequence[SensitivitySet], mask: CoordinateMask | None
    ) -> ClippedSum:
        raise NotImplementedError


@given(
    entries=st.lists(st.floats(-1e50, 1e50), min_size=3, max_size=3),
    norm=st.floats(1e-12, 1e12),
    p=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
)
def test_one_record_lands_in_the_ball_and_keeps_its_direction(
    entries: list[float], norm: float, p: float
) -> None:
    row = torch.tensor([entries], dtype=torch.float64)
    clipped = hush.Lp(p=p, norm=norm).clip(Rows(row)).total["rows"]
    assert clipped.norm(p) <= norm * (1 + 1e-12)
    if row.norm(p) < norm * (1 - 1e-12):
        assert torch.equal(clipped, row[0])


def test_records_that_are_not_finite_are_left_out_and_counted() -> None:
    rows = torch.tensor([[3.0, 4.0], [math.nan, 1.0], [math.inf, 0.0], [0.0, 0.0]])
    clipped = hush.Lp(p=2.0, norm=1.0).clip(Rows(rows))
    torch.testing.assert_close(clipped.total["rows"], torch.tensor([0.6, 0.8]))
    assert int(clipped.skipped) == 2


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
        clipped, next_clipped = (weights(norm, each.to(kind)).double() * each for each in (norms, after))
        assert float(clipped.max()) <= norm * (1 + 1e-6)
        return float((clipped - next_clipped).abs().max())

    assert jump(clipping_weights) <= 1e-6 * norm
    # a weight that is cut off where it gets too small is caught
    if norm <= 1:
        assert jump(_cut_off) > 0.99 * norm


def _cut_off(norm: float, norms: Tensor) -> Tensor:
    weights = (norm / norms).clamp(max=1.0)
    return weights.where(weights >= torch.finfo(torch.float32).tiny, 0.0)
